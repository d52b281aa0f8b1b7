"""What the requests of a gateway wait for, in words, and for how long at most.

Pure. A request waits for a unit that serves it, for its unit to come back, or in its unit's queue. Each of these ends:
whoever decides on a model answers its requests sooner (the global scheduler after `replicas.wake`, a unit that cannot
start an engine), and what nobody has answered is answered here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muxserve.gateway.routing.requests import Failure, Tracked
from muxserve.gateway.routing.router import Router

# A request has been without a unit that is up for so long: where the fleet file says nothing of that, seconds.
UNPLACED_SECONDS = 300.0
# The global scheduler, which knows more, answers first.
MARGIN_SECONDS = 10.0
# No token has come of any request of its model for so long, seconds: far more than a step takes.
STUCK_SECONDS = 900.0


@dataclass(slots=True)
class Wait:
    """Requests of one model that wait for the same; the oldest for `seconds`."""

    reason: str
    requests: int = 0
    seconds: float = 0.0


class Patience:
    """Looks after the requests of a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        # By model: how long its requests wait for a unit; when the last token of one of them came.
        self._patience: Mapping[str, float] = {}
        self._moved: dict[str, float] = {}

    def learn(self, patience: Mapping[str, float]) -> None:
        """The fleet has changed; `patience`, by model, is how long its requests wait for a replica, seconds."""
        self._patience = patience

    def moved(self, model: str, now: float) -> None:
        """Tokens of requests of that model have come."""
        self._moved[model] = now

    def forget(self, model: str) -> None:
        """It is offered no longer."""
        self._moved.pop(model, None)

    def reasons(self, now: float) -> dict[str, list[Wait]]:
        """What requests without a token wait for, by model."""
        found: defaultdict[str, dict[str, Wait]] = defaultdict(dict)
        for request in self._router.table.all():
            reason = self._reason(request)
            if reason and (request.first_token_at is None or not self._has_unit(request)):
                wait = found[request.model].setdefault(reason, Wait(reason))
                wait.requests += 1
                wait.seconds = max(wait.seconds, now - self._since(request))
        return {model: list(waits.values()) for model, waits in found.items()}

    def expire(self, now: float) -> None:
        """Answer the requests that have waited for too long."""
        for request in self._router.table.all():
            if self._has_unit(request):
                request.stalled_at = None
                last = max(self._since(request), self._moved.get(request.model, 0.0))
                if now - last >= STUCK_SECONDS:
                    self._give_up(request, f"no token of {request.model} has come for {STUCK_SECONDS:g} s")
                continue
            if request.stalled_at is None:
                request.stalled_at = now
            limit = self._patience.get(request.model, UNPLACED_SECONDS) + MARGIN_SECONDS
            if now - request.stalled_at >= limit:
                self._give_up(request, f"{request.model} was not ready within {limit:g} s")

    def _give_up(self, request: Tracked, words: str) -> None:
        reason = self._reason(request)
        self._router.give_up(request, f"{words}: the request waited for {reason}; try again later", Failure.LATE)

    def _has_unit(self, request: Tracked) -> bool:
        return request.unit in self._router.placing.up

    def _since(self, request: Tracked) -> float:
        return request.arrival if request.last_token_at is None else request.last_token_at

    def _reason(self, request: Tracked) -> str:
        if not request.unit:
            return self._router.placing.waits_for(request)
        return _queue_of(request.unit) if self._has_unit(request) else f"unit {request.unit} to come back"


def _queue_of(unit: str) -> str:
    return f"the queue of unit {unit}"


def say_missing_pages(waits: Iterable[Wait], missing: Mapping[str, int]) -> None:
    """Say which queues of one model are for pages: `missing`, by unit, are those that its oldest request waits for."""
    for wait in waits:
        for unit, pages in missing.items():
            if pages and wait.reason == _queue_of(unit):
                wait.reason += f", the oldest one for {pages} pages of the pool that others hold"
