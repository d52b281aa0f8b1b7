"""Head-folded FlashAttention on the unified pool: vLLM's `CUSTOM` attention backend of engines on GPUs.

The pool stores pages of one KV head each. FlashAttention therefore treats every (request, KV head) pair as a sequence
with one KV head and G = query heads / KV heads query heads. Each layer has its own block table. (MuxServe,
arXiv:2404.02015, section 3.4: head-wise cache.) See `kernels.py` for the order of the rows.

FlashAttention reads pages by stride. Within a page a token's K is followed by its V, as in vLLM's own cache, so the
strides between tokens are stock's; only the stride between pages differs. Versions 2 and 3 take any block size that is
a multiple of 16. Version 4 is used where vLLM chooses it, but for its head size 256 kernel, which needs 128 tokens in
a page; version 2 serves there.

Attention sinks are no part of the kernel's work: what they take from an output follows from the sum that the softmax
was divided by (`kernels.apply_sinks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends import fa_utils, flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from muxserve.engine.cuda import kernels
from muxserve.engine.cuda.splits import Splits
from muxserve.engine.cuda.tables import FoldedTables, TableShape


class PooledFlashBackend(FlashAttentionBackend):
    """The attention backend of engines on the shared pool (GPU)."""

    # K and V are scattered per head inside `forward`: vLLM's slot mapping knows blocks, not pages.
    forward_includes_kv_cache_update = True
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PooledFlashImpl]:
        return PooledFlashImpl

    @staticmethod
    def get_builder_cls() -> type[PooledFlashMetadataBuilder]:
        return PooledFlashMetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False


@dataclass
class PooledFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata with `query_start_loc`, `seq_lens` and `scheduler_metadata` of the folded rows;
    `num_actual_tokens` and `slot_mapping` are of the batch as it is. `page_table` int32 [blocks, L, H] is the
    device's."""

    decode_only: bool = False
    page_table: torch.Tensor | None = None
    tables: FoldedTables | None = None
    layer_index: dict[str, int] = field(default_factory=dict)


class PooledFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds one step's metadata from vLLM's block table and the device's page table, which the runner binds.

    Everything that a captured graph would read lies in buffers of this object, whose addresses never change.
    """

    # A decode batch folds to the same shapes for the same number of requests. A mixed batch copies query and output,
    # whose sizes a graph would fix with the number of tokens, but also its row order: not captured.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table: bool = False
    aot_schedule: bool

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.kv_heads: int = kv_cache_spec.num_kv_heads
        # What the base class asks FlashAttention's scheduler for is a row.
        self.num_heads_q //= self.kv_heads
        self.num_heads_kv = 1
        self.page_table: torch.Tensor | None = None
        self.layer_index: dict[str, int] = {}
        self.tables: FoldedTables | None = None
        shape = table_shape(vllm_config, len(layer_names), self.kv_heads, self.block_size)
        self._starts = torch.zeros(shape.rows + 1, dtype=torch.int32, device=device)
        self._lens = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        # FlashAttention 3 plans its work for a window; layers that differ in it plan for themselves.
        windows = {window or (-1, -1) for window in flash_attn._get_sliding_window_configs(vllm_config)} or {(-1, -1)}
        self.aot_schedule = self.aot_schedule and len(windows) == 1
        self.aot_sliding_window = windows.pop()
        if self.use_full_cuda_graph and self.aot_schedule:
            # One word for the tile counter and, rounded up to 4 rows, up to 4 words for each row.
            self.scheduler_metadata = torch.zeros(1 + (shape.rows + 3) // 4 * 4 * 4, dtype=torch.int32, device=device)
        self.splits = Splits(self.num_heads_q, self.kv_heads, self.headdim, _multiprocessors(device))

    def bind(
        self, page_table: torch.Tensor, layer_names: Sequence[str], tables: FoldedTables | None = None
    ) -> FoldedTables:
        """Read pages from `page_table` from now on; returns the tables that it is gathered into.

        Args:
            page_table: int32 [blocks, L, H] on the device.
            layer_names: of its L layers, in order. vLLM makes a builder for each number of query heads, so this one's
                layers may be some of them only.
            tables: those of another builder over the same page table: which pages a row has does not depend on queries.
        """
        self.page_table = page_table
        self.layer_index = {name: index for index, name in enumerate(layer_names)}
        if self.tables is None:
            shape = table_shape(self.vllm_config, len(layer_names), self.kv_heads, self.block_size)
            self.tables = tables or FoldedTables(shape, self.block_size, self.device)
        return self.tables

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PooledFlashMetadata:
        """Fold a batch.

        Raises:
            NotImplementedError: attention that is not causal.
            RuntimeError: no page table has been bound.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("attention that is not causal is not supported on the shared pool")
        if self.page_table is None or self.tables is None:
            raise RuntimeError("no page table is bound to the attention backend yet")
        requests, heads = common.num_reqs, self.kv_heads
        decode_only = common.max_query_len == 1
        rows = requests * heads
        starts, lens = self._starts[: rows + 1], self._lens[:rows]
        kernels.fold_requests(common.query_start_loc, common.seq_lens, heads, not decode_only, starts, lens)
        self.tables.begin(
            self.page_table,
            common.block_table_tensor,
            common.seq_lens,
            requests,
            common.max_seq_len,
            head_major=not decode_only,
        )

        splits = self._num_splits(common, decode_only)
        scheduler_metadata = self._get_scheduler_metadata(
            aot_schedule=self.aot_schedule and not fast_build and not envs.VLLM_BATCH_INVARIANT,
            batch_size=rows,
            cu_query_lens=starts,
            max_query_len=common.max_query_len,
            seqlens=lens,
            max_seq_len=common.max_seq_len,
            causal=True,
            max_num_splits=splits,
        )
        return PooledFlashMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=starts,
            max_seq_len=common.max_seq_len,
            seq_lens=lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=self._store_scheduler_metadata(scheduler_metadata),
            max_num_splits=splits,
            causal=True,
            decode_only=decode_only,
            page_table=self.page_table,
            tables=self.tables,
            layer_index=self.layer_index,
        )

    def _num_splits(self, common: CommonAttentionMetadata, decode_only: bool) -> int:
        """Parts that FlashAttention 3 may cut a row's context into; 0 leaves it to the kernel."""
        if envs.VLLM_BATCH_INVARIANT:
            return 1
        if not self.aot_schedule:
            return 0
        tokens = common.num_actual_tokens
        if decode_only and self.use_full_cuda_graph and tokens <= (self.max_cudagraph_size or 0):
            # A graph fixes it, so it must follow from the number of tokens alone.
            return self.splits.fixed(tokens, self.max_num_splits)
        return self.splits.choose(tokens, common.max_query_len, common.max_seq_len)


