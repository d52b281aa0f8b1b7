"""How a rate varies over time: days and bursts.

A shape is a relative intensity whose mean over the workload is 1. Arrivals are drawn in *operational time*, in which
the rate is constant, and carried over by the inverse of the shape's cumulative intensity: exact for every renewal
process, where thinning would be for Poisson only.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Shape(Protocol):
    """A relative intensity over time, as its integral."""

    def mass(self, time: float) -> float:
        """Integral of the intensity from 0 to `time` seconds; never falls, and grows without bound."""
        ...

    def when(self, mass: float) -> float:
        """The time at which the integral reaches `mass`, the inverse of `mass`."""
        ...


class ModelPosition(NamedTuple):
    """The number of a load's model, from 0, among all `models`: shapes put models apart by it."""

    number: int = 0
    models: int = 1

    @property
    def part(self) -> float:
        """The position on a circle that the models divide evenly, in 0..1."""
        return self.number / self.models


ALONE = ModelPosition()


class ShapeFactory(Protocol):
    """Makes the shape of one model's load, which may be drawn at random."""

    def shape(self, duration: float, rng: random.Random, position: ModelPosition) -> Shape | None:
        """For a workload of `duration` seconds. None: flat."""
        ...


@dataclass(frozen=True)
class Flat:
    """The same rate all the time."""

    def shape(self, duration: float, rng: random.Random, position: ModelPosition) -> None:
        return None


FLAT = Flat()


@dataclass(frozen=True)
class Wave:
    """`1 - amplitude * cos(2 pi (time / period + offset))`: lowest at the start when `offset` is 0."""

    amplitude: float
    period: float
    offset: float = 0.0

    def mass(self, time: float) -> float:
        turn = 2 * math.pi
        waves = math.sin(turn * (time / self.period + self.offset)) - math.sin(turn * self.offset)
        return time - self.amplitude * self.period / turn * waves

    def when(self, mass: float) -> float:
        # The wave moves mass by at most this much; within the bracket, Newton with bisection as a safeguard.
        reach = self.amplitude * self.period / math.pi
        low, high = max(0.0, mass - reach), mass + reach
        time = mass
        for _ in range(60):
            error = self.mass(time) - mass
            if abs(error) <= 1e-9 * max(1.0, mass):
                break
            low, high = (low, time) if error > 0 else (time, high)
            slope = 1 - self.amplitude * math.cos(2 * math.pi * (time / self.period + self.offset))
            guess = time - error / slope if slope > 1e-6 else -1.0
            time = guess if low < guess < high else (low + high) / 2
        return time


@dataclass(frozen=True)
class Diurnal:
    """A day: the rate swings by `amplitude` (0..1) around its mean once in `period` seconds (None: the whole workload),
    beginning at its lowest. `spread` shifts models against each other: 1 spreads their peaks over the whole period.

    Raises:
        ValueError: an amplitude outside 0..1, a period that is not positive, or a spread outside 0..1.
    """

    amplitude: float
    period: float | None = None
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.amplitude <= 1:
            raise ValueError(f"the amplitude must lie in 0..1, not {self.amplitude}")
        if self.period is not None and not (self.period > 0 and math.isfinite(self.period)):
            raise ValueError(f"the period must be positive, not {self.period}")
        if not 0 <= self.spread <= 1:
            raise ValueError(f"the spread must lie in 0..1, not {self.spread}")

    def shape(self, duration: float, rng: random.Random, position: ModelPosition) -> Wave:
        return Wave(self.amplitude, self.period or duration or 1.0, self.spread * position.part)


class Steps:
    """An intensity that is constant between `edges` (the first is 0), scaled so that its mean up to the last is 1;
    behind the last edge it is 1."""

    def __init__(self, edges: list[float], levels: list[float]) -> None:
        widths = [b - a for a, b in itertools.pairwise(edges)]
        scale = edges[-1] / math.fsum(width * level for width, level in zip(widths, levels, strict=True))
        self._edges = edges
        self._levels = [*(level * scale for level in levels), 1.0]
        parts = (width * level for width, level in zip(widths, self._levels, strict=False))
        self._masses = [0.0, *itertools.accumulate(parts)]

    def mass(self, time: float) -> float:
        at = bisect.bisect_right(self._edges, time) - 1
        return self._masses[at] + (time - self._edges[at]) * self._levels[at]

    def when(self, mass: float) -> float:
        at = bisect.bisect_right(self._masses, mass) - 1
        return self._edges[at] + (mass - self._masses[at]) / self._levels[at]


