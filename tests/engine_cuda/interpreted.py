"""The Triton kernels in Triton's interpreter against plain torch: `python interpreted.py` with TRITON_INTERPRET=1.

A process of its own: Triton must not be importable where vLLM for CPU is, which would take it for a GPU's.
"""

from __future__ import annotations

import itertools

import torch

from muxserve.engine.cuda import kernels


def both(operation, *outs: torch.Tensor, rounding: float = 0.0) -> None:
    """Run `operation(*outs)` in plain torch and interpreted; both must leave the same in `outs`."""
    expected = [out.clone() for out in outs]
    kernels._on_gpu = lambda _: False
    operation(*expected)
    kernels._on_gpu = lambda _: True
    operation(*outs)
    for ours, reference in zip(outs, expected, strict=True):
        # To the last bit but for what is computed in between.
        torch.testing.assert_close(ours, reference, rtol=rounding, atol=rounding / 10, equal_nan=True)


def lengths(generator: torch.Generator, requests: int, decode: bool, padded: int, block: int):
    """Query starts and sequence lengths of a batch, the last `padded` requests being empty."""
    counts = torch.ones(requests) if decode else torch.randint(1, 9, (requests,), generator=generator)
    context = torch.randint(0, 5 * block, (requests,), generator=generator)
    counts[requests - padded :] = 0
    context[requests - padded :] = 0
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    return starts, (counts + context).to(torch.int32)


