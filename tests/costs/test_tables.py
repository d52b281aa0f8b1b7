"""Tables of measured steps: exact where measured, monotone between, going on beyond."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.costs.profile import DecodeCell, PrefillCell
from muxserve.costs.tables import DecodeTable, PrefillTable, isotonic, monotone_grid


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_isotonic_rises_and_keeps_the_mean(values: list[float]) -> None:
    fitted = isotonic(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values))


def test_isotonic_leaves_what_rises_alone() -> None:
    assert isotonic([1, 2, 2, 5]) == [1, 2, 2, 5]
    assert isotonic([1, 4, 2, 5]) == [1, 3, 3, 5]


@given(st.lists(st.lists(st.floats(0, 10), min_size=4, max_size=4), min_size=1, max_size=5))
def test_grid_falls_in_no_direction_and_stays_when_it_does_not(rows: list[list[float]]) -> None:
    grid = monotone_grid(rows)
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            assert j == 0 or row[j - 1] <= value
            assert i == 0 or grid[i - 1][j] <= value
    assert monotone_grid(grid) == grid


def prefill(sequences: int, tokens: int, context: int = 0) -> PrefillCell:
    cell = PrefillCell(sequences, tokens, context, 0.0)
    seconds = 2e-3 + 1e-5 * cell.total + 3e-8 * cell.pairs + 1e-4 * sequences
    return PrefillCell(sequences, tokens, context, seconds)


PREFILL = [prefill(s, t) for s in (1, 4, 16) for t in (16, 64, 256, 1024)] + [
    prefill(1, 256, context) for context in (256, 512, 1024)
]


def test_prefill_finds_what_pairs_and_sequences_cost() -> None:
    table = PrefillTable(PREFILL)
    assert table.per_pair == pytest.approx(3e-8, rel=0.01)
    assert table.per_sequence == pytest.approx(1e-4, rel=0.01)
    for cell in PREFILL:
        assert table.seconds(cell.total, cell.pairs, cell.sequences) == pytest.approx(cell.seconds, rel=0.01)


@pytest.mark.parametrize(
    ("sequences", "tokens", "context"), [(2, 100, 0), (1, 700, 0), (8, 4096, 0), (1, 8, 0), (1, 64, 2048)]
)
def test_prefill_between_and_beyond(sequences: int, tokens: int, context: int) -> None:
    cell = prefill(sequences, tokens, context)
    assert PrefillTable(PREFILL).seconds(cell.total, cell.pairs, cell.sequences) == pytest.approx(
        cell.seconds, rel=0.05
    )


def decode_seconds(batch: int, context: int) -> float:
    """Flat while it is small, as on a GPU that waits for its host."""
    return max(10e-3, 6e-3 + 1e-4 * batch + 4e-7 * batch * context)


DECODE = [DecodeCell(b, c, decode_seconds(b, c)) for b in (1, 2, 4, 8, 16, 32, 64) for c in (32, 128, 512, 1024)]


@pytest.mark.parametrize(
    ("batch", "context"), [(1, 32), (64, 1024), (12, 300), (48, 700), (3, 1000), (64, 4000), (128, 1000), (1, 20_000)]
)
def test_decode_at_between_and_beyond(batch: int, context: int) -> None:
    table = DecodeTable(DECODE)
    total = batch * context
    # Twenty times the longest measured context is far out.
    tolerance = 0.15 if context == 20_000 else 0.08
    assert table.decode(batch, total).seconds(total) == pytest.approx(decode_seconds(batch, context), rel=tolerance)


@given(st.integers(0, 1000), st.integers(1, 100), st.integers(0, 100_000))
def test_decode_is_monotone_whatever_was_measured(seed: int, batch: int, context: int) -> None:
    noise = random.Random(seed)
    cells = [DecodeCell(c.batch, c.context, c.seconds * noise.uniform(0.7, 1.4)) for c in DECODE]
    table = DecodeTable(cells)

    def at(b: int, c: int) -> float:
        piece = table.decode(b, c)
        assert c <= piece.until
        return piece.seconds(c)

    here = at(batch, context)
    assert here > 0
    assert here <= at(batch + 1, context) + 1e-12
    assert here <= at(batch, context + 17) + 1e-12


def test_pieces_join() -> None:
    table = DecodeTable(DECODE)
    context = 0
    while (piece := table.decode(5, context)).until != float("inf"):
        after = table.decode(5, int(piece.until) + 1)
        assert after.seconds(piece.until) == pytest.approx(piece.seconds(piece.until))
        context = int(piece.until) + 1
    assert context > 0


def test_a_single_cell_is_enough() -> None:
    assert DecodeTable([DecodeCell(4, 100, 0.01)]).decode(9, 5000).seconds(5000) == pytest.approx(0.01)
    assert PrefillTable([PrefillCell(1, 100, 0, 0.01)]).seconds(200, 0, 1) == pytest.approx(0.02)


def test_no_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="no decode cells"):
        DecodeTable([])
    with pytest.raises(ValueError, match="no prefill cells"):
        PrefillTable([])
