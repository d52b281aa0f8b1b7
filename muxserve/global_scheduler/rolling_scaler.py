"""How many replicas a rolling model should have: by what came of its requests, as the live fleet tells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muxserve.replicas.scaling import ScalingRules as Bounds
from muxserve.rolling.member import Admitted, LatencyTargets, MacroMember
from muxserve.rolling.scaling import Attainment, RollingScalingRules
from muxserve.wire import RollingReport

# Seconds from one look at the objectives to the next.
ROUND_SECONDS = 1.0
# Replicas that prefill for less of their time than this, while the objectives are met, are one too many...
IDLE = 0.1
# ... if what is promised takes no more than this part of the others' memory.
SPARE_MEMORY = 0.5


@dataclass(slots=True)
class PendingRequest:
    """A request that somebody wants: when it came, and whether it has its first token."""

    arrival: float
    prefilled: bool = False


class RollingScaler:
    """Follows requests and decides for one model. How many there are at least and at most, the time between two changes
    (`hold`) and the sleep of the last replica are those of the fleet file; when there should be more or less is
    `rolling.scaling.Attainment`'s."""

    def __init__(self, bounds: Bounds, objectives: LatencyTargets, now: float) -> None:
        self.bounds = bounds
        self.objectives = objectives
        self._attainment = Attainment(
            RollingScalingRules(patience=bounds.hold, idle=IDLE, least=max(1, bounds.minimum), most=bounds.maximum)
        )
        self._requests: dict[str, PendingRequest] = {}
        self._busy = 0.0
        self._looked = now
        self._idle_since: float | None = None

    # ------------------------------------------------------------ requests

    def came(self, request_id: str, arrival: float) -> None:
        """Somebody wants it served; its first arrival counts."""
        self._requests.setdefault(request_id, PendingRequest(arrival))

    def take(
        self, report: RollingReport, ended: Iterable[tuple[str, Admitted]], member: MacroMember, now: float
    ) -> None:
        """What a replica reports, and which requests have left it.

        Time to first token counts to the phase switch, time per token from there on. Who leaves without a first token
        was cancelled, or goes on elsewhere.
        """
        self._busy += report.prefill_seconds
        for request_id in report.prefilled:
            request = self._requests.get(request_id)
            if request is not None:
                request.prefilled = True
        for request_id, was in ended:
            self.ended(request_id, was, member.saved_by(was, now), now)

    def ended(self, request_id: str, was: Admitted, saved: float, at: float) -> None:
        """A request has left for good at time `at`, having saved `saved` seconds."""
        request = self._requests.get(request_id)
        if request is not None and was.prefilled:
            del self._requests[request_id]
            first = at if was.since is None else was.since
            self._attainment.add(first - request.arrival <= self.objectives.ttft and saved >= 0, at)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nobody wants these any more, or nobody knows what came of them."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    # ------------------------------------------------------------ decisions

    def missing(self, members: int, coming: int, waiting: int) -> int:
        """Replicas that have to be there in any case and are not; one if somebody waits."""
        return max(0, max(self.bounds.minimum, 1 if waiting else 0) - members - coming)

    def wanted(self, members: list[MacroMember], coming: int, waiting: int, now: float) -> int:
        """Replicas more, or one less (-1); counts as carried out."""
        last = not (self.bounds.minimum or coming or waiting) and len(members) == 1 and members[0].idle
        self._idle_since = (now if self._idle_since is None else self._idle_since) if last else None
        if self._idle_since is not None and now - self._idle_since >= self.bounds.idle_seconds:
            self._idle_since = None
            return -1
        if now - self._looked < ROUND_SECONDS:
            return 0
        # Who waits for a first token for longer than allowed counts now, or an overload would be seen when it ends.
        objectives, timed = self.objectives, self._requests
        for late in [key for key, r in timed.items() if not r.prefilled and now - r.arrival > objectives.ttft]:
            del timed[late]
            self._attainment.add(False, now)
        busy = self._busy / ((now - self._looked) * len(members)) if members else 1.0
        self._busy, self._looked = 0.0, now
        # Without room to spare, or before all have come, replicas count as busy.
        spare = not coming and sum(member.promised for member in members) <= SPARE_MEMORY * _without_largest(members)
        return self._attainment.wanted(len(members) + coming, busy if spare else 1.0, now, waiting)


def _without_largest(members: list[MacroMember]) -> int:
    """Tokens of KV of the others."""
    return sum(member.capacity for member in members) - max((member.capacity for member in members), default=0)
