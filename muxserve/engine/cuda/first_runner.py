"""vLLM's first model runner of GPUs, for engines on the shared pool and for those with a cache of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from muxserve.engine.cuda.graphs import CapturingRunner, without_collecting
from muxserve.engine.cuda.pooled import PooledOnDevice
from muxserve.engine.cuda.resuming import ResumingOnDevice
from muxserve.engine.runner import PooledRunner


class FirstPooledRunner(ResumingOnDevice, PooledOnDevice, PooledRunner, GPUModelRunner):
    """On the shared pool."""

    _freeze_gc = staticmethod(without_collecting)

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> dict[str, torch.Tensor]:
        return self._bind_pool()

    def _init_kv_zero_meta(self) -> None:
        """Nothing to prepare: see `_zero_block_ids`."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        self.zero(block_ids)


class FirstPrivateRunner(ResumingOnDevice, CapturingRunner, GPUModelRunner):
    """With vLLM's own cache; requests may begin with output tokens."""

    _freeze_gc = staticmethod(without_collecting)