class PooledFlashImpl(FlashAttentionImpl):
    """Attention of one layer; `kv_cache` is the whole pool `[pages, 1, block_size, 2*head_dim]` for every layer."""

    fa4_hd256: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # vLLM leaves them to FlashAttention, whose version 2 has none, and which would give all rows the same.
        sinks = kwargs.pop("sinks", None)
        super().__init__(*args, **kwargs)
        self.sinks: torch.Tensor | None = sinks
        reason = None
        if self.attn_type != AttentionType.DECODER:
            reason = f"{self.attn_type} attention"
        elif self.alibi_slopes is not None:
            reason = "ALiBi"
        elif self.kv_sharing_target_layer_name is not None:
            reason = "layers that share another's KV cache"
        if reason:
            raise NotImplementedError(f"{reason} is not supported on the shared pool")
        if self.fa4_hd256:
            self.vllm_flash_attn_version, self.fa4_hd256 = 2, False
        self._bound: torch.Tensor | None = None
        self._pages: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PooledFlashMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` [T, heads, D], `key`/`value` [T, kv_heads, D]; writes and returns `output`.

        Raises:
            NotImplementedError: fused output quantisation.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported on the shared pool")
        meta = attn_metadata
        if meta is None:  # profiling, before there is a pool
            return output.fill_(0)
        assert meta.page_table is not None
        assert meta.tables is not None
        tokens, heads, dim = meta.num_actual_tokens, self.num_kv_heads, self.head_size
        group = self.num_queries_per_kv
        index = meta.layer_index[layer.layer_name]
        kernels.store_kv(key[:tokens], value[:tokens], kv_cache, meta.page_table, meta.slot_mapping, index)
        key_pages, value_pages = self._split(kv_cache)

        view = meta.decode_only or heads == 1
        if view:
            folded_query = query[:tokens].reshape(tokens * heads, group, dim)
            folded_output = output[:tokens].view(tokens * heads, group, dim)
        else:
            folded_query = query[:tokens].reshape(tokens, heads, group, dim).transpose(0, 1)
            folded_query = folded_query.reshape(heads * tokens, group, dim)
            folded_output = torch.empty_like(folded_query)
        told = fa_utils.flash_attn_varlen_func(
            q=folded_query,
            k=key_pages,
            v=value_pages,
            out=folded_output,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            seqused_k=meta.seq_lens,
            max_seqlen_k=meta.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=list(self.sliding_window),
            block_table=meta.tables.layer(index),
            softcap=self.logits_soft_cap,
            scheduler_metadata=meta.scheduler_metadata,
            fa_version=self.vllm_flash_attn_version,
            num_splits=meta.max_num_splits,
            return_softmax_lse=self.sinks is not None,
        )
        if self.sinks is not None:
            kernels.apply_sinks(folded_output, told[1], self.sinks, heads, head_major=not meta.decode_only)
        if not view:
            unfolded = folded_output.view(heads, tokens, group, dim).transpose(0, 1)
            output[:tokens].view(tokens, heads, group, dim).copy_(unfolded)
        return output

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all pages, [pages, block, 1, D] each, as views of the pool."""
        if self._bound is not kv_cache or self._pages is None:
            key_pages, value_pages = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            # Tensor memory accelerators want strides in units of 16 bytes, also of dimensions of size 1.
            self._pages = (
                canonicalize_singleton_dim_strides(key_pages),
                canonicalize_singleton_dim_strides(value_pages),
            )
            self._bound = kv_cache
        return self._pages


def table_shape(vllm_config: VllmConfig, layers: int, kv_heads: int, block_tokens: int) -> TableShape:
    """How large an engine's folded tables must be."""
    requests = max(
        vllm_config.scheduler_config.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0
    )
    return TableShape(layers, requests * kv_heads, -(-vllm_config.model_config.max_model_len // block_tokens))


def register() -> None:
    """Make the backend vLLM's `CUSTOM` one."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.PooledFlashBackend")


def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors that this process may use; under MPS its share."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
