"""Snapshots of states: where a prompt's are kept, and under which hashes (pure).

A state is overwritten by every step, so that a later prompt with the same beginning can only begin where a copy of it
was kept. A snapshot lies on blocks of its own. They are published under hashes that follow from the hash of the block
of tokens before them: the memory manager evicts, shares and counts them as it does blocks of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

# The kernels of gated delta nets compute so many tokens of a prompt at a time. Where a step ends within them, sums are
# rounded otherwise, which in 16 bits changes a token now and then.
SCAN_TOKENS = 64


def snapshot_hashes(behind: bytes, count: int) -> list[bytes]:
    """Under which hashes the `count` blocks are published that hold the states as they are behind the block of tokens
    with the hash `behind`."""
    return [hashlib.sha256(b"states" + behind + index.to_bytes(4, "little")).digest() for index in range(count)]


def snapshot_stops(tokens: int, block_tokens: int, junction: int) -> set[int]:
    """Behind how many tokens of a prompt of `tokens` snapshots are kept: behind the last block from which the same
    prompt could go on, and behind its first `junction` blocks, which others begin with as well; both rounded down to
    `SCAN_TOKENS` where blocks divide these."""
    last = (tokens - 1) // block_tokens
    step = SCAN_TOKENS // block_tokens if SCAN_TOKENS % block_tokens == 0 else 1
    return {blocks // step * step * block_tokens for blocks in (last, min(last, junction)) if blocks >= step}


def end_of_chunk(start: int, end: int, stops: Iterable[int]) -> int:
    """Where the chunk of a prompt ends that begins at token `start` and may go to `end`: at the first of the `stops`
    within it, if there is one."""
    return min((stop for stop in stops if start < stop < end), default=end)
