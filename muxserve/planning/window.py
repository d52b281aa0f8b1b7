"""For how many seconds of load a plan is simulated, so that the simulation shows what it serves.

Requests per second are those that end within the second half of that time. They say nothing unless answers come and
go in it, so a window holds several of the longest answers, one after another, however many requests come per second.
The longest answers are those of which one in a hundred takes longer, of the model whose answers take longest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping

from muxserve.metrics.definitions import percentile
from muxserve.metrics.records import RequestRecord
from muxserve.workload import ModelLoad
from placement.planner import ClusterPlan

# The longest answers that a window holds, one after another.
ANSWERS = 3.0
LONGEST = 0.99
_SAMPLES = 1000
# Requests of all models, or of each, within a time that is long enough for most fleets; but these at least.
_REQUESTS, _PER_MODEL, _SECONDS, _FEWEST = 2000, 40, 300.0, 200
# More take minutes. Whoever asks for more knows why (--simulate).
_MOST = 200_000


def window(plan: ClusterPlan, longest: float = 0.0) -> float:
    """Seconds of load for a plan whose longest answers take `longest` seconds, or less where that would be too many
    requests. Without `longest` enough of it for what does not need to know how many requests end per second."""
    many = max(_REQUESTS, _PER_MODEL * len(plan.demands))
    usual = max(min(_SECONDS, many / plan.asked), _FEWEST / plan.asked)
    return min(max(usual, ANSWERS * longest), _MOST / plan.asked)


def longest_answer(plan: ClusterPlan, loads: Mapping[str, ModelLoad]) -> float:
    """Seconds that the longest answers take from their first token to their last by the plan's estimates."""
    longest = 0.0
    for unit in plan.estimates:
        for model in unit.models:
            if model.tpot is not None and math.isfinite(model.tpot):
                output = loads[plan.demands[model.member.model].name].output
                draw = random.Random(0)
                tokens = percentile([output.sample(draw) for _ in range(_SAMPLES)], LONGEST)
                longest = max(longest, (tokens - 1) * model.tpot)
    return longest


def measured_longest_answer(records: Iterable[RequestRecord]) -> float | None:
    """The same of what was simulated; None if nothing was answered."""
    answers: dict[str, list[float]] = {}
    for record in records:
        if record.finish is not None and record.first_token is not None:
            answers.setdefault(record.model, []).append(record.finish - record.first_token)
    return max((percentile(seconds, LONGEST) for seconds in answers.values()), default=None)


def holds(seconds: float, longest: float | None) -> bool:
    """Whether a window of that length holds several answers of `longest` seconds. None: there was no answer, and
    nothing was measured."""
    return longest is not None and seconds > 0.0 and seconds >= ANSWERS * longest
