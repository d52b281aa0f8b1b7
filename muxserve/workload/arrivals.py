"""When requests arrive: rates over models, and arrival times of one rate."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence


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


def poisson_arrivals(rate: float, duration: float, rng: random.Random) -> Iterator[float]:
    """Arrival times, seconds from the start, of a Poisson process of `rate` requests per second below `duration`.

    Raises:
        ValueError: a negative rate or duration, or one that is not finite.
    """
    for name, value in (("rate", rate), ("duration", duration)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"the {name} must be zero or positive and finite, not {value}")
    return _poisson(rate, duration, rng)


def _poisson(rate: float, duration: float, rng: random.Random) -> Iterator[float]:
    if rate == 0:
        return
    now = rng.expovariate(rate)
    while now < duration:
        yield now
        now += rng.expovariate(rate)
