"""vLLM's GPU worker with its own KV cache and attention, and weights that another process holds; and the worker of that
process."""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from muxserve.engine.cuda.runner import PrivateGPUModelRunner
from muxserve.engine.cuda.splits import MAX_PARTIAL_BYTES
from muxserve.engine.cuda.weight_holder import HolderWorker
from muxserve.engine.cuda.worker import PooledGPUWorker

_LATENT = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"


class PrivateGPUWorker(PooledGPUWorker):
    """`worker_cls` of engines on GPUs with a cache of their own."""

    runner_class = PrivateGPUModelRunner

    def init_device(self) -> None:
        use_own_attention()
        super().init_device()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Bytes of the cache, as the unit has planned them. Runs the largest batch, as on the pool."""
        self._run_largest_batch()
        self._enter_again()
        planned = self.cache_config.kv_cache_memory_bytes
        assert planned is not None
        return planned


class PrivateHolderWorker(HolderWorker):
    """`worker_cls` of holders for such engines: graphs are tried on a small cache of vLLM's own."""

    runner_class = PrivateGPUModelRunner

    def init_device(self) -> None:
        use_own_attention()
        super().init_device()

    def _attention_bytes(self) -> int:
        """As much as on the pool: there is no figure of vLLM's for partial results."""
        return MAX_PARTIAL_BYTES


def use_own_attention() -> None:
    """Have vLLM's backend for latents: where ours is imported, one that knows the pool is in its place."""
    register_backend(AttentionBackendEnum.TRITON_MLA, _LATENT)
