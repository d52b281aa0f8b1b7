"""Virtual usage and freeness: Llumnix, Algorithm 1, from the sums that an instance reports, in constant time.

Symbols as in docs/replicas.md. `tests/replicas/support.py` has the algorithm request by request.
"""

from __future__ import annotations

import math

from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad


def freeness(load: InstanceLoad, levels: Levels) -> float:
    """F = (M - sum of V) / B: the number of steps for which the batch can grow. Negative on an overloaded instance, and
    minus infinity on a terminating one. An idle instance has B = 1, so it is freer than with any request on it. A
    level's headroom, divided among its requests, adds up to itself.
    """
    if load.terminating:
        return -math.inf
    left = load.capacity - load.used - load.head_demand
    for level, tokens in levels.headrooms(load.capacity).items():
        if load.levels.get(level):
            left -= tokens
    return left / (load.running or 1)


def score(load: InstanceLoad, levels: Levels) -> InstanceLoad:
    """Fill in the load's freeness; returns the load."""
    load.freeness = freeness(load, levels)
    return load


def freeness_with(load: InstanceLoad, levels: Levels, usage: int, level: str) -> float:
    """What the freeness would be if another request of that level and usage ran there."""
    if load.terminating:
        return -math.inf
    left = load.capacity - load.used - load.head_demand - usage
    for name, tokens in levels.headrooms(load.capacity).items():
        if name == level or load.levels.get(name):
            left -= tokens
    return left / (load.running + 1)
