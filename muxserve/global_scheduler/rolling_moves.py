"""Decodes that leave replicas of a rolling model which are being drained: who takes them, and those under way.

That a request has left a replica and that another has it comes from two units, in either order. What it had saved goes
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from muxserve.global_scheduler.rolling_state import MigratedProgress
from muxserve.rolling.draining import destinations
from muxserve.rolling.member import Admitted, MacroMember
from muxserve.rolling.scheduler import RollingScheduler
from muxserve.wire import RollingReport

# What has left and is named by nobody after this long has ended.
NAMED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class DepartedRequest:
    """A request that left a replica which is being drained, when, and the seconds that it had saved."""

    was: Admitted
    saved: float
    at: float


class RollingMoves:
    """Those of one model. `pairs` has the destination of each replica that gives its decodes away."""

    def __init__(self) -> None:
        self.pairs: dict[str, str] = {}
        self._left: dict[str, DepartedRequest] = {}

    def pair(
        self, scheduler: RollingScheduler, up: Iterable[str], alike: Callable[[str, str], bool], now: float
    ) -> set[str]:
        """Pair anew; returns the replicas that give nothing away any more."""
        before, known = self.pairs, set(up)
        sources = [member for member in scheduler.draining.values() if member.name in known]
        takers = [member for member in scheduler.members.values() if member.name in known]
        self.pairs = destinations(sources, takers, scheduler.objectives, now, before, alike) if sources else {}
        return before.keys() - self.pairs.keys()

    def stop(self) -> set[str]:
        """Pair nobody; returns the replicas that did give something away."""
        before, self.pairs = self.pairs, {}
        return set(before)

    def brought(
        self, report: RollingReport, member: MacroMember, scheduler: RollingScheduler, now: float
    ) -> dict[str, MigratedProgress]:
        """What the requests of a report that came to `member` with their KV had where they were, which they have left
        by that."""
        found: dict[str, MigratedProgress] = {}
        for request in report.requests:
            key = request.request_id
            left = self._left.pop(key, None)
            if request.decoding_seconds is None:
                continue  # it is computed anew
            if left is not None:
                found[key] = MigratedProgress(left.saved, left.at, left.was.since)
                continue
            for source in scheduler.draining.values():
                was = source.left(key, now) if source is not member else None
                if was is not None:
                    found[key] = MigratedProgress(source.saved_by(was, now), now, was.since)
        return found

    def left(
        self, member: MacroMember, ended: Iterable[tuple[str, Admitted]], now: float
    ) -> list[tuple[str, Admitted]]:
        """These have left `member`; returns those that have ended by it. Where requests of a drained one go is not
        known yet."""
        if not member.leaving:
            return list(ended)
        ends = []
        for key, was in ended:
            if was.prefilled:
                self._left[key] = DepartedRequest(was, member.saved_by(was, now), now)
            else:
                ends.append((key, was))
        return ends

    def forget(self, request_id: str) -> None:
        """The request begins another life."""
        self._left.pop(request_id, None)

    def ended(self, now: float) -> list[tuple[str, DepartedRequest]]:
        """Those that nobody has named in time: they have ended."""
        ended = [(key, left) for key, left in self._left.items() if now - left.at >= NAMED_SECONDS]
        for key, _ in ended:
            del self._left[key]
        return ended
