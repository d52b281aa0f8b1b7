"""One step of the CUDA engine's attention over pages, and what plain attention makes of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

DEVICE = "cuda"


def settings(requests: int, longest: int, full_graphs: bool = False) -> Any:
    """As much of vLLM's configuration as its builder of attention metadata reads."""
    from vllm.config import CUDAGraphMode

    graphs = CUDAGraphMode.FULL_AND_PIECEWISE if full_graphs else CUDAGraphMode.PIECEWISE
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda _: 0,
            rswa_window=None,
            is_mm_prefix_lm=False,
            max_model_len=longest,
            hf_config=SimpleNamespace(model_type="llama"),
        ),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            cudagraph_mode=graphs,
            max_cudagraph_capture_size=requests if full_graphs else 0,
            static_forward_context={},
        ),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        speculative_config=None,
    )


@dataclass(frozen=True)
class AttentionBatch:
    """Requests, by the tokens that each has in the cache, and the `new` tokens that it computes."""

    contexts: tuple[int, ...]
    new: tuple[int, ...]


class PoolPages(NamedTuple):
    """Pages of `pool` [pages, 1, block, 2*dim] from page `first` on; without a pool those of one to be made."""

    pool: torch.Tensor | None = None
    first: int = 0


_NEW_POOL = PoolPages()


