"""A macro instance: its members open their prefill windows one after the other. EcoServe, section 3.3 and Algorithm
1."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from muxserve.rolling.constraints import Constraint, PrefillDemand, check
from muxserve.rolling.member import LatencyTargets, MacroMember, Window


class MacroInstance:
    """Routes requests over a ring of members.

    Algorithm 1: a request goes where the last one went, as long as that member's constraints hold; otherwise to the
    next in the ring whose constraints hold. So one member's prefill window stays open until it is full, and then the
    next one's opens: rolling activation.

    The algorithm does not say what becomes of a request that no member can take in time. Here it waits, higher ranks
    first, first come first served within one, and is tried again whenever something has changed (`retry`). At the last
    moment at which a member that has the memory would still be done with its prefill in time, it goes to the one that
    would be done first, whatever the decodes there have saved: behind what is pending, and behind a decode step that is
    under way. Where nobody could be in time because of pending prefills, more of them help nobody: then it waits until
    its first token would be late even without them.
    """

    def __init__(self, name: str, objectives: LatencyTargets, members: Iterable[MacroMember] = ()) -> None:
        self.name = name
        self.objectives = objectives
        self.ring: list[MacroMember] = list(members)
        self.waiting: deque[PrefillDemand] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self.ring)

    def __contains__(self, name: str) -> bool:
        return any(member.name == name for member in self.ring)

    def member(self, name: str) -> MacroMember:
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

    def arrive(self, demand: PrefillDemand, now: float) -> list[tuple[PrefillDemand, MacroMember]]:
        """A request comes in; what is sent where now, which may be nothing yet."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].order > demand.order:
            at -= 1
        self.waiting.insert(at, demand)
        return self.retry(now)

    def retry(self, now: float) -> list[tuple[PrefillDemand, MacroMember]]:
        """Something has changed: send what waits, in order, as far as constraints allow; members count it."""
        sent: list[tuple[PrefillDemand, MacroMember]] = []
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

    def choose(self, demand: PrefillDemand, now: float) -> MacroMember | None:
        """Algorithm 1, and what becomes of a request for which it is the last moment."""
        ring = self.ring
        for step in range(len(ring)):
            place = (self._last + step) % len(ring)
            if not ring[place].leaving and check(ring[place], demand, self.objectives, now) is Constraint.FITS:
                self._last = place
                return ring[place]
        if now < self._latest(demand):
            return None
        with_room = [m for m in ring if not m.leaving and m.promised + demand.tokens <= m.capacity]
        return min(with_room, key=lambda m: (self._done_in(m, demand), m.promised, m.name), default=None)

    def due(self, now: float) -> float | None:
        """When the last moment for the first waiting request has come; None without any."""
        if not self.waiting:
            return None
        return max(now, self._latest(self.waiting[0]))

    def _latest(self, demand: PrefillDemand) -> float:
        """When it has to be sent to somebody, lest its first token come too late."""
        staying = [member for member in self.ring if not member.leaving]
        with_room = [m for m in staying if m.promised + demand.tokens <= m.capacity]
        soonest = min((self._done_in(m, demand) for m in with_room or staying), default=demand.prefill_seconds)
        if soonest > self.objectives.ttft:
            soonest = demand.prefill_seconds * max(1.0, min((m.bias for m in staying), default=1.0))
        return demand.arrival + self.objectives.ttft - soonest

    def _done_in(self, member: MacroMember, demand: PrefillDemand) -> float:
        """Seconds until its first token there, predicted: what is pending, or a decode step under way that takes as
        long as it may, and its own prefill. Those that take less than predicted are not relied on to do so again."""
        before = member.pending_seconds
        if member.window is Window.DECODE and member.decoding:
            before = self.objectives.tpot
        return before + demand.prefill_seconds * max(1.0, member.bias)

    # ------------------------------------------------------------ members

    def join(self, member: MacroMember) -> None:
        """A member comes, with whatever it has to do; it is the last in the ring."""
        if member.name in self:
            raise ValueError(f"{member.name} is a member of {self.name} already")
        self.ring.append(member)

    def leave(self, name: str) -> MacroMember:
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