def states(generator: torch.Generator) -> None:
    """The steps of states on pages, for pages that hold part of a head's state, the whole of it, or those of several
    heads; of the sequences one pads the batch."""
    # Heads, key heads or groups, rows of a head's state, numbers in a row, numbers in a page.
    shapes = [(4, 2, 16, 8, 64), (4, 4, 8, 16, 128), (2, 1, 8, 16, 512), (6, 2, 4, 12, 24)]
    for (heads, groups, values, keys, page), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        rounding = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
        whole, requests, channels, width = -(-heads * values * keys // page), 5, 2 * groups * keys + heads * values, 4
        per_slot = whole + -(-channels * (width - 1) // page) + 1
        total = 6 * per_slot + 1
        pages = torch.randperm(total - 1, generator=generator)[: 6 * per_slot].to(torch.int32).view(6, per_slot) + 1
        # As a column of a block table: not contiguous.
        slots = torch.tensor([3, 0, 5, 1, 2], dtype=torch.int32)[:, None].repeat(1, 2)[:, 0]
        tile = kernels.tile_rows(page, values, keys)
        assert tile

        def drawn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        pool = drawn(total, page, dtype=torch.float32)
        words = torch.randint(0, 9999, (total, page), generator=generator, dtype=torch.int32)
        for to_pool, first, count in ((False, 0, page + 5), (True, 3, 2 * page)):
            held = torch.randint(0, 9999, (requests, count), generator=generator, dtype=torch.int32)
            both(
                lambda pool, held, pages=pages, slots=slots, first=first, to_pool=to_pool: kernels.copy_states(
                    pool, pages, slots, held, first, to_pool
                ),
                words.clone(),
                held,
            )

        mixed = drawn(requests, channels + 3)[:, :channels]
        weight, bias = drawn(channels, width), drawn(channels)
        for biased, channels_first in ((True, False), (False, True)):
            out = torch.zeros((requests, channels), dtype=dtype)
            both(
                lambda pool, out, biased=biased, channels_first=channels_first, m=mixed, w=weight, b=bias, p=pages, s=slots, f=whole * page: (  # noqa: E501
                    out.copy_(kernels.convolve_step(m, w, b if biased else None, pool, p, s, f, channels_first))
                ),
                pool.to(dtype),
                out,
                rounding=rounding,
            )

        given = (drawn(requests, heads), drawn(requests, heads), drawn(heads, dtype=torch.float32), drawn(heads))
        both(
            lambda pool, out, given=given, m=mixed, p=pages, s=slots, groups=groups, tile=tile: kernels.delta_rule_step(
                m, *given, pool, p, s, 0, groups, tile, out
            ),
            pool.to(dtype),
            torch.full((requests, heads, values), 7.0, dtype=dtype),
            rounding=rounding,
        )

        inputs = mixed[:, : heads * values].view(requests, heads, values)
        sides = [mixed[:, at : at + groups * keys].view(requests, groups, keys) for at in (heads, heads + groups)]
        given = (drawn(requests, heads + 1)[:, :heads], -drawn(heads, dtype=torch.float32).abs(), *sides)
        skips = (drawn(heads), drawn(heads))
        both(
            lambda pool, out, i=inputs, g=given, k=skips, p=pages, s=slots, tile=tile: kernels.state_space_step(
                i, *g, *k, pool, p, s, 0, tile, out
            ),
            pool.to(dtype),
            torch.full((requests, heads, values), 7.0, dtype=dtype),
            rounding=rounding,
        )


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    states(generator)
    shapes = [(1, 1, 1, 16), (3, 2, 2, 16), (5, 8, 3, 32), (33, 3, 5, 64)]
    for (requests, heads, layers, dim), decode, padded in itertools.product(shapes, (True, False), (0, 2)):
        if padded >= requests or (padded and not decode):
            continue
        block, blocks = 16, 90
        starts, lens = lengths(generator, requests, decode, padded, block)
        tokens = int(starts[-1])

        both(
            lambda a, b, args=(starts, lens, heads, not decode): kernels.fold_requests(*args, a, b),
            torch.full((requests * heads + 1,), -7, dtype=torch.int32),
            torch.full((requests * heads,), -7, dtype=torch.int32),
        )

        page_table = torch.randint(0, 500, (blocks, layers, heads), generator=generator, dtype=torch.int32)
        page_table[0] = -1
        block_table = torch.randint(1, blocks, (requests, 12), generator=generator, dtype=torch.int32)
        longest = -(-int(lens.max()) // block)
        for first, count in ((0, layers), (layers - 1, 1)):
            both(
                lambda out, args=(page_table, block_table, lens, block, not decode), first=first, longest=longest, n=requests: (  # noqa: E501
                    kernels.gather_tables(*args, out, n, longest, first)
                ),
                torch.full((count, (requests + 1) * heads, 12), 3, dtype=torch.int32),
            )

        # K and V as they come out of one projection: neither is contiguous.
        projected = torch.randn((tokens + padded, heads, 2, dim), generator=generator)
        key, value = projected[:, :, 0], projected[:, :, 1]
        table = torch.arange(blocks * layers * heads, dtype=torch.int32).view(blocks, layers, heads)
        table = table[torch.randperm(blocks, generator=generator)].contiguous()
        table[3] = -1
        slots = torch.randperm(blocks * block, generator=generator)[: tokens + padded]
        slots[tokens:] = -1
        if tokens > 1:
            slots[0] = 3 * block + 1  # of a block whose pages are not known
        both(
            lambda pool, k=key, v=value, t=table, s=slots, layer=layers - 1: kernels.store_kv(k, v, pool, t, s, layer),
            torch.zeros((blocks * layers * heads, 1, block, 2 * dim)),
        )

        group = heads + 1
        for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            sinks = torch.randn(heads * group, generator=generator).to(dtype)
            lse = 3 * torch.randn((group, tokens * heads), generator=generator)
            both(
                lambda out, lse=lse, sinks=sinks, heads=heads, major=not decode: kernels.apply_sinks(
                    out, lse, sinks, heads, major
                ),
                torch.randn((tokens * heads, group, dim), generator=generator).to(dtype),
                rounding=rounding,
            )

        rows = torch.randint(0, 99, (requests, 1 + layers * heads), generator=generator, dtype=torch.int32)
        rows[:, 0] = torch.randperm(blocks, generator=generator)[:requests]
        both(lambda out, rows=rows: kernels.scatter_rows(rows, out), page_table.clone())
    print("equal")


if __name__ == "__main__":
    main()
