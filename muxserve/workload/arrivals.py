"""When requests arrive: rates over models, and arrival times of one rate."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muxserve.workload.shapes import ALONE, FLAT, ModelPosition, ShapeFactory


def power_law_rates(models: Sequence[str], total: float, alpha: float) -> dict[str, float]:
    """Split `total` requests per second over `models`, most popular first: the k-th gets a share ~ k^-alpha.

    This is the skew that MuxServe's evaluation varies (section 4.2): alpha 0.9 gives the first fifth of many models
    about half of the requests, alpha 2.1 about nine tenths; alpha 0 is an even split.

    Raises:
        ValueError: no models, a name twice, a total that is not positive, or a negative alpha.
    """
    if not models:
        raise ValueError("power_law_rates needs at least one model")
    if len(set(models)) != len(models):
        raise ValueError("power_law_rates got the same model twice")
    if not (total > 0 and math.isfinite(total)):
        raise ValueError(f"the total rate must be positive and finite, not {total}")
    if not (alpha >= 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha must be zero or positive, not {alpha}")
    weights = [(rank + 1) ** -alpha for rank in range(len(models))]
    scale = total / math.fsum(weights)
    return {model: weight * scale for model, weight in zip(models, weights, strict=True)}


@dataclass(frozen=True)
class Arrivals:
    """A renewal process whose gaps are gamma distributed with coefficient of variation `cv`, its rate varied over time
    by `shape`. A cv of 1 is Poisson, 0 is even spacing, more than 1 comes in clumps.

    Raises:
        ValueError: a cv that is negative or not finite.
    """

    cv: float = 1.0
    shape: ShapeFactory = FLAT

    def __post_init__(self) -> None:
        if not (self.cv >= 0 and math.isfinite(self.cv)):
            raise ValueError(f"the coefficient of variation (cv) must be zero or positive, not {self.cv}")

    def times(
        self, rate: float, duration: float, rng: random.Random, position: ModelPosition = ALONE
    ) -> Iterator[float]:
        """Arrival times in seconds, below `duration`, of `rate` requests per second on average. `position` tells the
        shapes of several models apart.

        Raises:
            ValueError: a negative rate or duration, or one that is not finite.
        """
        _check(rate, duration)
        shape = self.shape.shape(duration, rng, position)
        steady = _gaps(rate, self.cv, rng) if rate > 0 else iter(())
        if shape is None:
            return _until(duration, steady)
        return _until(duration, map(shape.when, steady))


POISSON = Arrivals()


def _check(rate: float, duration: float) -> None:
    for name, value in (("rate", rate), ("duration", duration)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"the {name} must be zero or positive and finite, not {value}")


def _gaps(rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    now = 0.0
    if cv == 1:
        while True:
            now += rng.expovariate(rate)
            yield now
    if cv == 0:
        # Evenly spaced models must not all fire at once, so each begins somewhere in its first gap.
        now = -rng.random() / rate
        while True:
            now += 1 / rate
            yield now
    shape, scale = cv**-2, cv**2 / rate
    while True:
        now += rng.gammavariate(shape, scale)
        yield now


def _until(duration: float, times: Iterator[float]) -> Iterator[float]:
    for time in times:
        if time >= duration:
            return
        yield time
