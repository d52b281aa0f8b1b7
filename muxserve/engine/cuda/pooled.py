"""What our model runners on GPUs do alike over both of vLLM's: every layer is bound to the whole pool, and the page
table is kept on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.worker.utils import bind_kv_cache

from muxserve.engine.binding import current
from muxserve.engine.cuda.attention import PooledFlashMetadataBuilder
from muxserve.engine.cuda.graphs import CapturingRunner
from muxserve.engine.cuda.latent import PooledLatentMetadataBuilder
from muxserve.engine.cuda.page_table import DevicePageTable, new_blocks
from muxserve.engine.cuda.states import PagedStates, keep_own_kernels
from muxserve.engine.runner import PooledLayers
from muxserve.engine.states import pages_for
from muxserve.memory.device import DeviceMemory


def token_numbers(spec: AttentionSpec) -> int:
    """How many numbers a page holds of one token: K and V of a head, or a latent."""
    return spec.head_size if isinstance(spec, MLAAttentionSpec) else 2 * spec.head_size


class PooledOnDevice(CapturingRunner, PooledLayers):
    """Mixed in before a runner of vLLM for GPUs."""

    states: PagedStates | None = None
    page_table: DevicePageTable | None = None
    _device_pool: DeviceMemory | None = None
    kv_caches: list[torch.Tensor]

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

    def rebind_pool(self) -> None:
        """Bind the layers to the pool of a restarted memory manager and forget what is known of its page table."""
        before = self.kv_caches[0].data_ptr()
        if self.states is not None:
            self.states.forget()
        self._bind_pool()
        moved = self.kv_caches[0].data_ptr() != before
        if moved and self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            # Full graphs have the pool's address in them; piecewise ones leave attention out.
            self.drop_graphs()
            self.capture_model()

    def _mapped_pool(self) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        """The mapped pool, uint8 [pages, page bytes] on the device, and the page table in shared memory."""
        view = current().view
        if self.device.type == "cuda":
            self._device_pool = view.device_pool
            return torch.as_tensor(self._device_pool, device=self.device), view.page_table
        return torch.from_numpy(view.pool), view.page_table

    def _bind_pool(self) -> dict[str, torch.Tensor]:
        """Bind the layers to the pool, in place of caches that vLLM would allocate; returns what each layer has."""
        group = self.kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        assert isinstance(spec, AttentionSpec)
        memory, source = self._mapped_pool()
        pool = memory.view(spec.dtype).view(-1, 1, spec.block_size, token_numbers(spec))
        if self.page_table is None or self.page_table.shape != source.shape:
            self.page_table = DevicePageTable(source, self.device)
        else:
            self.page_table.rebind(source)
        tables = None
        for attention_group in itertools.chain.from_iterable(self.attn_groups):
            for builder in attention_group.metadata_builders:
                # Those of layers with states are vLLM's.
                if isinstance(builder, PooledFlashMetadataBuilder | PooledLatentMetadataBuilder):
                    tables = builder.bind(self.page_table.table, group.layer_names, tables)
        assert tables is not None, "our backends compute attention"
        layers = self.compilation_config.static_forward_context
        if self.states is not None:
            self.states.bind(memory, layers)
        kv_caches = dict.fromkeys(group.layer_names, pool)
        bound: list[torch.Tensor] = []
        bind_kv_cache(kv_caches, layers, bound, 1, kv_cache_groups=self.kv_cache_config.kv_cache_groups)
        self.kv_caches = bound
        return kv_caches

    def follow(self, scheduler_output: Any) -> None:
        assert self.page_table is not None
        if self._device_pool is not None:
            self._device_pool.sync()
        self.page_table.update(new_blocks(scheduler_output))
        super().follow(scheduler_output)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Write zeros to the pages of these blocks."""
        assert self.page_table is not None
        ids = torch.tensor(block_ids, dtype=torch.long, device=self.device)
        pages = self.page_table.table[ids].flatten().long()
        self.kv_caches[0].index_fill_(0, pages, 0)
