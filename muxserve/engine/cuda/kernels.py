"""What the CUDA engine computes itself: folding of batches and page tables, the writing of K and V into pages, and one
token's step of states that lie on pages.

Each operation is a Triton kernel on a GPU and plain torch elsewhere; tests hold the two against each other.

Shapes: R requests, T tokens, H KV heads of this rank, L layers, D head size, `block` tokens in a block. A *row* is one
sequence as FlashAttention is told of it: a request seen by one KV head. Rows are ordered by request (`r*H + h`) in a
batch of decodes, where this makes the fold a view of query and output, else by head (`h*R + r`), where the tokens of
one head must lie together. (Head-wise cache: MuxServe, arXiv:2404.02015, section 3.4.)

The states of a sequence lie on the pages that `pages` int32 [slots, P] has in its slot's row, one number after the
other. A sequence of slot 0 pads the batch: nothing is read or written for it, and what comes out is 0. A token changes
each row of a state by itself, so that a tile of rows has to lie on one page, and not a head's whole state.
"""

from __future__ import annotations

import math

import torch

# Rows of a state that a program steps at most; a power of two.
MOST_ROWS = 32


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


def copy_states(
    pool: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, states: torch.Tensor, first: int, to_pool: bool
) -> None:
    """Copy the same part of each sequence's states from the pool, or back into it.

    Args:
        pool: int32 [all pages, words].
        pages: int32 [slots, P] contiguous.
        slots: int32 [R], of each sequence.
        states: int32 [R, words of the part] contiguous, outside of the pool.
        first: the part's first word.
    """
    words = states.shape[1]
    if _on_gpu(pool):
        from muxserve.engine.cuda import triton_kernels

        block = 1024
        triton_kernels.copy_states_kernel[(slots.shape[0], _cdiv(words, block))](
            pool,
            pages,
            slots,
            states,
            slots.stride(0),
            first,
            words,
            PAGES=pages.shape[1],
            PAGE_WORDS=pool.shape[1],
            TO_POOL=to_pool,
            BLOCK=block,
        )
        return
    real, page, at = _places(pool, pages, slots, first, words)
    if to_pool:
        pool[page, at] = states[real]
    else:
        states[real] = pool[page, at]


def convolve_step(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    channels_first: bool,
) -> torch.Tensor:
    """One token of a causal convolution over each channel, and SiLU; the last inputs move on by one.

    Args:
        inputs: [R, C] contiguous in the last dimension.
        weight: [C, W] contiguous, of the oldest input first.
        bias: [C], or None.
        pool: [all pages, numbers], of the type of the inputs that are kept.
        first: where these begin, in numbers: [W-1, C] of each sequence, or with `channels_first` [C, W-1].

    Returns:
        [R, C], as `inputs`.
    """
    requests, channels = inputs.shape
    width = weight.shape[1]
    strides = (1, width - 1) if channels_first else (channels, 1)
    out = torch.empty((requests, channels), dtype=inputs.dtype, device=inputs.device)
    if _on_gpu(pool):
        from muxserve.engine.cuda import triton_kernels

        block = 256
        triton_kernels.convolve_step_kernel[(requests, _cdiv(channels, block))](
            inputs,
            weight,
            weight if bias is None else bias,
            pool,
            pages,
            slots,
            out,
            inputs.stride(0),
            slots.stride(0),
            first,
            PAGES=pages.shape[1],
            PAGE_NUMBERS=pool.shape[1],
            CHANNELS=channels,
            WIDTH=width,
            TAP_STRIDE=strides[0],
            CHANNEL_STRIDE=strides[1],
            HAS_BIAS=bias is not None,
            BLOCK=block,
        )
        return out
    real, page, at = _places(pool, pages, slots, first, (width - 1) * channels)
    kept = pool[page, at].as_strided((page.shape[0], width - 1, channels), ((width - 1) * channels, *strides))
    window = torch.cat((kept, inputs[real, None].to(kept.dtype)), dim=1)  # [R, W, C]
    summed = (window.float() * weight.T.float()).sum(dim=1)
    if bias is not None:
        summed += bias.float()
    out.zero_()
    out[real] = torch.nn.functional.silu(summed).to(out.dtype)
    moved = window[:, 1:].mT if channels_first else window[:, 1:]
    pool[page, at] = moved.reshape(page.shape)
    return out


