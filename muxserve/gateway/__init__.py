"""vLLM from above: stock `AsyncLLM` and OpenAI routes per model, over requests that the unit serves.

Begin with `gateway.Gateway`, which holds everything that the process has. `muxserve.vllm.gateway_internals` lists every
vLLM internal that this package relies on.
"""
