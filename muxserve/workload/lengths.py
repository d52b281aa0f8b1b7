"""How long prompts and answers are, in tokens. Every distribution is bounded: a small model can serve it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol


class Lengths(Protocol):
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
