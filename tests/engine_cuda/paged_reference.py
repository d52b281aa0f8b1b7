"""FlashAttention's interface in plain torch: reads K and V by page and stride exactly as the kernels do."""

from __future__ import annotations

from typing import Any

import torch


def flash_attn_varlen_func(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    block_table: torch.Tensor,
    softcap: float = 0.0,
    scheduler_metadata: torch.Tensor | None = None,
    fa_version: int | None = None,
    num_splits: int = 0,
) -> torch.Tensor:
    """`q`, `out` [rows of tokens, G, D], `k`, `v` [pages, block, 1, D] of any stride, `block_table` [batch, blocks].

    Checks what the kernels check or silently assume.
    """
    batch = seqused_k.shape[0]
    assert cu_seqlens_q.shape == (batch + 1,)
    assert block_table.shape[0] == batch
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert causal
    assert q.stride(-1) == out.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    assert k.shape[2] == v.shape[2] == 1
    assert k.shape[1] % 16 == 0
    counts = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    assert int(counts.min()) >= 0
    assert int(counts.max()) <= max_seqlen_q
    assert int(seqused_k.max()) <= max_seqlen_k
    assert int(cu_seqlens_q[-1]) <= q.shape[0]
    for row in range(batch):
        start, count, used = int(cu_seqlens_q[row]), int(counts[row]), int(seqused_k[row])
        if not count:
            continue
        queries = q[start : start + count].float()
        keys, values = (_context(pages, block_table[row], used) for pages in (k, v))
        scores = torch.einsum("tgd,sd->gts", queries, keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        # Aligned to the bottom right: the last query sees everything.
        keys_at, queries_at = torch.arange(used)[None], torch.arange(count)[:, None] + (used - count)
        visible = keys_at <= queries_at
        if window_size[0] >= 0:
            visible &= keys_at >= queries_at - window_size[0]
        scores = scores.masked_fill(~visible, float("-inf"))
        out[start : start + count] = torch.einsum("gts,sd->tgd", scores.softmax(-1), values).to(out.dtype)
    return out


def _context(pages: torch.Tensor, blocks: torch.Tensor, used: int) -> torch.Tensor:
    """float32 [used, D] of one row, by address arithmetic on the underlying memory."""
    memory = torch.as_strided(pages, (pages.untyped_storage().nbytes() // pages.element_size(),), (1,), 0)
    position = torch.arange(used)
    block = pages.shape[1]
    page = blocks[position // block].long()
    assert int(page.min()) >= 0
    assert int(page.max()) < pages.shape[0]
    base = pages.storage_offset() + page * pages.stride(0) + (position % block) * pages.stride(1)
    return memory[base[:, None] + torch.arange(pages.shape[3])[None]].float()


def get_scheduler_metadata(**kwargs: Any) -> torch.Tensor:
    """Of the size that FlashAttention 3 gives, filled with what it was asked for."""
    batch = kwargs["batch_size"]
    assert kwargs["cache_seqlens"].shape == (batch,)
    assert kwargs["cu_seqlens_q"].shape == (batch + 1,)
    metadata = torch.zeros(1 + (batch + 3) // 4 * 4 * 2, dtype=torch.int32)
    metadata[0] = kwargs["num_heads_q"] * 1000 + kwargs["num_heads_kv"]
    return metadata
