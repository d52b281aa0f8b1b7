"""What the CUDA engine computes itself: folding of batches and page tables, and the writing of K and V into pages.

Each operation is a Triton kernel on a GPU and plain torch elsewhere; tests hold the two against each other.

Shapes: R requests, T tokens, H KV heads of this rank, L layers, D head size, `block` tokens in a block. A *row* is one
sequence as FlashAttention is told of it: a request seen by one KV head. Rows are ordered by request (`r*H + h`) in a
batch of decodes, where this makes the fold a view of query and output, else by head (`h*R + r`), where the tokens of
one head must lie together. (Head-wise cache: MuxServe, arXiv:2404.02015, section 3.4.)
"""

from __future__ import annotations

import torch


def fold_requests(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    heads: int,
    head_major: bool,
    starts: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Write the rows' query starts `starts` int32 [R*H + 1] and lengths `lens` int32 [R*H].

    Args:
        query_start: int32 [R+1], where each request's tokens begin; requests that pad the batch have none.
        seq_lens: int32 [R], tokens of context and query.
    """
    requests = query_start.shape[0] - 1
    if _on_gpu(starts):
        from muxserve.engine.cuda import triton_kernels

        block = 256
        grid = (_cdiv(requests * heads + 1, block),)
        triton_kernels.fold_requests_kernel[grid](
            query_start, seq_lens, starts, lens, requests, HEADS=heads, HEAD_MAJOR=head_major, BLOCK=block
        )
        return
    tokens = query_start[-1]
    head = torch.arange(heads, dtype=torch.int32, device=starts.device)
    first, counts = query_start[:-1], query_start[1:] - query_start[:-1]
    if head_major:
        starts[:-1] = (head[:, None] * tokens + first[None]).reshape(-1)
        lens.copy_(seq_lens[:requests].repeat(heads))
    else:
        starts[:-1] = (first[:, None] * heads + head[None] * counts[:, None]).reshape(-1)
        lens.copy_(seq_lens[:requests].repeat_interleave(heads))
    starts[-1] = tokens * heads


def gather_tables(
    page_table: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tokens: int,
    head_major: bool,
    out: torch.Tensor,
    requests: int,
    max_blocks: int,
    first_layer: int = 0,
) -> None:
    """Write the block tables of the rows, as many layers as `out` has from `first_layer` on.

    Only the columns that a request's length needs are written; a page that is not known becomes page 0.

    Args:
        page_table: int32 [blocks, L, H], contiguous; -1 where a block's pages are not known.
        block_table: int32 [R, at least max_blocks], rows contiguous: blocks of each request.
        out: int32 [layers, at least R*H, at least max_blocks], contiguous in the last dimension.
        max_blocks: blocks of the longest request.
    """
    _, total_layers, heads = page_table.shape
    layers = out.shape[0]
    if _on_gpu(out):
        from muxserve.engine.cuda import triton_kernels

        columns, width = 32, min(64, _power_of_two(layers * heads))
        grid = (requests, _cdiv(max_blocks, columns), _cdiv(layers * heads, width))
        triton_kernels.gather_tables_kernel[grid](
            page_table,
            block_table,
            seq_lens,
            out,
            requests,
            block_table.stride(0),
            first_layer,
            out.stride(0),
            out.stride(1),
            out.shape[2],
            LAYERS=layers,
            WIDTH=total_layers * heads,
            HEADS=heads,
            BLOCK_TOKENS=block_tokens,
            HEAD_MAJOR=head_major,
            BLOCK_COLUMNS=columns,
            BLOCK_WIDTH=width,
        )
        return
    used = (seq_lens[:requests] + block_tokens - 1) // block_tokens
    needed = torch.arange(max_blocks, device=out.device)[None] < used[:, None]  # [R, blocks]
    blocks = torch.where(needed, block_table[:requests, :max_blocks], 0).long()
    pages = page_table[blocks, first_layer : first_layer + layers].clamp_(min=0)  # [R, blocks, layers, H]
    order = (2, 3, 0, 1) if head_major else (2, 0, 3, 1)
    gathered = pages.permute(order).reshape(layers, requests * heads, max_blocks)
    needed = needed.repeat(heads, 1) if head_major else needed.repeat_interleave(heads, dim=0)
    target = out[:, : requests * heads, :max_blocks]
    target.copy_(torch.where(needed[None], gathered, target))


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
) -> None:
    """Write K and V of the batch's tokens into their blocks' pages.

    Args:
        key: [T, H, D]; like `value` contiguous in the last dimension.
        value: [T, H, D].
        pool: [pages, 1, block, 2*D] contiguous; a token's K is followed by its V.
        page_table: int32 [blocks, L, H], contiguous; nothing is written to a page of -1.
        slots: int64 [T], block * block size + position in the block; nothing is written for -1.
        layer: whose K and V they are.
    """
    tokens, heads, dim = key.shape
    block_tokens, layers = pool.shape[2], page_table.shape[1]
    if _on_gpu(pool):
        if not tokens:
            return
        from muxserve.engine.cuda import triton_kernels

        triton_kernels.store_kv_kernel[(tokens,)](
            key,
            value,
            pool,
            page_table,
            slots,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            layer,
            WIDTH=layers * heads,
            HEADS=heads,
            HEAD_DIM=dim,
            BLOCK_TOKENS=block_tokens,
            PADDED_HEADS=_power_of_two(heads),
            PADDED_DIM=_power_of_two(dim),
        )
        return
    slots = slots[:tokens]
    pages = page_table[slots.clamp(min=0) // block_tokens, layer].long()  # [T, H]
    written = (slots[:, None] >= 0) & (pages >= 0)
    offsets = (slots % block_tokens)[:, None].expand(tokens, heads)[written]
    target = pages[written]
    pool[target, 0, offsets, :dim] = key[written]
    pool[target, 0, offsets, dim:] = value[written]


def apply_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, heads: int, head_major: bool) -> None:
    """Have attention as if each query could attend to nothing as well, with its head's sink as the score.

    That adds exp(sink) to the sum which the softmax divides by: what was divided by exp(lse) is multiplied by
    exp(lse) / (exp(lse) + exp(sink)). FlashAttention takes a sink for each query head, and here the query heads of all
    rows are the same.

    Args:
        output: [T*H, G, D] contiguous in the last two dimensions, G query heads of each KV head; changed in place.
        lse: float32 [G, T*H], logarithms of the sums.
        sinks: [H*G], contiguous.
        heads: H.
        head_major: as of the rows.
    """
    rows, group, dim = output.shape
    if not rows:
        return
    if _on_gpu(output):
        from muxserve.engine.cuda import triton_kernels

        triton_kernels.apply_sinks_kernel[(rows,)](
            output,
            lse,
            sinks,
            rows // heads,
            output.stride(0),
            lse.stride(0),
            lse.stride(1),
            HEADS=heads,
            GROUP=group,
            HEAD_DIM=dim,
            HEAD_MAJOR=head_major,
            PADDED_GROUP=_power_of_two(group),
            PADDED_DIM=_power_of_two(dim),
        )
        return
    row = torch.arange(rows, device=output.device)
    head = row // (rows // heads) if head_major else row % heads
    part = torch.sigmoid(lse[:, :rows].T.float() - sinks.view(heads, group)[head].float())
    output.copy_(output.float() * part[..., None])


def scatter_rows(staging: torch.Tensor, table: torch.Tensor) -> None:
    """Write rows of the page table.

    Args:
        staging: int32 [n, 1 + L*H] contiguous: number of the block, then its pages.
        table: int32 [blocks, L, H] contiguous.
    """
    rows, width = staging.shape[0], table[0].numel()
    if _on_gpu(table):
        from muxserve.engine.cuda import triton_kernels

        block = 512
        triton_kernels.scatter_rows_kernel[(rows, _cdiv(width, block))](staging, table, WIDTH=width, BLOCK=block)
        return
    table.view(-1, width).index_copy_(0, staging[:, 0].long(), staging[:, 1:])


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
