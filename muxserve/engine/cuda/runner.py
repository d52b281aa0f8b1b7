"""vLLM's GPU model runner (V1) on the shared pool."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MambaSpec, MLAAttentionSpec
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import bind_kv_cache

from muxserve.engine.binding import current
from muxserve.engine.cuda.attention import PooledFlashMetadataBuilder
from muxserve.engine.cuda.graphs import ContextGraphs
from muxserve.engine.cuda.latent import PooledLatentMetadataBuilder
from muxserve.engine.cuda.page_table import DevicePageTable, new_blocks
from muxserve.engine.cuda.resuming import ResumingOnDevice
from muxserve.engine.cuda.states import PagedStates, keep_own_kernels
from muxserve.engine.runner import PooledRunner
from muxserve.engine.states import pages_for


def token_numbers(spec: AttentionSpec) -> int:
    """How many numbers a page holds of one token: K and V of a head, or a latent."""
    return spec.head_size if isinstance(spec, MLAAttentionSpec) else 2 * spec.head_size


@contextmanager
def without_collecting() -> Iterator[None]:
    """Nothing is collected while graphs are captured, which could invalidate them.

    In place of vLLM's own, which thaws what this process was forked with, so that it and whoever collects next look
    through all of vLLM's modules: a second of an engine's start.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class PooledGPUModelRunner(ResumingOnDevice, PooledRunner, GPUModelRunner):
    """Binds every layer to the whole pool and keeps the page table on the device."""

    _freeze_gc = staticmethod(without_collecting)

    states: PagedStates | None = None
    page_table: DevicePageTable | None = None
    # Of each set of SMs that the engine has; None: it has all.
    graphs: ContextGraphs | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.model_config.is_hybrid:
            keep_own_kernels()
        super().load_model(*args, **kwargs)

    def _make_states(self, specs: dict[str, MambaSpec]) -> PagedStates:
        """Raises ValueError if they are larger than their blocks."""
        page_bytes = current().view.pool.shape[1]
        made = PagedStates(specs, self.scheduler_config.max_num_seqs, page_bytes, self.device)
        pages_for(made.pages * page_bytes)
        return made

    # ------------------------------------------------------------ pool and page table

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager | None = None,
    ) -> dict[str, torch.Tensor]:
        return self._bind_pool(kv_cache_config)

    def rebind_pool(self) -> None:
        """Bind the layers to the pool of a restarted memory manager and forget what is known of its page table."""
        before = self.kv_caches[0].data_ptr()
        self.kv_caches.clear()
        if self.states is not None:
            self.states.forget()
        self._bind_pool(self.kv_cache_config)
        moved = self.kv_caches[0].data_ptr() != before
        if moved and self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            # Full graphs have the pool's address in them; piecewise ones leave attention out.
            CUDAGraphWrapper.clear_all_graphs()
            self.capture_model()

    def capture_model(self) -> int:
        return self._capture() if self.graphs is None else self.graphs.capture(self._capture)

    def _capture(self) -> int:
        # vLLM locks its workspaces when it has captured once. Marlin's kernels want something there for each stream,
        # and every capture is from another one.
        if workspace.is_workspace_manager_initialized():
            workspace.unlock_workspace()
        return super().capture_model()

    def _mapped_pool(self) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        """The mapped pool, uint8 [pages, page bytes] on the device, and the page table in shared memory."""
        view = current().view
        if self.device.type == "cuda":
            return torch.as_tensor(view.device_pool, device=self.device), view.page_table
        return torch.from_numpy(view.pool), view.page_table

    def _bind_pool(self, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
        group = kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        assert isinstance(spec, AttentionSpec)
        memory, source = self._mapped_pool()
        pool = memory.view(spec.dtype).view(-1, 1, spec.block_size, token_numbers(spec))
        if self.page_table is None or self.page_table.shape != source.shape:
            self.page_table = DevicePageTable(source, self.device)
        else:
            self.page_table.rebind(source)
        tables = None
        for attention_group in self._attn_group_iterator():
            for builder in attention_group.metadata_builders:
                # Those of layers with states are vLLM's.
                if isinstance(builder, PooledFlashMetadataBuilder | PooledLatentMetadataBuilder):
                    tables = builder.bind(self.page_table.table, group.layer_names, tables)
        assert tables is not None, "our backends compute attention"
        if self.states is not None:
            self.states.bind(memory, self.compilation_config.static_forward_context)
        kv_caches = dict.fromkeys(group.layer_names, pool)
        bind_kv_cache(
            kv_caches,
            self.compilation_config.static_forward_context,
            self.kv_caches,
            1,
            kv_cache_groups=kv_cache_config.kv_cache_groups,
        )
        return kv_caches

    def _update_states(self, scheduler_output: Any) -> Any:
        assert self.page_table is not None
        self.page_table.update(new_blocks(scheduler_output))
        return super()._update_states(scheduler_output)

    def _init_kv_zero_meta(self) -> None:
        """Nothing to prepare: see `_zero_block_ids`."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        assert self.page_table is not None
        ids = torch.tensor(block_ids, dtype=torch.long, device=self.device)
        pages = self.page_table.table[ids].flatten().long()
        self.kv_caches[0].index_fill_(0, pages, 0)
