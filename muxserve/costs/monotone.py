"""Small tools for measured curves that must not fall."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


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
