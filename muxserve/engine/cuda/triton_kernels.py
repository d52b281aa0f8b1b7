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
        # The page of a block that was never uploaded is -1. Only rows that pad a batch have such blocks; what they
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


@triton.jit(do_not_specialize=["slot_stride", "first"])
def copy_states_kernel(
    pool_ptr,
    pages_ptr,
    slots_ptr,
    states_ptr,
    slot_stride,
    first,
    words,
    PAGES: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    TO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some words of one sequence's states from its pages to where all of them lie together, or back."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row * slot_stride).to(tl.int64)
    if slot > 0:
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = word < words
        page = tl.load(pages_ptr + slot * PAGES + (first + word) // PAGE_WORDS, mask=inside, other=0).to(tl.int64)
        place = pool_ptr + page * PAGE_WORDS + (first + word) % PAGE_WORDS
        held = states_ptr + row * words + word
        if TO_POOL:
            tl.store(place, tl.load(held, mask=inside, other=0), mask=inside)
        else:
            tl.store(held, tl.load(place, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["input_stride", "slot_stride", "first"])
def convolve_step_kernel(
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    pool_ptr,
    pages_ptr,
    slots_ptr,
    out_ptr,
    input_stride,
    slot_stride,
    first,
    PAGES: tl.constexpr,
    PAGE_NUMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one sequence: its kept inputs and the new one, weighted; each moves to the place before."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    slot = tl.load(slots_ptr + row * slot_stride).to(tl.int64)
    held = inside & (slot > 0)
    given = tl.load(inputs_ptr + row * input_stride + channel, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0)
    kept = given.to(pool_ptr.dtype.element_ty)
    summed = kept.to(tl.float32) * weight.to(tl.float32)
    # From the last to the first: the input of a place comes from the one behind it.
    for back in tl.static_range(WIDTH - 1):
        tap = WIDTH - 2 - back
        at = first + tap * TAP_STRIDE + channel * CHANNEL_STRIDE
        page = tl.load(pages_ptr + slot * PAGES + at // PAGE_NUMBERS, mask=held, other=0).to(tl.int64)
        place = pool_ptr + page * PAGE_NUMBERS + at % PAGE_NUMBERS
        before = tl.load(place, mask=held, other=0.0)
        tl.store(place, kept, mask=held)
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0)
        summed += before.to(tl.float32) * weight.to(tl.float32)
        kept = before
    if HAS_BIAS:
        summed += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    result = tl.where(held, summed * tl.sigmoid(summed), 0.0)
    tl.store(out_ptr + row * CHANNELS + channel, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which is x for large x."""
    return tl.where(x <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))), x)


@triton.jit(do_not_specialize=["mixed_stride", "slot_stride", "first_page"])
def delta_rule_step_kernel(
    mixed_ptr,
    decay_ptr,
    gate_ptr,
    decay_log_ptr,
    decay_bias_ptr,
    pool_ptr,
    pages_ptr,
    slots_ptr,
    out_ptr,
    mixed_stride,
    slot_stride,
    first_page,
    scale,
    PAGES: tl.constexpr,
    PAGE_NUMBERS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_KEYS: tl.constexpr,
):
    """A tile of the state of one head of one sequence, on one page."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) // (VALUES // TILE)
    value = tl.program_id(1) % (VALUES // TILE) * TILE + tl.arange(0, TILE)
    target = out_ptr + (row * HEADS + head) * VALUES + value
    slot = tl.load(slots_ptr + row * slot_stride).to(tl.int64)
    if slot > 0:
        key = tl.arange(0, PADDED_KEYS)
        known = key < KEYS
        begin = tl.program_id(1) * TILE * KEYS
        page = tl.load(pages_ptr + slot * PAGES + first_page + begin // PAGE_NUMBERS).to(tl.int64)
        index = tl.arange(0, TILE)[:, None] * KEYS + key[None, :]
        place = pool_ptr + page * PAGE_NUMBERS + begin % PAGE_NUMBERS + index
        inside = known[None, :]
        state = tl.load(place, mask=inside, other=0.0).to(tl.float32)

        mixed = mixed_ptr + row * mixed_stride
        of_head = head // (HEADS // KEY_HEADS) * KEYS
        q = tl.load(mixed + of_head + key, mask=known, other=0.0).to(tl.float32)
        k = tl.load(mixed + KEY_HEADS * KEYS + of_head + key, mask=known, other=0.0).to(tl.float32)
        v = tl.load(mixed + 2 * KEY_HEADS * KEYS + head * VALUES + value).to(tl.float32)
        q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        grown = tl.load(decay_ptr + row * HEADS + head).to(tl.float32)
        grown = softplus(grown + tl.load(decay_bias_ptr + head).to(tl.float32))
        state *= tl.exp(-tl.exp(tl.load(decay_log_ptr + head).to(tl.float32)) * grown)
        beta = tl.sigmoid(tl.load(gate_ptr + row * HEADS + head).to(tl.float32))
        missing = beta * (v - tl.sum(state * k[None, :], 1))
        state += missing[:, None] * k[None, :]
        tl.store(target, tl.sum(state * q[None, :], 1).to(out_ptr.dtype.element_ty))
        tl.store(place, state.to(pool_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(target, tl.zeros([TILE], dtype=tl.float32).to(out_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=["input_stride", "step_stride", "into_stride", "out_of_stride", "slot_stride", "first_page"]
)
def state_space_step_kernel(
    inputs_ptr,
    steps_ptr,
    decay_ptr,
    into_ptr,
    out_of_ptr,
    skip_ptr,
    step_bias_ptr,
    pool_ptr,
    pages_ptr,
    slots_ptr,
    out_ptr,
    input_stride,
    step_stride,
    into_stride,
    out_of_stride,
    slot_stride,
    first_page,
    PAGES: tl.constexpr,
    PAGE_NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    """A tile of the state of one head of one sequence, on one page."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) // (VALUES // TILE)
    value = tl.program_id(1) % (VALUES // TILE) * TILE + tl.arange(0, TILE)
    target = out_ptr + (row * HEADS + head) * VALUES + value
    slot = tl.load(slots_ptr + row * slot_stride).to(tl.int64)
    if slot > 0:
        number = tl.arange(0, PADDED_SIZE)
        known = number < SIZE
        begin = tl.program_id(1) * TILE * SIZE
        page = tl.load(pages_ptr + slot * PAGES + first_page + begin // PAGE_NUMBERS).to(tl.int64)
        index = tl.arange(0, TILE)[:, None] * SIZE + number[None, :]
        place = pool_ptr + page * PAGE_NUMBERS + begin % PAGE_NUMBERS + index
        inside = known[None, :]
        state = tl.load(place, mask=inside, other=0.0).to(tl.float32)

        of_group = head // (HEADS // GROUPS) * SIZE
        given = tl.load(inputs_ptr + row * input_stride + head * VALUES + value).to(tl.float32)
        key = tl.load(into_ptr + row * into_stride + of_group + number, mask=known, other=0.0).to(tl.float32)
        query = tl.load(out_of_ptr + row * out_of_stride + of_group + number, mask=known, other=0.0).to(tl.float32)
        step = tl.load(steps_ptr + row * step_stride + head).to(tl.float32)
        step = softplus(step + tl.load(step_bias_ptr + head).to(tl.float32))
        state *= tl.exp(step * tl.load(decay_ptr + head).to(tl.float32))
        state += (step * given)[:, None] * key[None, :]
        result = tl.sum(state * query[None, :], 1) + tl.load(skip_ptr + head).to(tl.float32) * given
        tl.store(target, result.to(out_ptr.dtype.element_ty))
        tl.store(place, state.to(pool_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(target, tl.zeros([TILE], dtype=tl.float32).to(out_ptr.dtype.element_ty))
