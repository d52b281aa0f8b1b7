"""Engines on NVIDIA GPUs: FlashAttention with KV heads folded into sequences, on a pool that another process owns.

Importing this package or any of its modules calls nothing of CUDA: it is imported before processes are forked.
"""
