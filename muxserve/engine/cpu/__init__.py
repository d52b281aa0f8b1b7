"""Engines on CPU: vLLM's own CPU kernels and runner on a pool in POSIX shared memory."""
