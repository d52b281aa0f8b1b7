"""vLLM from below: engine processes that run stock `EngineCore` on the shared page pool.

Everything here that relies on a vLLM internal is listed in `muxserve.vllm`.
"""
