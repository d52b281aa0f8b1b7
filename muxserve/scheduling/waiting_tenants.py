"""Several waiting tenants of one model and priority, by their counters. Pure.

A tenant's counter grows with each round of decode while requests of it decode, and stands still otherwise. So tenants
of which nothing decodes are in a sorted list. The others are at most as many as the batch has seats, and each answer
looks at all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from muxserve.scheduling.fairness import TenantCounters

# Whether a request was never started, its priority, tag, arrival, order of entry.
QueueKey = tuple[int, int, int, float, int]
# Counter, key, tenant: the order in which tenants are served.
Place = tuple[float, QueueKey, str]


class WaitingTenants:
    """The waiting tenants; the one with the least counter goes first, and of equal ones the one with the least key."""

    __slots__ = ("_counters", "_decoding", "_places", "_sorted")

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._sorted: list[Place] = []
        # The place in that list of each tenant that is there.
        self._places: dict[str, Place] = {}
        self._decoding: dict[str, QueueKey] = {}

    def put(self, tenant: str, key: QueueKey) -> None:
        """A tenant begins to wait with `key`, or has that key from now on."""
        self.remove(tenant)
        service = self._counters.of(tenant)
        if service.decoding:
            self._decoding[tenant] = key
        else:
            place = self._places[tenant] = (service.level(0.0), key, tenant)
            insort(self._sorted, place)

    def remove(self, tenant: str) -> None:
        """A tenant waits no longer, if it did."""
        place = self._places.pop(tenant, None)
        if place is not None:
            del self._sorted[bisect_left(self._sorted, place)]
        else:
            self._decoding.pop(tenant, None)

    def changed(self, tenant: str) -> None:
        """The counter of `tenant`, or its slope, is another one."""
        place = self._places.get(tenant)
        key = self._decoding.get(tenant) if place is None else place[1]
        if key is not None:
            self.put(tenant, key)

    def least(self) -> str:
        """The tenant that goes next. Somebody must be waiting."""
        return min(self.first(1))[2]

    def first(self, count: int) -> list[Place]:
        """The `count` that go next, and perhaps others, in no order."""
        places = self._sorted[:count]
        rounds = self._counters.rounds()
        for tenant, key in self._decoding.items():
            places.append((self._counters.of(tenant).level(rounds), key, tenant))
        return places