def delta_rule_step(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    gate: torch.Tensor,
    decay_log: torch.Tensor,
    decay_bias: torch.Tensor,
    pool: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    first_page: int,
    key_heads: int,
    tile: int,
    out: torch.Tensor,
) -> None:
    """One token of a gated delta net (arXiv:2412.06464, equation 10), queries and keys made of length 1:
    S = exp(g) S, S = S + beta (v - S k) k^T, o = S q / sqrt(K), with g = -exp(`decay_log`) softplus(`decay` +
    `decay_bias`) and beta = sigmoid(`gate`).

    Args:
        mixed: [R, 2*H*K + N*V] contiguous in the last dimension: queries and keys of H heads, then values of N.
        decay: [R, N] contiguous; like `gate`.
        decay_log: [N]; like `decay_bias`.
        pool: [all pages, numbers], of the type of the states.
        first_page: of the N states [V, K] of a sequence, the first of its pages.
        key_heads: H.
        tile: so many rows of a state lie on one page together (`tile_rows`).
        out: [R, N, V] contiguous, written.
    """
    requests, heads, values = out.shape
    keys = (mixed.shape[1] - heads * values) // (2 * key_heads)
    if _on_gpu(pool):
        from muxserve.engine.cuda import triton_kernels

        triton_kernels.delta_rule_step_kernel[(requests, heads * (values // tile))](
            mixed,
            decay,
            gate,
            decay_log,
            decay_bias,
            pool,
            pages,
            slots,
            out,
            mixed.stride(0),
            slots.stride(0),
            first_page,
            keys**-0.5,
            PAGES=pages.shape[1],
            PAGE_NUMBERS=pool.shape[1],
            KEY_HEADS=key_heads,
            HEADS=heads,
            KEYS=keys,
            VALUES=values,
            TILE=tile,
            PADDED_KEYS=_power_of_two(keys),
            num_warps=_warps(tile * keys),
        )
        return
    real, page, at = _places(pool, pages, slots, first_page * pool.shape[1], heads * values * keys)
    state = pool[page, at].view(-1, heads, values, keys).float()
    parts = mixed[real].float().split((key_heads * keys, key_heads * keys, heads * values), dim=1)
    query, key = (
        (part / part.square().sum(-1, keepdim=True).add(1e-6).sqrt()).repeat_interleave(heads // key_heads, dim=1)
        for part in (each.reshape(-1, key_heads, keys) for each in parts[:2])
    )
    value = parts[2].reshape(-1, heads, values)
    grown = torch.nn.functional.softplus(decay[real].float() + decay_bias.float())
    state *= torch.exp(-torch.exp(decay_log.float()) * grown)[:, :, None, None]
    missing = value - (state * key[:, :, None]).sum(-1)
    state += (torch.sigmoid(gate[real].float())[:, :, None] * missing)[..., None] * key[:, :, None]
    out.zero_()
    out[real] = ((state * query[:, :, None]).sum(-1) * keys**-0.5).to(out.dtype)
    pool[page, at] = state.to(pool.dtype).view(page.shape)


def state_space_step(
    inputs: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor,
    step_bias: torch.Tensor,
    pool: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    first_page: int,
    tile: int,
    out: torch.Tensor,
) -> None:
    """One token of Mamba-2 (arXiv:2405.21060, equation 16): h = exp(dt a) h + dt x B^T, y = h C + d x, with
    dt = softplus(`steps` + `step_bias`), a `decay` and d `skip`.

    Args:
        inputs: [R, N, V] of N heads; like `into` and `out_of` any stride between requests, contiguous behind that.
        steps: [R, N] contiguous in the last dimension.
        decay: float32 [N]; like `skip` and `step_bias` contiguous.
        into: [R, G, K] of G groups of heads; like `out_of`.
        pool: [all pages, numbers], of the type of the states.
        first_page: of the N states [V, K] of a sequence, the first of its pages.
        tile: so many rows of a state lie on one page together (`tile_rows`).
        out: [R, N, V] contiguous, written.
    """
    requests, heads, values = inputs.shape
    groups, size = into.shape[1:]
    if _on_gpu(pool):
        from muxserve.engine.cuda import triton_kernels

        triton_kernels.state_space_step_kernel[(requests, heads * (values // tile))](
            inputs,
            steps,
            decay,
            into,
            out_of,
            skip,
            step_bias,
            pool,
            pages,
            slots,
            out,
            inputs.stride(0),
            steps.stride(0),
            into.stride(0),
            out_of.stride(0),
            slots.stride(0),
            first_page,
            PAGES=pages.shape[1],
            PAGE_NUMBERS=pool.shape[1],
            GROUPS=groups,
            HEADS=heads,
            SIZE=size,
            VALUES=values,
            TILE=tile,
            PADDED_SIZE=_power_of_two(size),
            num_warps=_warps(tile * size),
        )
        return
    real, page, at = _places(pool, pages, slots, first_page * pool.shape[1], heads * values * size)
    state = pool[page, at].view(-1, heads, values, size).float()
    step = torch.nn.functional.softplus(steps[real].float() + step_bias.float())
    given = inputs[real].float()
    key, query = (each[real].float().repeat_interleave(heads // groups, dim=1) for each in (into, out_of))
    state *= torch.exp(step * decay.float())[:, :, None, None]
    state += (step[..., None] * given)[..., None] * key[:, :, None]
    out.zero_()
    out[real] = ((state * query[:, :, None]).sum(-1) + skip.float()[:, None] * given).to(out.dtype)
    pool[page, at] = state.to(pool.dtype).view(page.shape)


def tile_rows(page_numbers: int, rows: int, width: int) -> int:
    """How many of a state's `rows` of `width` numbers a step takes at a time, so that all of them lie on one page; 0
    where a page ends within a row."""
    if page_numbers % width:
        return 0
    return math.gcd(page_numbers // width, rows, MOST_ROWS)


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


def _places(
    pool: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which sequences are real, and where `count` numbers of their states lie, from the number `first` on: pages
    [real ones, count], and numbers within them [count]."""
    real = slots > 0
    index = torch.arange(first, first + count, device=pool.device)
    page = pages[slots[real].long()].long()[:, index // pool.shape[1]]
    return real, page, (index % pool.shape[1]).expand_as(page)


def _warps(numbers: int) -> int:
    """Warps of a program that works on so many numbers at a time."""
    return max(1, min(4, numbers // 2048))


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