class FoldedAttention:
    """Builder and attention class of the CUDA engine over `pages` in random order. With `sinks` each layer has one."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        block: int,
        layers: int,
        dtype: torch.dtype,
        device: str = DEVICE,
        pages: PoolPages = _NEW_POOL,
        sinks: bool = False,
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.block, self.layers = heads, kv_heads, dim, block, layers
        self.dtype, self.device = dtype, torch.device(device)
        self.pages = pages
        self.generator = torch.Generator().manual_seed(1)
        self.sinks: list[torch.Tensor | None] = [None] * layers
        if sinks:
            self.sinks = [torch.randn(heads, generator=self.generator).to(dtype).to(self.device) for _ in range(layers)]

    def run(self, batch: AttentionBatch, replayed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [layers, tokens, heads, dim], folded and plain. `replayed`: of a CUDA graph that was captured whole,
        with the requests in another order; the batch must be decodes only."""
        builder, impls, pool, ids, tokens = self._begin(batch, replayed)
        parts = list(zip(batch.new, batch.contexts, strict=True))
        step = self._replay if replayed else self._step
        output = step(builder, impls, pool, ids, tokens, parts)
        expected = torch.stack([self._plain(tokens, batch, layer) for layer in range(self.layers)])
        return output, expected

    def repeated(self, batch: AttentionBatch) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        """A function that computes the same step anew each time, and what plain attention makes of it."""
        builder, impls, pool, ids, tokens = self._begin(batch)
        parts = list(zip(batch.new, batch.contexts, strict=True))
        expected = torch.stack([self._plain(tokens, batch, layer) for layer in range(self.layers)])
        return lambda: self._step(builder, impls, pool, ids, tokens, parts), expected

    def _begin(
        self, batch: AttentionBatch, replayed: bool = False
    ) -> tuple[Any, list[Any], torch.Tensor, torch.Tensor, list[Any]]:
        """Builder, layers, pool, block ids and numbers of the requests, with what they have in the cache."""
        longest = max(c + n for c, n in zip(batch.contexts, batch.new, strict=True))
        blocks = 1 + len(batch.new) * -(-longest // self.block)
        pages = blocks * self.layers * self.kv_heads
        order = self.pages.first + torch.randperm(pages, generator=self.generator).to(torch.int32)
        table = order.view(blocks, self.layers, self.kv_heads).clone()
        table[0] = -1
        pool = self.pages.pool
        if pool is None:
            shape = (self.pages.first + pages, 1, self.block, 2 * self.dim)
            pool = torch.zeros(shape, dtype=self.dtype, device=self.device)
        builder, impls = self._engine(table.to(self.device), longest, len(batch.new), replayed)
        ids = 1 + torch.arange(blocks - 1).view(len(batch.new), -1)
        tokens = [self._random(c + n) for c, n in zip(batch.contexts, batch.new, strict=True)]
        if any(batch.contexts):
            self._step(builder, impls, pool, ids, tokens, [(c, 0) for c in batch.contexts])
        return builder, impls, pool, ids, tokens

    def _engine(
        self, table: torch.Tensor, longest: int, requests: int, full_graphs: bool = False
    ) -> tuple[Any, list[Any]]:
        from vllm.v1.attention.backends import flash_attn
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from muxserve.engine.cuda.attention import PooledFlashImpl, PooledFlashMetadataBuilder

        names = [f"layers.{i}" for i in range(self.layers)]
        config = settings(requests, longest, full_graphs)
        spec = FullAttentionSpec(
            block_size=self.block, num_kv_heads=self.kv_heads, head_size=self.dim, dtype=self.dtype
        )
        with (
            mock.patch.object(flash_attn, "get_num_attention_heads_from_layers", return_value=self.heads),
            mock.patch.object(flash_attn, "get_dcp_world_size_and_rank", return_value=(1, 0)),
        ):
            builder = PooledFlashMetadataBuilder(spec, names, config, self.device)
            shape = (self.heads, self.dim, self.dim**-0.5, self.kv_heads)
            impls = [PooledFlashImpl(*shape, None, None, "auto", sinks=each) for each in self.sinks]
        builder.bind(table, names)
        return builder, impls

    def _random(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Query, key and value of every layer for `tokens` tokens of a request."""

        def some(heads: int) -> torch.Tensor:
            return torch.randn((tokens, heads, self.dim), generator=self.generator).to(self.dtype).to(self.device)

        return [(some(self.heads), some(self.kv_heads), some(self.kv_heads)) for _ in range(self.layers)]

    def _step(
        self,
        builder: Any,
        impls: list[Any],
        pool: torch.Tensor,
        ids: torch.Tensor,
        tokens: list[Any],
        parts: list[tuple[int, int]],
    ) -> torch.Tensor:
        """Compute `count` tokens of each request, of which `start` are in the cache, for each (count, start)."""
        rows = [r for r, (count, _) in enumerate(parts) if count]
        inputs = self._inputs(tokens, rows, parts)
        output = torch.empty_like(inputs[0])
        metadata = builder.build(0, self._common(ids, rows, parts))
        self._forward(impls, inputs, pool, metadata, output)
        return output

    def _replay(
        self,
        builder: Any,
        impls: list[Any],
        pool: torch.Tensor,
        ids: torch.Tensor,
        tokens: list[Any],
        parts: list[tuple[int, int]],
    ) -> torch.Tensor:
        """The same by a graph that was captured with the requests in the opposite order. What it reads is put where it
        was then, as vLLM does; on a CPU the captured calls are made again."""
        rows = list(range(len(parts)))
        inputs, common = self._inputs(tokens, rows[::-1], parts), self._common(ids, rows[::-1], parts)
        output = torch.empty_like(inputs[0])
        captured = builder.build_for_cudagraph_capture(common)

        def forward() -> None:
            self._forward(impls, inputs, pool, captured, output)

        if self.device.type == "cuda":
            forward()  # compiles the kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                forward()
            forward = graph.replay
        now = self._common(ids, rows, parts)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            getattr(common, name).copy_(getattr(now, name))
        for place, values in zip(inputs, self._inputs(tokens, rows, parts), strict=True):
            place.copy_(values)
        builder.build(0, common)
        output.fill_(float("nan"))
        forward()
        return output

    def _common(self, ids: torch.Tensor, rows: list[int], parts: list[tuple[int, int]]) -> Any:
        """vLLM's description of the batch of these requests."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = torch.tensor([parts[r][0] for r in rows], dtype=torch.int32)
        starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        lens = torch.tensor([sum(parts[r]) for r in rows], dtype=torch.int32)
        slots = [
            int(ids[r, p // self.block]) * self.block + p % self.block
            for r in rows
            for p in range(parts[r][1], sum(parts[r]))
        ]
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device),
            num_reqs=len(rows),
            num_actual_tokens=len(slots),
            max_query_len=int(counts.max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=ids[rows].to(torch.int32).to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
        )

    def _inputs(self, tokens: list[Any], rows: list[int], parts: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Query, key and value of the batch, [layers, tokens, heads, dim] each."""
        return [
            torch.stack(
                [
                    torch.cat([tokens[r][layer][which][parts[r][1] : sum(parts[r])] for r in rows])
                    for layer in range(self.layers)
                ]
            )
            for which in range(3)
        ]

    def _forward(
        self, impls: list[Any], inputs: list[torch.Tensor], pool: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        query, key, value = inputs
        for layer, impl in enumerate(impls):
            name = SimpleNamespace(layer_name=f"layers.{layer}")
            impl.forward(name, query[layer], key[layer], value[layer], pool, metadata, output[layer])

    def _plain(self, tokens: list[Any], batch: AttentionBatch, layer: int) -> torch.Tensor:
        """Ordinary causal attention in float32, request by request."""
        found = []
        group, sinks = self.heads // self.kv_heads, self.sinks[layer]
        for request, (context, new) in enumerate(zip(batch.contexts, batch.new, strict=True)):
            query, key, value = (each.float() for each in tokens[request][layer])
            q = query[context:].transpose(0, 1)
            k, v = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (key, value))
            rows = torch.arange(new, device=self.device)[:, None]
            mask = torch.arange(context + new, device=self.device)[None] <= rows + context
            if sinks is None:
                attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            else:
                scores = (q @ k.transpose(1, 2) * self.dim**-0.5).masked_fill(~mask, float("-inf"))
                nothing = sinks.float()[:, None, None].expand(-1, new, 1)
                attended = torch.cat([scores, nothing], dim=-1).softmax(-1)[..., :-1] @ v
            found.append(attended.transpose(0, 1))
        return torch.cat(found)
