"""Chooses block sizes so that as many models as possible have equally large pages, and thus share a pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from muxserve.costs.architecture import KV_ITEM_BYTES

# The CPU attention kernel works on multiples of 32 tokens; larger blocks waste the end of every sequence.
BLOCK_STEP = 32
MAX_BLOCK_TOKENS = 256
# Half of a latent of 512 + 64 numbers, which counts as K and V of a head of that size. Pages of 64 tokens of it are as
# large as those of 288 tokens of a head of 64, for which blocks may be that large.
_LATENT = 288
# Beyond this many distinct head sizes the exact search would be slow, and no real fleet has them.
_EXACT_HEAD_DIMS = 5


@dataclass(frozen=True)
class KVShape:
    """What the pool must know of a model; `dtype` is that of its KV. `block_tokens` is None where it may be chosen, and
    pages should then have `least_bytes`."""

    name: str
    head_dim: int
    dtype: str
    block_tokens: int | None = None
    least_bytes: int = 0


@dataclass(frozen=True)
class PoolGroup:
    """Models that share a pool. `block_tokens` is per model, in the order of `models`."""

    dtype: str
    page_bytes: int
    models: tuple[str, ...]
    block_tokens: tuple[int, ...]


def page_bytes(block_tokens: int, head_dim: int, dtype: str) -> int:
    """Bytes of one page: K and V of `block_tokens` tokens of one KV head of one layer."""
    return 2 * block_tokens * head_dim * KV_ITEM_BYTES[dtype]


def block_in(pages: int, shape: KVShape) -> int | None:
    """Tokens of a block of which one KV head takes just such a page, of `pages` bytes; None if no block does."""
    tokens, rest = divmod(pages, page_bytes(1, shape.head_dim, shape.dtype))
    most = max(MAX_BLOCK_TOKENS, _LATENT) if shape.head_dim == _LATENT else MAX_BLOCK_TOKENS
    return tokens if not rest and tokens % BLOCK_STEP == 0 and 0 < tokens <= most else None


def group_pools(shapes: Sequence[KVShape]) -> list[PoolGroup]:
    """As few pools as possible, and in them blocks as small as possible.

    Models of different dtype never share: a page given back by one could hold bit patterns that are NaN to the other,
    and attention multiplies masked positions by zero.
    """
    groups = []
    for dtype in sorted({shape.dtype for shape in shapes}):
        same = [shape for shape in shapes if shape.dtype == dtype]
        elements = _page_elements(same)
        for page_elements in sorted(set(elements.values())):
            members = [shape for shape in same if elements[shape.name] == page_elements]
            groups.append(
                PoolGroup(
                    dtype=dtype,
                    page_bytes=2 * page_elements * KV_ITEM_BYTES[dtype],
                    models=tuple(shape.name for shape in members),
                    block_tokens=tuple(page_elements // shape.head_dim for shape in members),
                )
            )
    return groups


def _page_elements(shapes: Sequence[KVShape]) -> dict[str, int]:
    """Name -> size of its page in elements (tokens x head_dim), of models of one dtype."""
    free = {shape.head_dim for shape in shapes if shape.block_tokens is None}
    least = max(-(-shape.least_bytes // (2 * KV_ITEM_BYTES[shape.dtype])) for shape in shapes)
    chosen = {dim: page for page, dims in (_cover(free, least) if free else {}).items() for dim in dims}
    return {
        shape.name: chosen[shape.head_dim] if shape.block_tokens is None else shape.block_tokens * shape.head_dim
        for shape in shapes
    }


def _cover(head_dims: set[int], least: int) -> dict[int, set[int]]:
    """Page size in elements (tokens x head_dim), if possible not below `least` -> the head sizes that use it."""
    reach: dict[int, set[int]] = {}
    first = {dim: min(max(1, -(-least // (BLOCK_STEP * dim))) * BLOCK_STEP, MAX_BLOCK_TOKENS) for dim in head_dims}
    most = max(MAX_BLOCK_TOKENS, _LATENT) if _LATENT in head_dims else MAX_BLOCK_TOKENS
    for head_dim in head_dims:
        for tokens in range(first[head_dim], most + 1, BLOCK_STEP):
            reach.setdefault(tokens * head_dim, set()).add(head_dim)
    if len(head_dims) > _EXACT_HEAD_DIMS:
        return _greedy(head_dims, reach)
    for count in range(1, len(head_dims)):
        found = [
            _assign(head_dims, pages, reach)
            for pages in itertools.combinations(sorted(reach), count)
            if set().union(*(reach[page] for page in pages)) == head_dims
        ]
        if found:
            return min(found, key=_waste)
    return {first[head_dim] * head_dim: {head_dim} for head_dim in head_dims}


def _greedy(head_dims: set[int], reach: dict[int, set[int]]) -> dict[int, set[int]]:
    chosen: dict[int, set[int]] = {}
    left = set(head_dims)
    while left:
        page = min(reach, key=lambda page: (-len(reach[page] & left), page))
        chosen[page] = reach[page] & left
        left -= chosen[page]
    return chosen


def _assign(head_dims: set[int], pages: tuple[int, ...], reach: dict[int, set[int]]) -> dict[int, set[int]]:
    """Each head size to the smallest of `pages` that it can use."""
    chosen: dict[int, set[int]] = {}
    for head_dim in head_dims:
        chosen.setdefault(min(page for page in pages if head_dim in reach[page]), set()).add(head_dim)
    return chosen


def _waste(cover: dict[int, set[int]]) -> tuple[int, int]:
    """Largest block, then all blocks together, in tokens."""
    blocks = [page // head_dim for page, head_dims in cover.items() for head_dim in head_dims]
    return max(blocks), sum(blocks)
