"""What a first token takes beside its place in a queue and its prefill, learnt while a fleet serves. Pure: no clock.

An engine tells with a first token how long its request was in the unit (`TokensHeader.in_unit`). What it took beyond
that since it came to the gateway is its way to the unit, and the way of its token back, on cores as busy as they are.
What an idle engine needed to turn to a request once the unit scheduler had decided comes on top: both together are a
profile's `Overheads.request`.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection

from muxserve.costs.recent import FEWEST, MOST, recent_moments
from muxserve.gateway.requests import Tracked


class RequestDelays:
    """Sees all first tokens of a gateway."""

    def __init__(self) -> None:
        # By unit, each with the time of the first token: seconds outside of it, and the ways to idle engines.
        self._outside: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=MOST))
        self._ways: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=MOST))

    def answered(self, request: Tracked, in_unit: float, way: float | None) -> None:
        """A request has its first token, for which it was in its unit for `in_unit` seconds; of these, the `way` to its
        engine; None: that was not idle."""
        now = request.first_token_at
        # Of what waited for something else than its turn, and of what is done for images, nothing is learnt.
        if now is None or request.waited or request.images:
            return
        self._outside[request.unit].append((now, max(0.0, now - request.arrival - in_unit)))
        if way is not None:
            self._ways[request.unit].append((now, way))

    def learn(self, units: Collection[str]) -> None:
        """These are all units; nothing is kept of others."""
        for known in (self._outside, self._ways):
            for unit in known.keys() - units:
                del known[unit]

    def by_device(self, device: Callable[[str], str | None]) -> dict[str, tuple[float, float]]:
        """Seconds, in the mean, and their standard deviation; nothing of devices with few such requests.

        Args:
            device: a unit's, by its name; None: there is no such unit any more.
        """
        outside: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        ways: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for unit in self._ways:
            name = device(unit)
            if name is not None:
                outside[name] += self._outside[unit]
                ways[name] += self._ways[unit]
        found = {}
        for name, seen in ways.items():
            if len(seen) >= FEWEST:
                (mean, variance), (to_engine, of_that) = recent_moments(outside[name]), recent_moments(seen)
                found[name] = mean + to_engine, math.sqrt(variance + of_that)
        return found
