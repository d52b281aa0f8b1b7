"""vLLM from above: stock `AsyncLLM` and OpenAI routes per model, over requests that the unit serves.

Everything here that relies on a vLLM internal is listed in `seam`.
"""
