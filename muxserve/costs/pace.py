"""How the speed of a machine varies from one second to the next, and from one step to another.

A shared machine has moments in which every step takes longer than before and after, whatever the model: others compute
on the same host. Their mean is a part of what steps cost. What is left are tails of latencies, which a simulation with
costs that are always the same cannot have.

The logarithm of how many times as long as usual steps take is taken for a process that forgets (AR(1), in steps of a
second): `x' = r x + sqrt(1 - r^2) s z`, `z` from a normal distribution. `s` and `r` are found from the covariances of
seconds that follow each other: what differs from one second to the next without any memory is the steps' own scatter.

A first token waits for a single prefill step, so that the scatter of these shows in its latency. Decode steps are many:
theirs evens out.
"""

from __future__ import annotations

import math
import random
from collections import deque

import msgspec

# Of a second, at least: measured seconds of steps.
_LEAST_SECONDS = 0.05
# Seconds that count, and how many say something; the first ones do not count, since costs are just being learnt.
_MOST, _FEWEST, _FIRST = 600, 60, 30
# Ratios beyond these count as these: a machine that stood still for once says nothing of how it usually is.
_FAR = math.log(2.0)
# A pace that lasts no longer than a second or two is the scatter of steps, and one that lasts for minutes is followed
# by the costs.
_LEAST_MEMORY, _MOST_MEMORY = 0.3, 0.95
# Of the scatter: a prefill step counts e times less after so many more.
_SCATTER_MEMORY = 500.0


class Pace(msgspec.Struct, frozen=True):
    """`spread` is the standard deviation of the logarithm of the factor on all steps, `memory` its correlation from one
    second to the next. `scatter` is that of the logarithm of a factor on a prefill step of its own."""

    spread: float
    memory: float
    scatter: float = 0.0


class PaceMeter:
    """Learns the pace of a device from steps, by how long they took beside what was expected."""

    def __init__(self) -> None:
        # The number of a second, and the logarithm of measured over expected seconds of its steps.
        self._seen: deque[tuple[int, float]] = deque(maxlen=_MOST)
        self._second, self._measured, self._expected = 0, 0.0, 0.0
        self._first = _FIRST
        # Fading sums: prefill steps, logarithms of measured over expected seconds, and the squares of these.
        self._prefills = self._logs = self._squares = 0.0

    def told(self, now: float, measured: float, expected: float) -> None:
        """Steps were told at `now` (seconds of any clock) that took `measured` seconds instead of `expected`."""
        if int(now) != self._second:
            if self._measured >= _LEAST_SECONDS and self._expected > 0.0:
                self._over()
            self._second, self._measured, self._expected = int(now), 0.0, 0.0
        self._measured += measured
        self._expected += max(0.0, expected)

    def prefilled(self, measured: float, expected: float) -> None:
        """A single prefill step took `measured` seconds instead of `expected`."""
        if self._first or measured <= 0.0 or expected <= 0.0:
            return
        factor, kept = max(-_FAR, min(_FAR, math.log(measured / expected))), 1.0 - 1.0 / _SCATTER_MEMORY
        self._prefills = kept * self._prefills + 1.0
        self._logs = kept * self._logs + factor
        self._squares = kept * self._squares + factor * factor

    def _over(self) -> None:
        """A second is over."""
        if self._first:
            self._first -= 1
        else:
            factor = math.log(self._measured / self._expected)
            self._seen.append((self._second, max(-_FAR, min(_FAR, factor))))

    @property
    def pace(self) -> Pace | None:
        """None: too little was seen."""
        if len(self._seen) < _FEWEST:
            return None
        mean = sum(value for _, value in self._seen) / len(self._seen)
        after = {second: value - mean for second, value in self._seen}
        whole, one, two = (_covariance(after, lag) for lag in (0, 1, 2))
        if one <= 0.0:
            return Pace(0.0, _LEAST_MEMORY, self._scatter(0.0))
        memory = max(_LEAST_MEMORY, min(_MOST_MEMORY, two / one))
        variance = min(whole, one / memory)
        return Pace(math.sqrt(variance), memory, self._scatter(variance))

    def _scatter(self, pace: float) -> float:
        """Of prefill steps, beside the variance of the `pace`."""
        if not self._prefills:
            return 0.0
        mean = self._logs / self._prefills
        return math.sqrt(max(0.0, self._squares / self._prefills - mean * mean - pace))


class PaceDraw:
    """Draws how many times as long as usual steps take, second by second; 1 in the mean."""

    def __init__(self, pace: Pace, seed: str) -> None:
        self._pace = pace
        self._random, self._steps = random.Random(f"seconds {seed}"), random.Random(f"steps {seed}")
        self._level = pace.spread * self._random.gauss(0.0, 1.0)

    def step(self) -> float:
        """A factor of one prefill step."""
        scatter = self._pace.scatter
        return math.exp(scatter * self._steps.gauss(0.0, 1.0) - scatter**2 / 2.0) if scatter else 1.0

    def next(self) -> float:
        """The factor of the next second."""
        factor = math.exp(self._level - self._pace.spread**2 / 2.0)
        fresh = math.sqrt(1.0 - self._pace.memory**2) * self._pace.spread
        self._level = self._pace.memory * self._level + fresh * self._random.gauss(0.0, 1.0)
        return factor


def _covariance(values: dict[int, float], lag: int) -> float:
    products = [value * values[second + lag] for second, value in values.items() if second + lag in values]
    return sum(products) / len(products) if products else 0.0
