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
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"))
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
        lse[:, start : start + count] = scores.logsumexp(-1)
        out[start : start + count] = torch.einsum("gts,sd->tgd", scores.softmax(-1), values).to(out.dtype)
    return (out, lse) if return_softmax_lse else out


def decode_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    attn_logits: torch.Tensor,
    num_kv_splits: int,
    scale: float,
    page_size: int,
    *,
    k_scale: object = None,
    v_scale: object = None,
    is_mla: bool = False,
) -> None:
    """vLLM's Triton kernel of latents: `q` [rows, heads, latent], `o` [rows, heads, rank], `k_buffer` [pages, block,
    1, latent], of which `v_buffer` is the first part; `block_table` [rows, blocks]."""
    assert is_mla
    assert k_buffer.shape[1:3] == (page_size, 1)
    assert v_buffer.data_ptr() == k_buffer.data_ptr()
    assert block_table.shape[0] == seq_lens.shape[0] == q.shape[0]
    assert block_table.stride(-1) == 1
    for row in range(q.shape[0]):
        used = int(seq_lens[row])
        if used:
            latents = _context(k_buffer, block_table[row], used)
            scores = q[row].float() @ latents.T * scale
            o[row] = (scores.softmax(-1) @ latents[:, : o.shape[2]]).to(o.dtype)


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
    """Scheduler metadata of FlashAttention 3's size, filled with the arguments."""
    batch = kwargs["batch_size"]
    assert kwargs["cache_seqlens"].shape == (batch,)
    assert kwargs["cu_seqlens_q"].shape == (batch + 1,)
    metadata = torch.zeros(1 + (batch + 3) // 4 * 4 * 2, dtype=torch.int32)
    metadata[0] = kwargs["num_heads_q"] * 1000 + kwargs["num_heads_kv"]
    return metadata
