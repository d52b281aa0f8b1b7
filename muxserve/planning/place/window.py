"""For how many seconds of load the units of a plan are simulated, so that the simulation shows what they serve.

Requests per second are those that end within the second half of that time. They say nothing unless answers come and
go in it, so a model's window holds several of the longest answers of the models that share its units, one after
another, however many requests come per second. One answer in a hundred has more tokens than the longest ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from muxserve.metrics.definitions import percentile
from muxserve.workload import Lengths
from placement.planner import ClusterPlan

# The longest answers that a window holds, one after another.
ANSWERS = 3.0
LONGEST = 0.99
_SAMPLES = 1000
# Requests of all models, or of each, within a time that is long enough for most fleets; but these at least.
_REQUESTS, _PER_MODEL, _SECONDS, _FEWEST = 2000, 40, 300.0, 200
# More requests to units that depend on each other take half a minute. Whoever asks for more knows why (--simulate).
_MOST = 50_000


@dataclass(frozen=True, slots=True)
class RateWindow:
    """What the simulation of a model shows of its requests per second: `finished` ended in the second half of
    `seconds` of load, and `waiting` had not ended when no more had come for as long. The longest answers of models in
    its units took `longest` seconds (None: there was none)."""

    seconds: float
    finished: int
    longest: float | None
    waiting: int = 0

    @property
    def is_long_enough(self) -> bool:
        """It holds several of the longest answers, so that it shows how many requests are served per second."""
        return self.longest is not None and self.seconds > 0.0 and self.seconds >= ANSWERS * self.longest

    @property
    def rate(self) -> float:
        """Requests per second that ended in the second half, however short that was."""
        return self.finished / (self.seconds / 2) if self.seconds > 0.0 else 0.0


def usual_seconds(plan: ClusterPlan) -> float:
    """Seconds of load that show which part of a plan's requests are within their objectives."""
    many = max(_REQUESTS, _PER_MODEL * len(plan.demands))
    return max(min(_SECONDS, many / plan.asked), _FEWEST / plan.asked)


def longer_seconds(seconds: float, longest: float, rate: float) -> float:
    """Seconds of load for units that get `rate` requests per second, and whose longest answers take `longest` seconds:
    at least `seconds`, and otherwise no more than can be simulated soon."""
    return max(seconds, min(ANSWERS * longest, _MOST / rate if rate > 0.0 else seconds))


@cache
def longest_tokens(lengths: Lengths) -> int:
    """The tokens of the longest answers, of such lengths."""
    draw = random.Random(0)
    return round(percentile([lengths.sample(draw) for _ in range(_SAMPLES)], LONGEST))


def longest_of(answers: Sequence[float | None]) -> float | None:
    """Seconds of the longest answers of several models; None if none of them has answered."""
    return max((seconds for seconds in answers if seconds is not None), default=None)
