"""Over macro instances: which of them a request goes to, and how replicas come, go and move between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from muxserve.rolling.constraints import PrefillDemand
from muxserve.rolling.macro_instance import MacroInstance
from muxserve.rolling.member import LatencyTargets, MacroMember
from muxserve.rolling.mitosis import Bounds, Change, Dissolve, Found, HandleMove, Join, Leave, Mitosis

Sent = list[tuple[PrefillDemand, MacroMember]]


class RollingScheduler:
    """All replicas of one model, in macro instances between N_l and N_u.

    A request goes to the macro instance that has the fewest waiting per member, of equals the one with the least memory
    promised (EcoServe, section 3.2, says "by capability" only). It stays there, unless that one is dissolved.
    """

    def __init__(self, objectives: LatencyTargets, bounds: Bounds | None = None) -> None:
        self.objectives = objectives
        self.mitosis = Mitosis(bounds)
        self.macros: dict[str, MacroInstance] = {}
        self.members: dict[str, MacroMember] = {}
        self.draining: dict[str, MacroMember] = {}
        self.moved = 0
        # What waits while there is no member at all.
        self._homeless: list[PrefillDemand] = []

    def member(self, name: str) -> MacroMember:
        """The member of that name, draining ones included.

        Raises:
            KeyError: there is none.
        """
        return self.members.get(name) or self.draining[name]

    @property
    def waiting(self) -> int:
        """Requests that no member has got yet."""
        return sum(len(macro.waiting) for macro in self.macros.values()) + len(self._homeless)

    # ------------------------------------------------------------ requests

    def arrive(self, demand: PrefillDemand, now: float) -> Sent:
        """A request comes in; what is sent where now, which may be nothing yet."""
        if not self.macros:
            self._homeless.append(demand)
            return []
        return min(self.macros.values(), key=_pressure).arrive(demand, now)

    def retry(self, now: float) -> Sent:
        """Something has changed: send what waits and may go now."""
        sent: Sent = []
        for macro in self.macros.values():
            if macro.waiting:
                sent += macro.retry(now)
        return sent

    def waiters(self) -> Iterator[PrefillDemand]:
        """The requests that no member has got yet."""
        yield from self._homeless
        for macro in self.macros.values():
            yield from macro.waiting

    def cancel(self, request_id: str) -> bool:
        """A waiting request is not wanted any more; False: it waits nowhere."""
        kept = [demand for demand in self._homeless if demand.request_id != request_id]
        if len(kept) < len(self._homeless):
            self._homeless = kept
            return True
        return any(macro.cancel(request_id) for macro in self.macros.values())

    def due(self, now: float) -> float | None:
        """When to `retry` at the latest though nothing has changed; None: nothing waits."""
        return min((due for m in self.macros.values() if (due := m.due(now)) is not None), default=None)

    # ------------------------------------------------------------ members

    def grow(self, member: MacroMember, now: float) -> Sent:
        """A replica more; what can be sent because of it."""
        changes = self.mitosis.grow(member.name)
        self.members[member.name] = member
        return self._carry_out(changes, now)

    def shrink(self, now: float) -> tuple[str | None, Sent]:
        """A replica less, by the rules of mitosis: which one, None without any left. It gets nothing more and is in
        `draining` until `drained` says so."""
        loads: Mapping[str, float] = {name: member.promised for name, member in self.members.items()}
        changes = self.mitosis.shrink(loads)
        name = next((change.member for change in changes if isinstance(change, Leave)), None)
        return name, self._carry_out(changes, now)

    def drain(self, name: str, now: float) -> Sent:
        """That replica is to go; it is in `draining` from now on."""
        return self._carry_out(self.mitosis.gone(name), now)

    def resume(self, name: str, now: float) -> Sent:
        """A replica that was to go stays; what can be sent because of it.

        Raises:
            KeyError: it is not draining.
        """
        member = self.draining.pop(name)
        member.leaving = False
        return self.grow(member, now)

    def found_draining(self, member: MacroMember) -> None:
        """A replica is there that is being drained already."""
        member.leaving = True
        self.draining[member.name] = member

    def gone(self, name: str, now: float) -> Sent:
        """That replica has died, with all that it had."""
        sent = self._carry_out(self.mitosis.gone(name), now)
        self.draining.pop(name, None)
        return sent

    def drained(self) -> list[str]:
        """Members that had to leave and have nothing left; they are forgotten."""
        names = [name for name, member in self.draining.items() if member.idle]
        for name in names:
            del self.draining[name]
        return names

    def _carry_out(self, changes: list[Change], now: float) -> Sent:
        for change in changes:
            match change:
                case Found(member, macro):
                    self.macros[macro] = MacroInstance(macro, self.objectives, [self.members[member]])
                case Join(member, macro):
                    self.macros[macro].join(self.members[member])
                case HandleMove(member, source, target):
                    if target not in self.macros:
                        self.macros[target] = MacroInstance(target, self.objectives)
                    self.macros[target].join(self.macros[source].leave(member))
                    self.moved += 1
                case Leave(member, macro):
                    leaving = self.macros[macro].leave(member)
                    leaving.leaving = True
                    del self.members[member]
                    self.draining[member] = leaving
                case Dissolve(macro):
                    self._homeless += self.macros.pop(macro).waiting
        sent: Sent = []
        homeless, self._homeless = self._homeless, []
        for demand in sorted(homeless, key=lambda each: each.order):
            sent += self.arrive(demand, now)
        return sent + self.retry(now)


def _pressure(macro: MacroInstance) -> tuple[float, float, str]:
    capacity = sum(member.capacity for member in macro.ring)
    promised = sum(member.promised for member in macro.ring)
    return len(macro.waiting) / len(macro), promised / capacity if capacity else 1.0, macro.name
