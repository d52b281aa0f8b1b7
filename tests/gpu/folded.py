"""One step of head-folded attention on a GPU, and what plain attention makes of the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

DEVICE = "cuda"


@dataclass(frozen=True)
class Batch:
    """Requests with so many tokens in the cache, that compute so many new ones."""

    contexts: tuple[int, ...]
    new: tuple[int, ...]


class FoldedAttention:
    """Builder and attention class of the CUDA engine over a pool with pages in random order."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, block: int, layers: int, dtype: torch.dtype, device: str = DEVICE
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.block, self.layers = heads, kv_heads, dim, block, layers
        self.dtype, self.device = dtype, torch.device(device)
        self.generator = torch.Generator().manual_seed(1)

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [layers, tokens, heads, dim], folded and plain."""
        longest = max(c + n for c, n in zip(batch.contexts, batch.new, strict=True))
        blocks = 1 + len(batch.new) * -(-longest // self.block)
        pages = blocks * self.layers * self.kv_heads
        order = torch.randperm(pages, generator=self.generator).to(torch.int32)
        table = order.view(blocks, self.layers, self.kv_heads).clone()
        table[0] = -1
        pool = torch.zeros((pages, 1, self.block, 2 * self.dim), dtype=self.dtype, device=self.device)
        builder, impls = self._engine(table.to(self.device), longest, len(batch.new))
        ids = 1 + torch.arange(blocks - 1).view(len(batch.new), -1)
        tokens = [self._random(c + n) for c, n in zip(batch.contexts, batch.new, strict=True)]
        before = [(c, 0) for c in batch.contexts]
        if any(batch.contexts):
            self._step(builder, impls, pool, ids, tokens, before)
        output = self._step(builder, impls, pool, ids, tokens, list(zip(batch.new, batch.contexts, strict=True)))
        expected = torch.stack([self._plain(tokens, batch, layer) for layer in range(self.layers)])
        return output, expected

    def _engine(self, table: torch.Tensor, longest: int, requests: int) -> tuple[Any, list[Any]]:
        from vllm.v1.attention.backends import flash_attn
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from muxserve.engine.cuda.attention import PooledFlashImpl, PooledFlashMetadataBuilder
        from tests.engine_cuda.test_attention import config

        names = [f"layers.{i}" for i in range(self.layers)]
        spec = FullAttentionSpec(
            block_size=self.block, num_kv_heads=self.kv_heads, head_size=self.dim, dtype=self.dtype
        )
        settings = config()
        settings.model_config.max_model_len = longest
        settings.scheduler_config.max_num_seqs = requests
        with (
            mock.patch.object(flash_attn, "get_num_attention_heads_from_layers", return_value=self.heads),
            mock.patch.object(flash_attn, "get_dcp_world_size_and_rank", return_value=(1, 0)),
        ):
            builder = PooledFlashMetadataBuilder(spec, names, settings, self.device)
            shape = (self.heads, self.dim, self.dim**-0.5, self.kv_heads)
            impls = [PooledFlashImpl(*shape, None, None, "auto") for _ in names]
        builder.page_table = table
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
        from vllm.v1.attention.backend import CommonAttentionMetadata

        rows = [r for r, (count, _) in enumerate(parts) if count]
        counts = torch.tensor([parts[r][0] for r in rows], dtype=torch.int32)
        starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        lens = torch.tensor([sum(parts[r]) for r in rows], dtype=torch.int32)
        slots = [
            int(ids[r, p // self.block]) * self.block + p % self.block
            for r in rows
            for p in range(parts[r][1], sum(parts[r]))
        ]
        common = CommonAttentionMetadata(
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
        metadata = builder.build(0, common)
        outputs = []
        for layer, impl in enumerate(impls):
            query, key, value = (
                torch.cat([tokens[r][layer][which][parts[r][1] : sum(parts[r])] for r in rows]) for which in range(3)
            )
            output = torch.empty_like(query)
            impl.forward(SimpleNamespace(layer_name=f"layers.{layer}"), query, key, value, pool, metadata, output)
            outputs.append(output)
        return torch.stack(outputs)

    def _plain(self, tokens: list[Any], batch: Batch, layer: int) -> torch.Tensor:
        """Ordinary causal attention in float32, request by request."""
        found = []
        group = self.heads // self.kv_heads
        for request, (context, new) in enumerate(zip(batch.contexts, batch.new, strict=True)):
            query, key, value = (each.float() for each in tokens[request][layer])
            q = query[context:].transpose(0, 1)
            k, v = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (key, value))
            rows = torch.arange(new, device=self.device)[:, None]
            mask = torch.arange(context + new, device=self.device)[None] <= rows + context
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            found.append(attended.transpose(0, 1))
        return torch.cat(found)
