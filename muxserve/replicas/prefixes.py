"""Dispatch that looks at prefixes: to which instance a request goes when a part of its prompt is cached somewhere.

Instances do not report their caches. The latest prompts sent to an instance stand for its cache, as many as it can
hold, in the order in which it would evict them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Literal

from muxserve.replicas.dispatch import DispatchPolicy, FreestOfQueues, NewRequest
from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad

# Tokens of a prompt that a key stands for. Fewer find more of a prefix, and take longer.
KEY_TOKENS = 64
KEY_BYTES = 8
# Keys of a request, at most; what is behind them is taken for uncached.
MOST_KEYS = 512
# Keys that are remembered of an instance, at most: 16 million tokens.
MOST_REMEMBERED = 1 << 18
# How much the latest request counts in what is known of the prompts that were sent to an instance.
LATEST = 0.1


class PrefixRecord:
    """The assumed caches of instances: keys of the prompts sent to each, the least recently sent first."""

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[Hashable, None]] = {}

    def cached(self, name: str, prefix: Sequence[Hashable]) -> int:
        """How many of the first keys of `prefix` that instance has."""
        sent = self._sent.get(name)
        if not sent:
            return 0
        for count, key in enumerate(prefix):
            if key not in sent:
                return count
        return len(prefix)

    def sent(self, load: InstanceLoad, prefix: Sequence[Hashable]) -> None:
        """A request with that prefix goes to the instance."""
        if not prefix:
            return
        sent = self._sent.setdefault(load.name, OrderedDict())
        # The beginning of a prompt is used for longest, as in the cache.
        for key in reversed(prefix):
            sent[key] = None
            sent.move_to_end(key)
        most = min(MOST_REMEMBERED, load.capacity // KEY_TOKENS)
        while len(sent) > most:
            sent.popitem(last=False)

    def gone(self, name: str) -> None:
        """The instance has lost its cache."""
        self._sent.pop(name, None)


class PrefixAware:
    """The instance with the least (uncached prompt tokens, of all that wait there and of the request) x (its requests,
    this one included): LMetric (OSDI 2026), which needs no weight to tune. The cached part of the waiting prompts is
    taken from the latest ones sent there. Instances without room for the request come last, as do those that are to be
    cleared for a higher priority. Where nothing is known of the prefix anywhere, the freest (`FreestOfQueues`)."""

    def __init__(self, levels: Levels) -> None:
        self._freest = FreestOfQueues(levels)
        self._record = PrefixRecord()
        # The part of the prompts sent to each instance that was not cached there, the latest counting most.
        self._uncached: dict[str, float] = {}

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy`."""
        chosen = self._known(loads, request) or self._freest.choose(loads, request)
        uncached = 1.0 - self._record.cached(chosen.name, request.prefix) * KEY_TOKENS / request.demand
        before = self._uncached.get(chosen.name, 1.0)
        self._uncached[chosen.name] = before + (uncached - before) * LATEST
        self._record.sent(chosen, request.prefix)
        return chosen

    def _known(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad | None:
        cached = [self._record.cached(load.name, request.prefix) for load in loads]
        if not any(cached):
            return None
        best, least = loads[0], (True, math.inf)
        for load, keys in zip(loads, cached, strict=True):
            uncached = request.demand - keys * KEY_TOKENS
            full = self._freest.left(load, request.execution) < uncached
            waiting = load.queued_demand * self._uncached.get(load.name, 1.0)
            score = full, (waiting + uncached) * (load.running + load.waiting + 1)
            if score < least:
                best, least = load, score
        return best

    def gone(self, name: str) -> None:
        """See `DispatchPolicy`."""
        self._record.gone(name)
        self._uncached.pop(name, None)


# By their names in a fleet file.
DispatchName = Literal["prefix", "freest"]
POLICIES: dict[DispatchName, type[FreestOfQueues] | type[PrefixAware]] = {
    "freest": FreestOfQueues,
    "prefix": PrefixAware,
}


def keys_of(keys: bytes) -> list[bytes]:
    """Keys that came in one piece."""
    return [keys[begin : begin + KEY_BYTES] for begin in range(0, len(keys), KEY_BYTES)]


def dispatch_policy(name: DispatchName, levels: Levels) -> DispatchPolicy:
    """The policy of that name."""
    return POLICIES[name](levels)
