"""Processes that are forked so that vLLM is imported once on a machine and weights are loaded once for a model."""
