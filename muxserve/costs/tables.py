"""Measured steps as functions: monotone between the measured points, and going on beyond them as they went."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import median

from muxserve.costs.cells import DecodeCell, PrefillCell
from muxserve.costs.latency import Decode
from muxserve.costs.monotone import Curve, isotonic, monotone_grid

# Where measured curves are extrapolated they go on as over their last pieces, of which the middle one is taken: a
# single bad point at the end must not decide.
_LAST_PIECES = 3


class PrefillTable:
    """Seconds of prefill steps: `g(tokens) + a * pairs + b * sequences`.

    `a` and `b` are found from cells with equally many tokens that differ in pairs and sequences, by least squares of
    the relative errors, and are at least 0; `g` is the monotone curve through what is left.
    """

    def __init__(self, cells: Iterable[PrefillCell]) -> None:
        groups: defaultdict[int, list[PrefillCell]] = defaultdict(list)
        for cell in cells:
            groups[cell.total].append(cell)
        if not groups:
            raise ValueError("no prefill cells")
        self.per_pair, self.per_sequence = _slopes(groups.values())
        totals = sorted(groups)
        rest = [
            median(c.seconds - self.per_pair * c.pairs - self.per_sequence * c.sequences for c in groups[total])
            for total in totals
        ]
        # What pairs and sequences explain is noise where it would explain everything.
        least = min(cell.seconds for group in groups.values() for cell in group) * 0.1
        values = isotonic([max(least, value) for value in rest])
        self._curve = Curve(totals, values, _slope(totals, values))

    def seconds(self, tokens: int, pairs: int, sequences: int) -> float:
        """Of one prefill step."""
        return self._curve(tokens) + self.per_pair * pairs + self.per_sequence * sequences


class DecodeTable:
    """Seconds of decode steps over (batch, context), linear between the points of a grid that falls in no direction.

    Beyond the largest context a step grows by `per_token`, found from all batches together: the cells of small batches
    see too little context to tell. Beyond the largest batch it grows as between the two largest.
    """

    def __init__(self, cells: Iterable[DecodeCell]) -> None:
        rows: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for cell in cells:
            rows[cell.batch].append((cell.batch * cell.context, cell.seconds))
        if not rows:
            raise ValueError("no decode cells")
        self.per_token = _pooled_slope(rows.values())
        self._batches = sorted(rows)
        self._knots = sorted({context for row in rows.values() for context, _ in row})
        self._grid = monotone_grid([self._row(sorted(rows[batch])) for batch in self._batches])
        self._cache: dict[int, tuple[list[float], list[Decode]]] = {}

    def decode(self, batch: int, context: int) -> Decode:
        """The piece that holds at that context."""
        known = self._cache.get(batch)
        if known is None:
            known = self._cache[batch] = self._pieces(batch)
        ends, pieces = known
        return pieces[bisect_left(ends, context)]

    def _row(self, points: list[tuple[int, float]]) -> list[float]:
        contexts = [context for context, _ in points]
        values = isotonic([seconds for _, seconds in points])
        curve = Curve(contexts, values, self.per_token)
        # A curve through the origin is for things that start at nothing; a step has a fixed part.
        return [max(curve(knot), values[0] - self.per_token * max(0, contexts[0] - knot)) for knot in self._knots]

    def _values(self, batch: int) -> list[float]:
        batches, grid = self._batches, self._grid
        if len(batches) == 1 or batch <= batches[0]:
            return grid[0]
        i = min(bisect_right(batches, batch), len(batches) - 1)
        weight = (batch - batches[i - 1]) / (batches[i] - batches[i - 1])
        values = [low + weight * (high - low) for low, high in zip(grid[i - 1], grid[i], strict=True)]
        # Beyond the last batch this could fall where the two curves come closer.
        return list(accumulate(values, max))

    def _pieces(self, batch: int) -> tuple[list[float], list[Decode]]:
        values, knots = self._values(batch), self._knots
        ends: list[float] = []
        pieces: list[Decode] = []
        for i in range(1, len(knots)):
            slope = (values[i] - values[i - 1]) / (knots[i] - knots[i - 1])
            ends.append(knots[i])
            pieces.append(Decode(values[i] - slope * knots[i], slope, knots[i]))
        ends.append(float("inf"))
        pieces.append(Decode(values[-1] - self.per_token * knots[-1], self.per_token))
        return ends, pieces


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    slopes = [(ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1]) for i in range(max(1, len(xs) - _LAST_PIECES), len(xs))]
    return median(slopes) if slopes else ys[0] / max(1.0, xs[0])


def _pooled_slope(rows: Iterable[Sequence[tuple[int, float]]]) -> float:
    above = below = 0.0
    for row in rows:
        x0 = sum(x for x, _ in row) / len(row)
        y0 = sum(y for _, y in row) / len(row)
        above += sum((x - x0) * (y - y0) for x, y in row)
        below += sum((x - x0) ** 2 for x, _ in row)
    return max(0.0, above / below) if below else 0.0


def _slopes(groups: Iterable[Sequence[PrefillCell]]) -> tuple[float, float]:
    """Seconds per pair and per sequence, each at least 0, from the differences within groups of equal tokens."""
    pp = ps = ss = py = sy = 0.0
    for group in groups:
        n = len(group)
        scale = sum(cell.seconds for cell in group) / n
        pairs = [(cell.pairs - sum(c.pairs for c in group) / n) / scale for cell in group]
        counts = [(cell.sequences - sum(c.sequences for c in group) / n) / scale for cell in group]
        times = [(cell.seconds - scale) / scale for cell in group]
        for p, s, y in zip(pairs, counts, times, strict=True):
            pp, ps, ss, py, sy = pp + p * p, ps + p * s, ss + s * s, py + p * y, sy + s * y
    determinant = pp * ss - ps * ps
    if determinant > 1e-9 * pp * ss:
        per_pair, per_sequence = (py * ss - sy * ps) / determinant, (sy * pp - py * ps) / determinant
        if per_pair >= 0.0 and per_sequence >= 0.0:
            return per_pair, per_sequence
    # One of them is at its bound of 0: keep the one that explains more alone.
    gains = (py * py / pp if pp and py > 0 else 0.0, sy * sy / ss if ss and sy > 0 else 0.0)
    if not any(gains):
        return 0.0, 0.0
    return (py / pp, 0.0) if gains[0] >= gains[1] else (0.0, sy / ss)
