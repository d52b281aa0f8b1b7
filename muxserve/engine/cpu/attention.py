"""Head-folded attention over the unified pool, on vLLM's own CPU kernels.

The pool stores pages of one KV head each. The kernel therefore treats every (request, KV head) pair as a sequence with
one KV head and `query heads / KV heads` query heads. Block tables are gathered from the page table per
layer: `[L, R*H, blocks]`, R requests, H KV heads, L layers. (MuxServe, section 3.4: head-wise cache.)

For a pure decode batch the fold is a view of query and output; a batch with prefill tokens needs the tokens of one head
to be contiguous, hence one transposed copy of each.

Layers differ in their windows, and the kernel plans its work for a window, so there is a plan for each. Attention sinks
and ALiBi slopes belong to query heads, of which the kernel knows the `group` of a row only: models that have them take
one call for each KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionLayer, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec

from muxserve.engine.binding import current
from muxserve.memory import fold_decode, fold_prefill, fold_slots
from muxserve.spec import ModelSpec


class PooledCPUBackend(CPUAttentionBackend):
    """The attention backend of engines on the shared pool (CPU)."""

    # K and V are scattered per head inside `forward`: vLLM's slot mapping knows blocks, not pages.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[PooledCPUImpl]:
        return PooledCPUImpl

    @staticmethod
    def get_builder_cls() -> type[PooledCPUMetadataBuilder]:
        return PooledCPUMetadataBuilder


@dataclass
class PooledCPUMetadata(CPUAttentionMetadata):
    """Adds the folded tables of all layers: `block_tables` int32 [L, R*H, blocks], `slots` int64 [L, T*H].

    `schedules` has the kernel's plan by window (-1: none). With `by_head` rows are ordered by KV head, and plan, query
    starts and lengths are those of the R requests, the same for each head; else they are those of all R*H rows, ordered
    by request if `decode_only`.
    """

    decode_only: bool = False
    by_head: bool = False
    schedules: dict[int, torch.Tensor] = field(default_factory=dict)
    block_tables: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    layer_index: dict[str, int] = field(default_factory=dict)


def check_windows(windows: list[int], model: ModelSpec) -> None:
    """Go on only if layers see no more than `model` says, since pages behind the window are given back.

    Args:
        windows: tokens that a token sees in each layer, its own among them; -1: all.

    Raises:
        ValueError: a layer sees more.
    """
    for layer in model.windowed_layers:
        if not 0 < windows[layer] <= model.window:
            raise ValueError(
                f"model {model.name!r} cannot be served: config.json promised a window of {model.window} tokens in "
                f"layer {layer}, and vLLM computes it with {windows[layer] if windows[layer] > 0 else 'none'}"
            )


class PooledCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds one step's metadata from vLLM's block table and the page table in shared memory."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.queries_per_head = self.num_heads // self.num_kv_heads
        self.layer_index = {name: index for index, name in enumerate(layer_names)}
        impls = [layer.impl for layer in get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()]
        self.windows = {impl.sliding_window for impl in impls}
        self.by_head = any(impl.sinks is not None or impl.alibi_slopes is not None for impl in impls)
        if not self.is_encoder_only_attention:
            check_windows([impl.sliding_window for impl in impls], current().model)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PooledCPUMetadata:
        if self.is_encoder_only_attention:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        requests, tokens, heads = common.num_reqs, common.num_actual_tokens, self.num_kv_heads
        page_table = current().view.page_table
        layers, block_size = page_table.shape[1], self.block_size
        blocks = -(-common.max_seq_len // block_size)
        decode_only = common.max_query_len == 1 and not self.by_head

        block_tables = torch.empty((layers, requests * heads, blocks), dtype=torch.int32)
        fold = fold_decode if decode_only else fold_prefill
        fold(page_table, common.block_table_tensor, requests, blocks, block_tables)
        slots = torch.empty((layers, tokens * heads), dtype=torch.int64)
        fold_slots(page_table, common.slot_mapping[:tokens], block_size, slots)

        if self.by_head:
            query_start = common.query_start_loc[: requests + 1]
            seq_lens = common.seq_lens[:requests]
        elif decode_only:
            query_start = torch.arange(requests * heads + 1, dtype=torch.int32)
            seq_lens = common.seq_lens[:requests].repeat_interleave(heads)
        else:
            starts = common.query_start_loc[:requests]
            offsets = torch.arange(heads, dtype=torch.int32)[:, None] * tokens
            query_start = torch.empty(requests * heads + 1, dtype=torch.int32)
            query_start[:-1] = (starts[None] + offsets).reshape(-1)
            query_start[-1] = heads * tokens
            seq_lens = common.seq_lens[:requests].repeat(heads)

        schedules = {
            window: ops.cpu_attn_get_scheduler_metadata(
                num_reqs=seq_lens.numel(),
                num_heads=self.queries_per_head,
                num_kv_heads=1,
                head_dim=self.head_dim,
                seq_lens=seq_lens,
                dtype=self.dtype,
                query_start_loc=query_start,
                causal=common.causal,
                sliding_window_size=window,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            for window in self.windows
        }
        return PooledCPUMetadata(
            num_actual_tokens=tokens,
            max_query_len=common.max_query_len,
            query_start_loc=query_start,
            max_seq_len=common.max_seq_len,
            seq_lens=seq_lens,
            block_table=block_tables,
            slot_mapping=slots,
            scheduler_metadata=None,
            causal=common.causal,
            decode_only=decode_only,
            by_head=self.by_head,
            schedules=schedules,
            block_tables=block_tables,
            slots=slots,
            layer_index=self.layer_index,
        )


class PooledCPUImpl(CPUAttentionBackendImpl):
    """Attention of one layer; `kv_cache` is the whole pool `[pages, 1, block_size, 2*head_dim]` for every layer."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PooledCPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` [T, heads, D], `key`/`value` [T, kv_heads, D]; writes and returns `output`.

        Raises:
            NotImplementedError: fused output quantisation or an attention type other than decoder.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported on the shared pool")
        if self.attn_type == AttentionType.ENCODER_ONLY:  # it keeps no KV
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        if self.attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{self.attn_type} attention is not supported on the shared pool")
        if attn_metadata is None:  # warm-up before the cache exists
            return output
        meta = attn_metadata
        assert meta.block_tables is not None
        assert meta.slots is not None
        heads, dim, tokens = self.num_kv_heads, self.head_size, meta.num_actual_tokens
        group = self.num_heads // heads
        index = meta.layer_index[layer.layer_name]
        pages, _, block_size, _ = kv_cache.size()
        key_pages, value_pages = kv_cache.view(pages, 1, block_size * 2, dim).chunk(2, dim=2)

        ops.cpu_attn_reshape_and_cache(
            key[:tokens].reshape(tokens * heads, 1, dim),
            value[:tokens].reshape(tokens * heads, 1, dim),
            key_pages,
            value_pages,
            meta.slots[index],
            layer.isa,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        if meta.decode_only:
            folded_query = query[:tokens].reshape(tokens * heads, group, dim)
            folded_output = output[:tokens].view(tokens * heads, group, dim)
        else:
            folded_query = query[:tokens].reshape(tokens, heads, group, dim).transpose(0, 1)
            folded_query = folded_query.reshape(heads * tokens, group, dim).contiguous()
            folded_output = torch.empty_like(folded_query)
        self._attend(layer, meta, folded_query, key_pages, value_pages, meta.block_tables[index], folded_output)
        if not meta.decode_only:
            unfolded = folded_output.view(heads, tokens, group, dim).transpose(0, 1)
            output[:tokens].view(tokens, heads, group, dim).copy_(unfolded)
        return output

    def _attend(
        self,
        layer: AttentionLayer,
        meta: PooledCPUMetadata,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        block_table: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """All rows in one call, or those of each KV head with its sinks and slopes. `query` and `output` are
        [T*H, group, D], `block_table` [R*H, blocks]."""
        parts = self.num_kv_heads if meta.by_head else 1
        rows, tokens, group = block_table.shape[0] // parts, query.shape[0] // parts, query.shape[1]
        for part in range(parts):
            here, heads = slice(part * tokens, (part + 1) * tokens), slice(part * group, (part + 1) * group)
            ops.cpu_attention_with_kv_cache(
                query=query[here],
                key_cache=key_pages,
                value_cache=value_pages,
                output=output[here],
                query_start_loc=meta.query_start_loc,
                seq_lens=meta.seq_lens,
                scale=self.scale,
                causal=meta.causal,
                alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes[heads],
                sliding_window=self.sliding_window,
                block_table=block_table[part * rows : (part + 1) * rows],
                softcap=self.logits_soft_cap,
                scheduler_metadata=meta.schedules[self.sliding_window],
                s_aux=None if self.sinks is None else self._kernel_sinks(self.sinks)[heads],
                dynamic_causal=None,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
                kv_cache_dtype=self.kv_cache_dtype,
            )

    def _kernel_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """[heads], in a type that the kernel computes with; known only when the weights have been loaded."""
        if sinks.dtype not in (torch.bfloat16, torch.float32):
            self.sinks = sinks = sinks.to(torch.float32)
        return sinks


def register() -> None:
    """Put the backend in place of vLLM's CPU backend; its platform code ignores any other choice."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.PooledCPUBackend")
