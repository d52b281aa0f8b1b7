"""Where snapshots of states are kept of a prompt: no engine, no pages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muxserve.engine.snapshots import SCAN_TOKENS, end_of_chunk, snapshot_hashes, snapshot_stops


@given(
    tokens=st.integers(1, 400),
    block=st.integers(1, 64),
    junction=st.integers(0, 12),
    begins=st.integers(0, 12),
    budgets=st.lists(st.integers(1, 90), min_size=1, max_size=8),
)
def test_chunks_end_at_every_stop_and_computing_goes_on(
    tokens: int, block: int, junction: int, begins: int, budgets: list[int]
) -> None:
    stops = snapshot_stops(tokens, block, junction)
    start = min(begins, (tokens - 1) // block) * block
    ends, wanted = [], {stop for stop in stops if stop > start}
    while start < tokens:
        end = end_of_chunk(start, min(tokens, start + budgets[len(ends) % len(budgets)]), stops)
        assert start < end
        ends.append(end)
        start = end
    assert ends[-1] == tokens
    assert wanted <= {*ends}


@given(tokens=st.integers(1, 400), block=st.integers(1, 64), junction=st.integers(0, 12))
def test_a_prompt_can_begin_behind_every_stop(tokens: int, block: int, junction: int) -> None:
    """Behind whole blocks, with a token left: its logits are needed. The last such place is one."""
    stops = snapshot_stops(tokens, block, junction)
    assert all(stop % block == 0 and 0 < stop < tokens for stop in stops)
    assert len(stops) <= 2
    size = SCAN_TOKENS if SCAN_TOKENS % block == 0 else block
    assert (max(stops) if stops else 0) == (tokens - 1) // size * size


def test_no_two_blocks_of_snapshots_have_one_hash() -> None:
    blocks = [bytes([each]) * 32 for each in range(4)]
    hashes = [name for block in blocks for name in snapshot_hashes(block, 5)]
    assert len({*hashes, *blocks}) == len(hashes) + len(blocks)
    assert {len(each) for each in hashes} == {32}
