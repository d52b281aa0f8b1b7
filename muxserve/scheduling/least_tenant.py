"""Which of many waiting tenants has the least counter, while all of them grow. Pure.

A tenant's counter is a line over the rounds of decode: it grows by its own slope until something of its own changes. So
this is a kinetic tournament (Basch, Guibas and Hershberger, "Data structures for mobile data", SODA'97): a binary tree
of winners, in which each node knows until which round its winner stays the winner. Rounds only grow, and what is asked
for is the winner of all now. A change of one tenant costs the logarithm of their number; that winners change with time
costs the square of it, per change of a tenant, as the paper has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from muxserve.scheduling.fairness import TenantService

Key = tuple[float, ...]

_NOBODY = -1
_LEAST_PLACES = 2


class LeastTenant:
    """The tenant with the least counter; among equals, that with the least key.

    Args:
        rounds: tokens that a sequence has been given which decodes from the start, now.
    """

    __slots__ = ("_at", "_free", "_keys", "_names", "_places", "_rounds", "_services", "_slot_of", "_until", "_winner")

    def __init__(self, rounds: Callable[[], float]) -> None:
        self._rounds = rounds
        self._at = rounds()
        self._slot_of: dict[str, int] = {}
        self._names: list[str] = []
        self._services: list[TenantService] = []
        self._keys: list[Key] = []
        self._free: list[int] = []
        # A heap-shaped tree: node n has children 2n and 2n + 1, and slot s is the leaf `places` + s.
        self._places = _LEAST_PLACES
        self._winner: list[int] = []
        self._until: list[float] = []
        self._rebuild()

    def add(self, tenant: str, service: TenantService, key: Key) -> None:
        """A tenant begins to wait."""
        if self._free:
            slot = self._free.pop()
            self._names[slot], self._services[slot], self._keys[slot] = tenant, service, key
        else:
            slot = len(self._names)
            self._names.append(tenant)
            self._services.append(service)
            self._keys.append(key)
        self._slot_of[tenant] = slot
        if slot >= self._places:
            self._places *= 2
            self._rebuild()
        else:
            self._winner[self._places + slot] = slot
            self._climb(slot)

    def remove(self, tenant: str) -> None:
        """It has nothing waiting any more."""
        slot = self._slot_of.pop(tenant)
        self._free.append(slot)
        self._winner[self._places + slot] = _NOBODY
        self._climb(slot)

    def changed(self, tenant: str) -> None:
        """Its counter, or the slope of that, is another one, if it is here."""
        slot = self._slot_of.get(tenant)
        if slot is not None:
            self._climb(slot)

    def moved(self, tenant: str, key: Key) -> None:
        """Its key is another one."""
        slot = self._slot_of[tenant]
        self._keys[slot] = key
        self._climb(slot)

    def least(self) -> str:
        """Who it is. Somebody must be waiting."""
        self._advance()
        return self._names[self._winner[1]]

    # ------------------------------------------------------------ details

    def _advance(self) -> None:
        now = self._rounds()
        if now > self._at:
            self._at = now
            self._refresh(1)
        elif now < self._at:  # the engine has been started again
            self._rebuild()

    def _refresh(self, node: int) -> None:
        if self._until[node] <= self._at:
            self._refresh(2 * node)
            self._refresh(2 * node + 1)
            self._play(node)

    def _climb(self, slot: int) -> None:
        self._advance()
        node = (self._places + slot) // 2
        while node:
            self._play(node)
            node //= 2

    def _play(self, node: int) -> None:
        """Let the winners of both children meet."""
        one, other = self._winner[2 * node], self._winner[2 * node + 1]
        until = min(self._until[2 * node], self._until[2 * node + 1])
        if one == _NOBODY or other == _NOBODY:
            self._winner[node], self._until[node] = max(one, other), until
            return
        level, level_of_other = (self._services[slot].level(self._at) for slot in (one, other))
        if (level_of_other, self._keys[other]) < (level, self._keys[one]):
            one, other, level, level_of_other = other, one, level_of_other, level
        closing = self._services[one].slope - self._services[other].slope
        if closing > 0.0:
            until = min(until, self._at + (level_of_other - level) / closing)
        self._winner[node], self._until[node] = one, until

    def _rebuild(self) -> None:
        self._at = self._rounds()
        self._winner = [_NOBODY] * (2 * self._places)
        self._until = [math.inf] * (2 * self._places)
        for slot in self._slot_of.values():
            self._winner[self._places + slot] = slot
        for node in range(self._places - 1, 0, -1):
            self._play(node)