@dataclass(frozen=True)
class Bursts:
    """Now and then the rate is `factor` times what it is otherwise, for `length` seconds; bursts begin `every` seconds
    on average, at random. The mean rate over the workload stays what it was.

    Raises:
        ValueError: a factor below 1, or not 0 < length < every.
    """

    factor: float
    every: float
    length: float

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and math.isfinite(self.factor)):
            raise ValueError(f"the burst factor must be at least 1, not {self.factor}")
        if not 0 < self.length < self.every < math.inf:
            raise ValueError(f"bursts need 0 < length < every, not length {self.length:g} s and every {self.every:g} s")

    def shape(self, duration: float, rng: random.Random, position: ModelPosition) -> Steps | None:
        if duration <= 0:
            return None
        # Stationary from the start: the run begins inside a burst as often as any other moment lies in one.
        inside = rng.random() < self.length / self.every
        left = rng.random() * self.length if inside else rng.expovariate(1 / (self.every - self.length))
        edges, levels, time = [0.0], [], 0.0
        while time < duration:
            time = min(duration, time + left)
            if time > edges[-1]:
                edges.append(time)
                levels.append(self.factor if inside else 1.0)
            inside = not inside
            left = self.length if inside else rng.expovariate(1 / (self.every - self.length))
        return Steps(edges, levels)


@dataclass(frozen=True)
class Groups:
    """Models are active in groups: in each phase of `every` seconds a part of them between `least` and `most`, drawn
    from `seed`, and the others are silent. Of that part times the models those are active that the whole number below
    or above it says, which may be none of a few. The mean rate over the workload stays the same; a model whose turn
    would never come has one phase.

    Raises:
        ValueError: not 0 < least <= most <= 1, or phases that have no length.
    """

    every: float = 10.0
    least: float = 0.23
    most: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most <= 1:
            raise ValueError(f"active parts need 0 < least <= most <= 1, not {self.least:g} and {self.most:g}")
        if not 0 < self.every < math.inf:
            raise ValueError(f"phases must be positive seconds, not {self.every:g}")

    def active(self, phase: int, position: ModelPosition) -> bool:
        """Whether the model at `position` is active in that phase."""
        drawn = random.Random(f"{self.seed}/groups/{phase}")
        part = drawn.uniform(self.least, self.most)
        # Another order of the models in each phase, so that each has other neighbours. Only a step without a divisor in
        # common with their number leads to every place of the circle, and no two models to one.
        step, start = drawn.randrange(1, 1000), drawn.random()
        while math.gcd(step, position.models) > 1:
            step += 1
        return (position.part * step + start) % 1.0 < part

    def shape(self, duration: float, rng: random.Random, position: ModelPosition) -> Steps | None:
        if duration <= 0:
            return None
        phases = math.ceil(duration / self.every)
        edges = [*(phase * self.every for phase in range(phases)), duration]
        levels = [float(self.active(phase, position)) for phase in range(phases)]
        if not any(levels):
            levels[rng.randrange(phases)] = 1.0
        return Steps(edges, levels)


@dataclass(frozen=True)
class Rotation:
    """Groups of models are active one after another: group `number` of `count` has its requests in one phase of `every`
    seconds, and none in the phases of the others. The mean rate over the workload stays what it was.

    Raises:
        ValueError: there is no such group, or phases have no length.
    """

    number: int
    count: int
    every: float

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise ValueError(f"there is no group {self.number} of {self.count}")
        if not 0 < self.every < math.inf:
            raise ValueError(f"phases must be positive seconds, not {self.every:g}")

    def shape(self, duration: float, rng: random.Random, position: ModelPosition) -> Steps | None:
        phases = math.ceil(duration / self.every - 1e-9)
        if phases <= self.number:
            return None
        edges = [*(phase * self.every for phase in range(phases)), duration]
        return Steps(edges, [float(phase % self.count == self.number) for phase in range(phases)])
