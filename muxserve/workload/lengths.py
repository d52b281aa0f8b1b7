"""How long prompts and answers are, in tokens. Every distribution is bounded: a small model can serve it."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Lengths(Hashable, Protocol):
    """A bounded distribution of token counts."""

    @property
    def high(self) -> int:
        """The largest count that `sample` returns."""
        ...

    def sample(self, rng: random.Random) -> int:
        """One count, at least 1."""
        ...


def _check_bounds(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(f"lengths need 1 <= low <= high, not low {low} and high {high}")


@dataclass(frozen=True)
class FixedLength:
    """Always `tokens` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        _check_bounds(self.tokens, self.tokens)

    @property
    def high(self) -> int:
        return self.tokens

    def sample(self, rng: random.Random) -> int:
        return self.tokens


@dataclass(frozen=True)
class UniformLengths:
    """Every count from `low` to `high` alike, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def sample(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class LogNormalLengths:
    """A long tail, as in chat logs: log-normal around `median` with `sigma`, drawn again when outside `low..high`.

    Raises:
        ValueError: bounds that contradict each other, a median outside them, or a sigma that is not positive.
    """

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)
        if not self.low <= self.median <= self.high:
            raise ValueError(f"the median {self.median} lies outside {self.low}..{self.high}")
        if not (self.sigma > 0 and math.isfinite(self.sigma)):
            raise ValueError(f"sigma must be positive, not {self.sigma}")

    def sample(self, rng: random.Random) -> int:
        location = math.log(self.median)
        # The median lies inside the bounds; a narrow pair of bounds may still need many draws, so they are counted.
        for _ in range(1000):
            tokens = round(rng.lognormvariate(location, self.sigma))
            if self.low <= tokens <= self.high:
                return tokens
        return round(self.median)


@dataclass(frozen=True)
class PowerLawLengths:
    """Density proportional to length^-exponent from `low` to `high`.

    Raises:
        ValueError: bounds that contradict each other, or an exponent that is not positive.
    """

    exponent: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)
        if not (self.exponent > 0 and math.isfinite(self.exponent)):
            raise ValueError(f"the exponent must be positive, not {self.exponent}")

    def quantile(self, share: float) -> float:
        """The length that `share` (0..1) of all stay below, before rounding."""
        power = 1 - self.exponent
        if abs(power) < 1e-9:
            return float(self.low * (self.high / self.low) ** share)
        first, last = self.low**power, self.high**power
        return float((first + share * (last - first)) ** (1 / power))

    def sample(self, rng: random.Random) -> int:
        return min(self.high, max(self.low, round(self.quantile(rng.random()))))


class QuantileLengths:
    """Given percentiles and a mean, and nothing invented beyond a way to connect them.

    Between two knots the length raised to the power `bend` is interpolated linearly (logarithmically for 0). The
    percentiles come out exactly whatever the bend, and the mean grows with it, so the bend is chosen for the mean.

    Args:
        mean: of the distribution, tokens.
        percentiles: share (0..1) -> length, both rising.
        low, high: the shortest and the longest length, the knots at 0 and 1.

    Raises:
        ValueError: knots that do not rise, or a mean that no bend can reach.
    """

    def __init__(self, mean: float, percentiles: Mapping[float, float], low: int, high: int) -> None:
        _check_bounds(low, high)
        self._shares = [0.0, *percentiles, 1.0]
        self._lengths = [float(low), *map(float, percentiles.values()), float(high)]
        for knots in (self._shares, self._lengths):
            if any(b <= a for a, b in itertools.pairwise(knots)):
                raise ValueError(f"percentiles and lengths must rise, not {knots}")
        self.low, self.high = low, high
        least, most = -8.0, 8.0
        if not self._mean(least) <= mean <= self._mean(most):
            raise ValueError(
                f"these percentiles allow means from {self._mean(least):.1f} to {self._mean(most):.1f}, not {mean:g}"
            )
        for _ in range(60):
            middle = (least + most) / 2
            least, most = (middle, most) if self._mean(middle) < mean else (least, middle)
        self.bend = (least + most) / 2

    def __repr__(self) -> str:
        knots = dict(zip(self._shares, self._lengths, strict=True))
        return f"QuantileLengths({knots}, bend={self.bend:.3f})"

    def _mean(self, bend: float) -> float:
        return math.fsum(
            (q - p) * _bent_mean(a, b, bend)
            for (p, q), (a, b) in zip(itertools.pairwise(self._shares), itertools.pairwise(self._lengths), strict=True)
        )

    def quantile(self, share: float) -> float:
        """The length that `share` (0..1) of all stay below, before rounding."""
        at = min(bisect.bisect_right(self._shares, share), len(self._shares) - 1)
        part = (share - self._shares[at - 1]) / (self._shares[at] - self._shares[at - 1])
        a, b = self._lengths[at - 1], self._lengths[at]
        if abs(self.bend) < 1e-9:
            return float(a * (b / a) ** part)
        return float((a**self.bend + part * (b**self.bend - a**self.bend)) ** (1 / self.bend))

    def sample(self, rng: random.Random) -> int:
        return min(self.high, max(self.low, round(self.quantile(rng.random()))))


def _bent_mean(a: float, b: float, bend: float) -> float:
    """Mean of x over x^bend uniform between a^bend and b^bend."""
    # Scaled by b, so that high powers of long lengths stay finite. The two removable poles are stepped around.
    ratio = a / b
    if abs(bend) < 1e-6 or abs(bend + 1) < 1e-6:
        bend += 1e-5
    power = bend + 1
    return float(b * bend / power * (1 - ratio**power) / (1 - ratio**bend))


@dataclass(frozen=True)
class CappedLengths:
    """Another distribution, what is longer than `high` counting as `high`: how a server with short limits meets it."""

    lengths: Lengths
    high: int

    def __post_init__(self) -> None:
        _check_bounds(1, self.high)

    def sample(self, rng: random.Random) -> int:
        return min(self.high, self.lengths.sample(rng))
