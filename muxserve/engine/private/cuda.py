"""vLLM's GPU worker with its own KV cache and attention, and weights that another process holds."""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from muxserve.engine.cuda.graphs import ContextGraphs
from muxserve.engine.cuda.resuming import ResumingOnDevice
from muxserve.engine.cuda.runner import without_collecting
from muxserve.engine.cuda.worker import PooledGPUWorker

_LATENT = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"


class PrivateGPUModelRunner(ResumingOnDevice, GPUModelRunner):
    """vLLM's runner, whose requests may begin with output tokens."""

    _freeze_gc = staticmethod(without_collecting)

    # Of each set of SMs that the engine has; None: it has all.
    graphs: ContextGraphs | None = None

    def capture_model(self) -> int:
        return super().capture_model() if self.graphs is None else self.graphs.capture(super().capture_model)


class PrivateGPUWorker(PooledGPUWorker):
    """`worker_cls` of engines on GPUs with a cache of their own."""

    def init_device(self) -> None:
        # Where it is imported, one that knows the pool is in its place.
        register_backend(AttentionBackendEnum.TRITON_MLA, _LATENT)
        super().init_device()

    def _make_model_runner(self) -> PrivateGPUModelRunner:
        made = PrivateGPUModelRunner(self.vllm_config, self.device)
        if self._contexts is not None:
            made.graphs = ContextGraphs(self._contexts, self.device)
        return made

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Bytes of the cache, as the unit has planned them. Runs the largest batch, as on the pool."""
        self._run_largest_batch()
        self._enter_again()
        planned = self.cache_config.kv_cache_memory_bytes
        assert planned is not None
        return planned
