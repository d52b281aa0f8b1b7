"""A macro instance: its members open their prefill windows in turn. EcoServe, section 3.3 and Algorithm 1."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from muxserve.rolling.constraints import Demand, Verdict, check
from muxserve.rolling.member import Member, Objectives


class MacroInstance:
    """Routes requests over a ring of members.

    Algorithm 1: a request goes where the last one went, as long as that member's constraints hold; otherwise to the
    next in the ring whose constraints hold. So one member's prefill window stays open until it is full, and then the
    next one's opens: rolling activation.

    The algorithm does not say what becomes of a request that no member can take in time. Here it waits, higher ranks
    first, first come first served within one, and is tried again whenever something has changed (`retry`); once its
    first token is overdue anyway, it goes to the member with the least pending prefill that has the memory.
    """

    def __init__(self, name: str, objectives: Objectives, members: Iterable[Member] = ()) -> None:
        self.name = name
        self.objectives = objectives
        self.ring: list[Member] = list(members)
        self.waiting: deque[Demand] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self.ring)

    def __contains__(self, name: str) -> bool:
        return any(member.name == name for member in self.ring)

    def member(self, name: str) -> Member:
        """The member of that name.

        Raises:
            KeyError: it is not in this macro instance.
        """
        for member in self.ring:
            if member.name == name:
                return member
        raise KeyError(name)

    @property
    def capacity(self) -> int:
        """The largest request that any member could hold, tokens."""
        return max((member.capacity for member in self.ring), default=0)

    # ------------------------------------------------------------ requests

    def arrive(self, demand: Demand, now: float) -> list[tuple[Demand, Member]]:
        """A request comes in; what is sent where now, which may be nothing yet."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].turn > demand.turn:
            at -= 1
        self.waiting.insert(at, demand)
        return self.retry(now)

    def retry(self, now: float) -> list[tuple[Demand, Member]]:
        """Something has changed: send what waits, in order, as far as constraints allow. Members are told."""
        sent: list[tuple[Demand, Member]] = []
        while self.waiting:
            member = self.choose(self.waiting[0], now)
            if member is None:
                break
            demand = self.waiting.popleft()
            member.admitted(demand.request_id, demand.tokens, demand.prefill_seconds, now)
            sent.append((demand, member))
        return sent

    def cancel(self, request_id: str) -> bool:
        """A waiting request is not wanted any more; False: it does not wait here."""
        for demand in self.waiting:
            if demand.request_id == request_id:
                self.waiting.remove(demand)
                return True
        return False

    def choose(self, demand: Demand, now: float) -> Member | None:
        """Algorithm 1, and what becomes of a request that is overdue."""
        ring = self.ring
        for turn in range(len(ring)):
            place = (self._last + turn) % len(ring)
            if not ring[place].leaving and check(ring[place], demand, self.objectives, now) is Verdict.FITS:
                self._last = place
                return ring[place]
        if now <= self._latest(demand):
            return None
        with_room = [m for m in ring if not m.leaving and m.promised + demand.tokens <= m.capacity]
        return min(with_room, key=lambda m: (m.pending_seconds, m.promised, m.name), default=None)

    def due(self, now: float) -> float | None:
        """When the first waiting request becomes overdue; None without any."""
        if not self.waiting:
            return None
        return max(now, self._latest(self.waiting[0]))

    def _latest(self, demand: Demand) -> float:
        """When its prefill has to begin, where prefills take least longer than predicted."""
        bias = min((member.bias for member in self.ring if not member.leaving), default=1.0)
        return demand.arrival + self.objectives.ttft - demand.prefill_seconds * max(1.0, bias)

    # ------------------------------------------------------------ members

    def join(self, member: Member) -> None:
        """A member comes, with whatever it has to do; it is the last in the ring."""
        if member.name in self:
            raise ValueError(f"{member.name} is a member of {self.name} already")
        self.ring.append(member)

    def leave(self, name: str) -> Member:
        """A member goes, with whatever it has to do.

        Raises:
            KeyError: it is no member.
        """
        member = self.member(name)
        place = self.ring.index(member)
        del self.ring[place]
        if place < self._last:
            self._last -= 1
        self._last = self._last % len(self.ring) if self.ring else 0
        return member
