"""Multi-head latent attention (MLA) over the unified pool, on vLLM's Triton kernels for it.

These kernels of vLLM take every GPU and any block size that is a multiple of 16. They read pages (`engine.latent`)
by the layer's block table, which is gathered as that of FlashAttention is (`tables.py`): a latent is one KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl, TritonMLAMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec

from muxserve.engine.cuda import kernels
from muxserve.engine.cuda.attention import table_shape
from muxserve.engine.cuda.tables import FoldedTables
from muxserve.engine.latent import ByLayer


class PooledLatentBackend(TritonMLABackend):
    """The attention backend of engines on GPUs whose model has latent attention."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[PooledLatentImpl]:
        return PooledLatentImpl

    @staticmethod
    def get_builder_cls() -> type[PooledLatentMetadataBuilder]:
        return PooledLatentMetadataBuilder


@dataclass
class PooledLatentMetadata(MLACommonMetadata):
    """Adds the block tables of all layers."""

    tables: FoldedTables | None = None


class PooledLatentMetadataBuilder(TritonMLAMetadataBuilder):
    """Builds one step's metadata from vLLM's block table and the device's page table, which the runner binds.

    What a captured graph reads of it lies in buffers whose addresses never change.
    """

    page_table: torch.Tensor | None = None
    tables: FoldedTables | None = None

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.metadata_cls = PooledLatentMetadata

    def bind(
        self, page_table: torch.Tensor, layer_names: Sequence[str], tables: FoldedTables | None = None
    ) -> FoldedTables:
        """Read and write pages of `page_table` from now on; see `PooledFlashMetadataBuilder.bind`."""
        self.page_table = page_table
        if self.tables is None:
            shape = table_shape(self.vllm_config, len(layer_names), 1, self.page_size)
            self.tables = tables or FoldedTables(shape, self.page_size, self.device)
        for index, name in enumerate(layer_names):
            impl = self.vllm_config.compilation_config.static_forward_context[name].impl
            impl.page_table, impl.layer_index = page_table, index
        return self.tables

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PooledLatentMetadata:
        """Describe a batch.

        Raises:
            RuntimeError: no page table has been bound.
        """
        if self.page_table is None or self.tables is None:
            raise RuntimeError("no page table is bound to the attention backend yet")
        common = common_attn_metadata
        meta = super().build(common_prefix_len, common, fast_build)
        assert isinstance(meta, PooledLatentMetadata)
        self.tables.begin(
            self.page_table,
            common.block_table_tensor,
            common.seq_lens,
            common.num_reqs,
            common.max_seq_len,
            head_major=False,
        )
        meta.tables = self.tables
        return meta


class PooledLatentImpl(ByLayer, TritonMLAImpl):
    """Attention of one layer; its cache is the whole pool `[pages, block_size, latent]` for every layer."""

    # Which pages of the pool are the layer's; the runner binds them through the builder.
    page_table: torch.Tensor | None = None
    layer_index = 0

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,  # given since vLLM 0.33; nothing is scaled here
    ) -> None:
        if self.page_table is None or not kv_cache.numel():  # warm-up before there is a pool
            return
        tokens = slot_mapping.shape[0]
        latents = torch.cat((kv_c_normed[:tokens], k_pe[:tokens].flatten(1)), dim=-1)
        # Stored as K and V of one head, of half the size each.
        key, value = latents[:, None].chunk(2, dim=-1)
        kernels.store_kv(key, value, kv_cache[:, None], self.page_table, slot_mapping, self.layer_index)

    def tables_of(self, meta: PooledLatentMetadata) -> torch.Tensor:
        assert meta.tables is not None
        return meta.tables.layer(self.layer_index)


def workspace_bytes(vllm_config: VllmConfig, rank: int, width: int) -> int:
    """Device memory that the builder of an engine takes when it is made: latents of what a prompt has computed before
    (`width` numbers each), and what parts of the largest decode batch's contexts come to before they are put together
    (`rank` numbers and a logarithm for each query head)."""
    model, most = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
    before = TritonMLAMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
    splits = triton_mla._compute_num_kv_splits(model.max_model_len, current_platform.num_compute_units())
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    return int(before * width * model.dtype.itemsize + 4 * most * heads * splits * (rank + 1))


def register() -> None:
    """Put the backend in place of vLLM's."""
    register_backend(AttentionBackendEnum.TRITON_MLA, f"{__name__}.PooledLatentBackend")
