"""Which tenant is served next: the Virtual Token Counter (VTC) of Sheng et al., "Fairness in Serving Large Language
Models", OSDI'24, its Algorithm 2 with weights and without assumptions on how long answers become.

Each tenant has a counter of the service that it got from a model: `INPUT` for each token of a prompt that is admitted,
`OUTPUT` for each token that is generated. The waiting tenant with the lowest counter goes next; the queue stays
work-conserving. A tenant that comes back after a while is lifted to the level of those that wait, so that it cannot
save up what it did not use.

The paper's bound (Theorem 4.4): of two tenants that both wait without a break, the services differ by at most twice
`max(INPUT * longest prompt, OUTPUT * tokens that fit into the batch)`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

# The paper's weights of tokens (w_p, w_q), after what providers charge for them.
INPUT = 1.0
OUTPUT = 2.0

# Whether a request was never started, its priority, tag, arrival, order of entry.
QueueKey = tuple[int, int, int, float, int]
# Counter, key, tenant: the order in which tenants are served.
Place = tuple[float, QueueKey, str]


class TenantService:
    """What a tenant was served: `charged` for good, in units of its weight; and that of `decoding` requests which go on
    at `rounds` tokens each, of which they have missed `missed` together."""

    __slots__ = ("charged", "decoding", "missed", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.charged = 0.0
        self.decoding = 0
        self.missed = 0.0

    def level(self, rounds: float) -> float:
        """Its counter when a sequence that decodes from the start has been given `rounds` tokens."""
        return self.charged + OUTPUT * (self.decoding * rounds - self.missed) / self.weight


class TenantCounters:
    """The counters of one model's tenants. Each call takes constant time, and the time of the one who watches.

    Args:
        rounds: tokens that a sequence has been given which decodes from the start. Steps are not told one by one: what
            a tenant's requests in decode have got is how many they are, times these, without what was before them.
    """

    __slots__ = ("_last", "_rounds", "_tenants", "_watcher")

    def __init__(self, rounds: Callable[[], float]) -> None:
        self._rounds = rounds
        self._tenants: dict[str, TenantService] = {}
        # Who was the last to have nothing waiting any more.
        self._last: str | None = None
        self._watcher: Callable[[str], None] | None = None

    @property
    def rounds(self) -> Callable[[], float]:
        """Says how many there are now."""
        return self._rounds

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call `changed` with each tenant whose counter has jumped or has another slope; a counter that grows by its
        slope is no change."""
        self._watcher = changed

    def _changed(self, tenant: str) -> None:
        if self._watcher is not None:
            self._watcher(tenant)

    def level(self, tenant: str) -> float:
        """The service that `tenant` got so far, in units of its weight."""
        service = self._tenants.get(tenant)
        return service.level(self._rounds()) if service is not None else 0.0

    def weight(self, tenant: str) -> float:
        """Its share, beside those of others."""
        service = self._tenants.get(tenant)
        return service.weight if service is not None else 1.0

    def lift(self, tenant: str, least: str | None, weight: float) -> None:
        """`tenant` begins to wait beside others, of which `least` has got the least (None: there are none): lines 6 to
        13 of Algorithm 2."""
        rounds = self._rounds()
        service = self.of(tenant)
        if weight != service.weight:
            level = service.level(rounds)
            service.weight = weight
            service.charged += level - service.level(rounds)
        level_with = self._last if least is None else least
        if level_with is not None:
            service.charged += max(0.0, self.of(level_with).level(rounds) - service.level(rounds))
        self._changed(tenant)

    def waits_no_more(self, tenant: str) -> None:
        """`tenant` has nothing waiting."""
        self._last = tenant

    def admitted(self, tenant: str, tokens: int) -> None:
        """A prompt of so many tokens was admitted."""
        service = self.of(tenant)
        service.charged += INPUT * tokens / service.weight
        self._changed(tenant)

    def decodes(self, tenant: str, since: float) -> None:
        """One of its requests decodes from round `since` on."""
        service = self.of(tenant)
        service.decoding += 1
        service.missed += since
        self._changed(tenant)

    def decodes_no_more(self, tenant: str, since: float) -> None:
        """One that decoded from round `since` on has ended, or left."""
        service = self.of(tenant)
        service.decoding -= 1
        service.missed -= since
        service.charged += OUTPUT * (self._rounds() - since) / service.weight
        self._changed(tenant)

    def of(self, tenant: str) -> TenantService:
        """What `tenant` was served; the object stays the same."""
        service = self._tenants.get(tenant)
        if service is None:
            service = self._tenants[tenant] = TenantService(1.0)
        return service


class WaitingTenants:
    """Waiting tenants of one model and priority: the one with the least counter goes first, and of equal ones the one
    with the least key.

    A tenant's counter grows with each round of decode while requests of it decode, and stands still otherwise. So
    tenants of which nothing decodes are in a sorted list. The others are at most as many as the batch has seats, and
    each answer looks at all of them.
    """

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
