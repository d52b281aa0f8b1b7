"""The model runners of engines on GPUs, on the shared pool and with a cache of their own: over vLLM's second runner,
and before 0.33.0 over its first."""

from __future__ import annotations

from muxserve.vllm.since import since

if since("0.33.0"):
    from muxserve.engine.cuda.second_runner import SecondPooledRunner as PooledGPUModelRunner
    from muxserve.engine.cuda.second_runner import SecondPrivateRunner as PrivateGPUModelRunner
else:
    from muxserve.engine.cuda.first_runner import FirstPooledRunner as PooledGPUModelRunner
    from muxserve.engine.cuda.first_runner import FirstPrivateRunner as PrivateGPUModelRunner

__all__ = ["PooledGPUModelRunner", "PrivateGPUModelRunner"]
