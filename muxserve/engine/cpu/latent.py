"""Multi-head latent attention (MLA) over the unified pool, on vLLM's own CPU implementation of it.

vLLM's kernel takes blocks of 16 tokens. A page (`engine.latent`) is a whole number of them, so they lie at 16 tokens'
distance from the pool's beginning on. Tables and slots are gathered for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, MLACommonMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec

from muxserve.engine.binding import current
from muxserve.engine.latent import ByLayer
from muxserve.memory import fold_decode, fold_slots

# Tokens of a block of vLLM's kernel.
KERNEL_BLOCK = 16


class PooledLatentBackend(CPUMLABackend):
    """The attention backend of engines whose model has latent attention (CPU)."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(KERNEL_BLOCK)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % KERNEL_BLOCK == 0

    @staticmethod
    def get_impl_cls() -> type[PooledLatentImpl]:
        return PooledLatentImpl

    @staticmethod
    def get_builder_cls() -> type[PooledLatentMetadataBuilder]:
        return PooledLatentMetadataBuilder


@dataclass
class PooledLatentMetadata(MLACommonMetadata):
    """Adds the tables of all layers: `block_tables` int32 [L, requests, blocks of the kernel], of those whose pages are
    read, decoding ones first; `slots` int64 [L, T], in tokens from the pool's beginning on."""

    block_tables: torch.Tensor | None = None
    slots: torch.Tensor | None = None


class PooledLatentMetadataBuilder(MLACommonMetadataBuilder[PooledLatentMetadata]):
    """Builds one step's metadata from vLLM's block table and the page table in shared memory."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, PooledLatentMetadata)
        for index, name in enumerate(layer_names):
            impl = vllm_config.compilation_config.static_forward_context[name].impl
            impl.layer_name, impl.layer_index = name, index

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PooledLatentMetadata:
        meta = super().build(common_prefix_len, common_attn_metadata, fast_build)
        common, tokens = common_attn_metadata, common_attn_metadata.num_actual_tokens
        page_table = current().view.page_table
        layers = page_table.shape[1]
        meta.slots = torch.empty((layers, tokens), dtype=torch.int64)
        fold_slots(page_table, common.slot_mapping[:tokens], self.page_size, meta.slots)
        # A prompt reads pages when its beginning was found in the prefix cache.
        reading = common.num_reqs if meta.prefill is not None and meta.prefill.chunked_context else meta.num_decodes
        if reading:
            blocks, parts = -(-common.max_seq_len // self.page_size), self.page_size // KERNEL_BLOCK
            pages = torch.empty((layers, reading, blocks), dtype=torch.int32)
            fold_decode(page_table, common.block_table_tensor, reading, blocks, pages)
            meta.block_tables = (pages[..., None] * parts + torch.arange(parts, dtype=torch.int32)).flatten(2)
        return meta


class PooledLatentImpl(ByLayer, CPUMLAImpl):
    """Attention of one layer; its cache is the whole pool `[kernel blocks, 16, latent]` for every layer."""

    # Which of the pool's layers it is; the builder knows.
    layer_name: str
    layer_index: int

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,  # given since vLLM 0.33; for its CUDA kernel
    ) -> None:
        steps = get_forward_context().attn_metadata
        if not isinstance(steps, dict):  # warm-up before the cache exists
            return
        meta = steps[self.layer_name]
        assert isinstance(meta, PooledLatentMetadata)
        assert meta.slots is not None
        tokens = meta.num_actual_tokens
        super().do_kv_cache_update(
            kv_c_normed[:tokens], k_pe[:tokens], kv_cache, meta.slots[self.layer_index], kv_cache_dtype, k_scale
        )

    def tables_of(self, meta: PooledLatentMetadata) -> torch.Tensor:
        assert meta.block_tables is not None
        return meta.block_tables[self.layer_index]


def register() -> None:
    """Put the backend in place of vLLM's."""
    register_backend(AttentionBackendEnum.CPU_MLA, f"{__name__}.PooledLatentBackend")
