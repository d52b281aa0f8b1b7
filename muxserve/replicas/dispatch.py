"""To which instance a request goes when it arrives, and in which order those wait that no instance can take."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from muxserve.replicas.priorities import NORMAL, Levels
from muxserve.replicas.views import InstanceLoad


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request to dispatch. `demand` is the KV in tokens that its prompt needs; `arrival` is in seconds. `prefix` has
    keys of the beginnings of its prompt, each `prefixes.KEY_TOKENS` longer than the one before."""

    request_id: str
    demand: int
    arrival: float
    scheduling: str = NORMAL
    execution: str = NORMAL
    prefix: Sequence[Hashable] = ()


class DispatchPolicy(Protocol):
    """Chooses among instances."""

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """One of `loads`, which are scored, not terminating and large enough for the request; there is at least one."""
        ...

    def gone(self, name: str) -> None:
        """An instance is gone, and what it had."""
        ...


class FreestOfQueues:
    """The instance with the highest freeness, where all queued requests count: with their demand, and in the batch
    size.

    Algorithm 1 counts the first queued request only. An instance with a long queue then looks like one with a short
    queue, and a burst goes to one instance. That is right for migration, since only the first can start, but a new
    request waits for all of them.

    What is missing on an overloaded instance is not divided by the batch size: otherwise the one with the largest batch
    would seem the least overloaded. That matters where headroom makes many instances overloaded.

    Headroom counts only against requests of lower execution priority. It is kept for the others: a request of high
    priority finds the instance that the last one has cleared, and does not clear another.
    """

    def __init__(self, levels: Levels) -> None:
        self._levels = levels

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy`."""
        best, most, capacity = loads[0], -math.inf, -1
        above: list[tuple[str, int]] = []
        for load in loads:
            if load.capacity != capacity:
                capacity = load.capacity
                above = self._above(request.execution, capacity)
            left = _left(load, above)
            value = left / (load.running + load.waiting or 1) if left > 0 else left
            if value > most:
                best, most = load, value
        return best

    def gone(self, name: str) -> None:
        """See `DispatchPolicy`. It knows nothing of instances but their loads."""

    def left(self, load: InstanceLoad, execution: str) -> int:
        """Tokens that a request of that execution priority finds there, once all that wait have theirs."""
        return _left(load, self._above(execution, load.capacity))

    def _above(self, level: str, capacity: int) -> list[tuple[str, int]]:
        """Headrooms of higher levels."""
        rank, headrooms = self._levels[level].rank, self._levels.headrooms(capacity)
        return [(name, tokens) for name, tokens in headrooms.items() if self._levels[name].rank > rank]


def _left(load: InstanceLoad, above: list[tuple[str, int]]) -> int:
    left = load.capacity - load.used - load.queued_demand
    for level, tokens in above:
        if load.levels.get(level):
            left -= tokens
    return left


class DispatchQueue:
    """Requests that wait for an instance: higher scheduling priority first, first come first served within one."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._heap: list[tuple[int, float, int, NewRequest]] = []
        # What still waits, and since when; an entry of the heap that is not here any more has left.
        self._live: dict[str, tuple[NewRequest, float]] = {}
        self._serial = 0

    def push(self, request: NewRequest, now: float) -> None:
        """A request joins at `now`, in the place of one with the same id, whose waiting counts.

        Raises:
            PriorityError: its scheduling priority is not declared.
        """
        self._serial += 1
        rank = self._levels[request.scheduling].rank
        known = self._live.get(request.request_id)
        self._live[request.request_id] = (request, known[1] if known else now)
        heappush(self._heap, (-rank, request.arrival, self._serial, request))
        self._clean()

    def pop(self) -> tuple[NewRequest, float] | None:
        """The next one, and since when it has waited."""
        while self._heap:
            request = heappop(self._heap)[3]
            known = self._live.get(request.request_id)
            if known is not None and known[0] is request:
                del self._live[request.request_id]
                return known
        return None

    def remove(self, request_id: str) -> bool:
        """A request leaves without being served; False: it was not there."""
        left = self._live.pop(request_id, None) is not None
        self._clean()
        return left

    def _clean(self) -> None:
        # While there is no instance nobody pops, however many come and go, or come again.
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [e for e in self._heap if self._live.get(e[3].request_id, (None,))[0] is e[3]]
            heapify(self._heap)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[tuple[NewRequest, float]]:
        """Each with the time at which it joined, in no order."""
        return iter(self._live.values())
