"""The workloads that every plan is tried on, all with the same weight.

Rates, lengths and arrivals of a fleet file are guesses. A plan is judged under what is declared, and under what
differs from it: clumps of requests, more or less of everything, one model in fashion, and models that take turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muxserve.workload import Arrivals, Groups, Lengths, LogNormalLengths, ModelLoad
from muxserve.workload.arrivals import POISSON
from muxserve.workload.lengths import FixedLength
from muxserve.workload.shapes import FLAT, Rotation, ShapeFactory
from placement.demand import Demand

SIGMA = 0.8  # of the log-normal lengths: a long tail, as in chats
_TAIL = 8  # times the mean: the longest that are drawn
# Models are in so many groups where these take turns, for at most so many seconds each.
_GROUPS, _TURN_SECONDS = 3, 30.0


@dataclass(frozen=True, slots=True)
class Variation:
    """How a workload differs from the declared one.

    `scale` times all rates and all mean lengths; `busiest` times the rate of the model with the highest. Gaps between
    requests have the coefficient of variation `cv` (1: Poisson). With `turns` groups of models have the whole load in
    turn, and with `active` a few models are active at a time. It takes `span` times the seconds of others to show.
    """

    name: str
    scale: float = 1.0
    busiest: float = 1.0
    cv: float = 1.0
    turns: bool = False
    active: bool = False
    span: float = 1.0

    @property
    def is_less(self) -> bool:
        """It brings the same as the declared workload, but less of it."""
        return self == Variation(self.name, scale=self.scale) and self.scale < 1.0


DECLARED = Variation("as declared")
# Those that tell plans apart best come first.
WORKLOADS = (
    DECLARED,
    Variation("groups take turns", turns=True, span=2.0),
    Variation("one model x3", busiest=3.0),
    Variation("30 % more", scale=1.3),
    Variation("bursts", cv=4.0, span=2.0),
    Variation("30 % less", scale=0.7),
)


def loads_of(
    demands: Sequence[Demand], longest: Mapping[str, int], seconds: float, varied: Variation = DECLARED
) -> dict[str, ModelLoad]:
    """What comes for each model within `seconds`; `longest` are tokens of a model's longest sequence."""
    shapes = _shapes(demands, seconds, varied)
    busiest = max(demands, key=lambda demand: demand.rate).name
    return {
        demand.name: ModelLoad(
            demand.rate * varied.scale * (varied.busiest if demand.name == busiest else 1.0),
            lengths(varied.scale * demand.prompt_tokens, longest[demand.name] // 2),
            _answers(demand, longest[demand.name], varied.scale),
            Arrivals(varied.cv, shapes[demand.name]) if varied.cv != 1.0 or shapes[demand.name] != FLAT else POISSON,
        )
        for demand in demands
    }


def _answers(demand: Demand, longest: int, scale: float) -> Lengths:
    """Lengths of answers; a model that answers with vectors has them of one token, whatever the scale."""
    mean = demand.output_tokens * (1.0 if demand.architecture.pooling else scale)
    return lengths(mean, longest - longest // 2)


def _shapes(demands: Sequence[Demand], seconds: float, varied: Variation) -> dict[str, ShapeFactory]:
    """How the rate of each model varies over time."""
    count = min(_GROUPS, len(demands))
    if varied.active:
        return dict.fromkeys((demand.name for demand in demands), Groups())
    if not varied.turns or count < 2:
        return dict.fromkeys((demand.name for demand in demands), FLAT)
    # Each group has the load equally often.
    every = seconds / (count * math.ceil(seconds / (count * _TURN_SECONDS)))
    loads = [0.0] * count
    found: dict[str, ShapeFactory] = {}
    for demand in sorted(demands, key=lambda each: -each.rate):
        group = loads.index(min(loads))
        loads[group] += demand.rate
        found[demand.name] = Rotation(group, count, every)
    return found


def lengths(mean: float, longest: int) -> Lengths:
    """Log-normal lengths of that mean with a long tail, of at most `longest` tokens."""
    high = round(min(_TAIL * mean, max(1, longest)))
    median = mean / math.exp(SIGMA * SIGMA / 2)
    if median < 1 or median > high:
        return FixedLength(max(1, min(round(mean), high)))
    return LogNormalLengths(median, SIGMA, 1, high)
