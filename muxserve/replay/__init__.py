"""Sends a workload to an OpenAI-compatible endpoint at its own pace, and measures what a client sees."""
