"""Virtual usage and freeness: Llumnix, Algorithm 1.

`virtual_usage`, `headroom_share` and `freeness_of` are the algorithm line by line over the requests of an instance;
`freeness` gives the same number from the sums that an instance reports, in constant time. Symbols as in
docs/replicas.md.
"""

from __future__ import annotations

import math

from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad, InstanceView, RequestView

FAKE = RequestView("", fake=True)


def virtual_usage(request: RequestView, instance: InstanceView, levels: Levels) -> float:
    """Tokens that the request counts for on its instance (Algorithm 1, CalcVirtualUsage).

    A queued request counts with its demand when it is the first of its queue and not at all otherwise; a fake one
    (the instance is terminating) with infinity; a running one with what it holds and its part of the headroom.
    """
    if request.queued:
        return request.demand if instance.waiting and request is instance.waiting[0] else 0
    if request.fake:
        return math.inf
    return request.usage + headroom_share(request.execution, instance, levels)


def headroom_share(level: str, instance: InstanceView, levels: Levels) -> float:
    """The level's headroom divided by its running requests on the instance (Algorithm 1, GetHeadroom)."""
    count = sum(1 for request in instance.running if request.execution == level)
    return levels[level].headroom(instance.capacity, levels.auto) / count if count else 0.0


def freeness_of(instance: InstanceView, levels: Levels) -> float:
    """F = (M - sum of V) / B (Algorithm 1, CalcFreeness): for how many steps the batch can grow; negative when the
    instance is overloaded, and minus infinity when it is terminating. What is reserved for requests on their way in
    counts as used. An idle instance has B = 0, for which 1 is taken: it is freer than with any request on it.
    """
    requests = [*instance.running, *instance.waiting]
    if instance.terminating:
        requests.append(FAKE)
    total = math.fsum(virtual_usage(request, instance, levels) for request in requests)
    return (instance.capacity - instance.reserved - total) / max(1, len(instance.running))


def freeness(load: InstanceLoad, levels: Levels) -> float:
    """`freeness_of` from an instance's sums: a level's headroom, divided among its requests, adds up to itself."""
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
