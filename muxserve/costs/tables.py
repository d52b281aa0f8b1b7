"""Measured steps as functions: monotone between the measured points, and going on beyond them as they went."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import median

from muxserve.costs.latency import Decode
from muxserve.costs.profile import DecodeCell, PrefillCell


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The non-falling sequence nearest to `values` in (weighted) least squares, by pooling adjacent violators."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for index, value in enumerate(values):
        mean, weight, length = float(value), 1.0 if weights is None else float(weights[index]), 1
        while blocks and blocks[-1][0] > mean:
            before, other, count = blocks.pop()
            mean = (mean * weight + before * other) / (weight + other)
            weight, length = weight + other, length + count
        blocks.append((mean, weight, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


def monotone_grid(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """A grid that falls in neither direction, halfway between the smallest such one above `rows` and the largest one
    below. What is monotone already stays as it is."""
    upper = [list(row) for row in rows]
    lower = [list(row) for row in rows]
    height, width = len(rows), len(rows[0]) if rows else 0
    for i in range(height):
        for j in range(width):
            above = upper[i - 1][j] if i else upper[i][j]
            left = upper[i][j - 1] if j else upper[i][j]
            upper[i][j] = max(upper[i][j], above, left)
    for i in reversed(range(height)):
        for j in reversed(range(width)):
            below = lower[i + 1][j] if i + 1 < height else lower[i][j]
            right = lower[i][j + 1] if j + 1 < width else lower[i][j]
            lower[i][j] = min(lower[i][j], below, right)
    return [[(a + b) / 2 for a, b in zip(high, low, strict=True)] for high, low in zip(upper, lower, strict=True)]


class Curve:
    """Piecewise linear through rising points (at least one), with positive values that do not fall.

    Beyond the last point it goes on with `slope`. Before the first it follows the first piece backwards, but not below
    the line through the origin.
    """

    def __init__(self, xs: Sequence[float], ys: Sequence[float], slope: float) -> None:
        self.xs = list(xs)
        self.ys = list(ys)
        self.slope = slope
        self._first = (self.ys[1] - self.ys[0]) / (self.xs[1] - self.xs[0]) if len(self.xs) > 1 else slope

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x >= xs[-1]:
            return ys[-1] + self.slope * (x - xs[-1])
        if x <= xs[0]:
            line = ys[0] * x / xs[0] if xs[0] > 0 else ys[0]
            return max(ys[0] - self._first * (xs[0] - x), line)
        i = bisect_right(xs, x)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


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
        """Seconds of one prefill step."""
        return self._curve(tokens) + self.per_pair * pairs + self.per_sequence * sequences

    def parts(self, tokens: int, pairs: int, sequences: int) -> tuple[float, float, float, float]:
        """What `seconds` consists of: what every step takes, tokens, pairs, sequences. None of them falls."""
        fixed = self._curve(0)
        return fixed, self._curve(tokens) - fixed, self.per_pair * pairs, self.per_sequence * sequences


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

    def parts(self, batch: int, context: int) -> tuple[float, float, float]:
        """What a step's seconds consist of: what every step takes, its sequences, their context."""
        fixed = max(0.0, self.decode(1, 0).fixed)
        sequences = max(0.0, self.decode(batch, 0).fixed - fixed)
        return fixed, sequences, max(0.0, self.decode(batch, context).seconds(context) - fixed - sequences)

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
