"""Triton kernels of the CUDA engine. `kernels.py` launches them and has a plain torch version of each.

Counts that change from step to step are not specialised on, so that a server compiles each kernel once per model and
not in the middle of serving.
"""

# Names in capitals are compile-time constants, as is usual in Triton.
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["requests"])
def fold_requests_kernel(
    query_start_ptr,
    seq_lens_ptr,
    starts_ptr,
    lens_ptr,
    requests,
    HEADS: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Query starts and lengths of the folded sequences; one thread for each of them and one for the end."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = requests * HEADS
    inside = index < rows
    tokens = tl.load(query_start_ptr + requests)
    if HEAD_MAJOR:
        head = index // requests
        request = index % requests
    else:
        request = index // HEADS
        head = index % HEADS
    first = tl.load(query_start_ptr + request, mask=inside, other=0)
    if HEAD_MAJOR:
        start = head * tokens + first
    else:
        after = tl.load(query_start_ptr + request + 1, mask=inside, other=0)
        start = first * HEADS + head * (after - first)
    start = tl.where(inside, start, tokens * HEADS)
    tl.store(starts_ptr + index, start, mask=index <= rows)
    length = tl.load(seq_lens_ptr + request, mask=inside, other=0)
    tl.store(lens_ptr + index, length, mask=inside)


@triton.jit(do_not_specialize=["requests", "table_stride", "first_layer"])
def gather_tables_kernel(
    page_table_ptr,
    block_table_ptr,
    seq_lens_ptr,
    out_ptr,
    requests,
    table_stride,
    first_layer,
    layer_stride,
    row_stride,
    columns,
    LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Pages of one request's blocks, for some columns of its block table and some (layer, head) pairs.

    A block's row of the page table is contiguous over (layer, head), a row of the result over blocks.
    """
    request = tl.program_id(0)
    used = tl.cdiv(tl.load(seq_lens_ptr + request), BLOCK_TOKENS)
    used = tl.minimum(used, columns)
    first = tl.program_id(1) * BLOCK_COLUMNS
    if first < used:
        column = first + tl.arange(0, BLOCK_COLUMNS)
        pair = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        inside = (column < used)[:, None] & (pair < LAYERS * HEADS)[None, :]
        block = tl.load(block_table_ptr + request.to(tl.int64) * table_stride + column, mask=column < used, other=0)
        source = block.to(tl.int64)[:, None] * WIDTH + (first_layer * HEADS + pair)[None, :]
        page = tl.load(page_table_ptr + source, mask=inside, other=0)
        # Of a block that was never uploaded the page is -1. Only rows that pad a batch have such blocks; what they
        # read is thrown away, but it must be readable.
        page = tl.maximum(page, 0)
        layer = pair // HEADS
        head = pair % HEADS
        row = head * requests + request if HEAD_MAJOR else request * HEADS + head
        target = layer.to(tl.int64) * layer_stride + row.to(tl.int64) * row_stride
        tl.store(out_ptr + target[None, :] + column[:, None], page, mask=inside)


@triton.jit(do_not_specialize=["layer"])
def store_kv_kernel(
    key_ptr,
    value_ptr,
    pool_ptr,
    page_table_ptr,
    slots_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    layer,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """K and V of one token into the pages of its block; a token that pads a batch (slot -1) is left out."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        block = slot // BLOCK_TOKENS
        offset = slot % BLOCK_TOKENS
        head = tl.arange(0, PADDED_HEADS)
        dim = tl.arange(0, PADDED_DIM)
        page = tl.load(page_table_ptr + block * WIDTH + layer * HEADS + head, mask=head < HEADS, other=-1)
        page = page.to(tl.int64)
        inside = (page >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(
            key_ptr + token * key_token_stride + head[:, None] * key_head_stride + dim[None, :], mask=inside, other=0.0
        )
        value = tl.load(
            value_ptr + token * value_token_stride + head[:, None] * value_head_stride + dim[None, :],
            mask=inside,
            other=0.0,
        )
        target = pool_ptr + (page * BLOCK_TOKENS + offset)[:, None] * (2 * HEAD_DIM) + dim[None, :]
        tl.store(target, key, mask=inside)
        tl.store(target + HEAD_DIM, value, mask=inside)


@triton.jit(do_not_specialize=["tokens", "lse_head_stride"])
def apply_sinks_kernel(
    output_ptr,
    lse_ptr,
    sinks_ptr,
    tokens,
    output_row_stride,
    lse_head_stride,
    lse_row_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """What is not the sink's of each query head's softmax, times its output; one row of tokens and KV heads."""
    row = tl.program_id(0).to(tl.int64)
    head = row // tokens if HEAD_MAJOR else row % HEADS
    query = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    known = query < GROUP
    lse = tl.load(lse_ptr + query * lse_head_stride + row * lse_row_stride, mask=known, other=0.0)
    sink = tl.load(sinks_ptr + head * GROUP + query, mask=known, other=0.0).to(tl.float32)
    part = 1.0 / (1.0 + tl.exp(sink - lse))
    inside = known[:, None] & (dim < HEAD_DIM)[None, :]
    place = output_ptr + row * output_row_stride + query[:, None] * HEAD_DIM + dim[None, :]
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * part[:, None]
    tl.store(place, value.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scatter_rows_kernel(staging_ptr, table_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A staged row, which begins with the number of its block, into the page table."""
    staged = staging_ptr + tl.program_id(0).to(tl.int64) * (WIDTH + 1)
    block = tl.load(staged).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(staged + 1 + column, mask=column < WIDTH, other=0)
    tl.store(table_ptr + block * WIDTH + column, page, mask=column < WIDTH)
