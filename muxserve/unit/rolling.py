"""What the unit tells the global scheduler about replicas whose prefill rolls: who came, has its first token, left.

The global scheduler chooses by these reports who gets the next prompt. So the unit reports at once what makes room: a
prompt that is prefilled, a request that left. It reports everything else together, a little later.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from muxserve.scheduling.state import Event, LiveRequest, ModelState, Note
from muxserve.scheduling.types import Phase, RequestPlace
from muxserve.unit.state import UnitState
from muxserve.wire import RollingReport, RollingRequest

log = logging.getLogger(__name__)

# News that is not urgent (arrivals, decode steps) is reported together after this time.
REPORT_SECONDS = 0.02


@dataclass(slots=True)
class _Reported:
    """What the global scheduler knows of one replica. `whole`: nothing yet, or not any more."""

    whole: bool = True
    at: float = -math.inf
    lost: int = 0
    steps: int = 0
    decoded: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    # Decode steps that were run by an engine that is gone.
    steps_before: int = 0
    # Decode steps as the engine last told of them, and when.
    counted: int = 0
    counted_at: float = 0.0


class RollingReports:
    """The unit's reports on its rolling replicas; there are none in most units."""

    def __init__(self, state: UnitState) -> None:
        self._state = state
        self._unit = state.unit_spec.unit
        self._scheduler: bytes | None = None
        self._due = math.inf
        names = {model.name for model in state.unit_spec.models if model.rolling}
        self._replicas = [(model, _Reported()) for model in state.ledger.models if model.name in names]
        for model, _ in self._replicas:
            model.journal = []

    def greeted(self, peer: bytes) -> None:
        """A global scheduler is there, and knows nothing."""
        self._scheduler = peer
        for _, told in self._replicas:
            told.whole = True

    def tick(self, now: float) -> bool:
        """Report what there is to report; whether a replica was told as a whole."""
        self._due = math.inf
        told_whole = False
        for model, told in self._replicas:
            journal = model.journal
            assert journal is not None
            if told.counted != model.decode.jobs:
                told.counted, told.counted_at = model.decode.jobs, now
            if self._scheduler is None or not self._state.ledger.memory_up or not model.up or model.retired:
                told.whole = True
                told.steps_before = model.decode.jobs
            elif told.whole or told.lost != model.tally.lost:
                self._tell_whole(model, told, now)
                told_whole = True
            elif any(note.event is not Event.CAME for note in journal):
                self._tell(model, told, journal, now)
            elif journal or told.steps != model.decode.jobs:
                if now < told.at + REPORT_SECONDS:
                    self._due = min(self._due, told.at + REPORT_SECONDS)
                    continue
                self._tell(model, told, journal, now)
            journal.clear()
        return told_whole

    def wakeup(self) -> float:
        """When `tick` is due although no message came."""
        return self._due

    # ------------------------------------------------------------ reports

    def _tell_whole(self, model: ModelState, told: _Reported, now: float) -> None:
        queued = model.queue.first(len(model.queue))
        inside = (model.prefilling, model.handed, model.decoding, model.moving)
        requests = [_request(live, now) for live in (*queued, *(r for each in inside for r in each.values()))]
        told.whole, told.lost = False, model.tally.lost
        self._send(model, told, RollingReport(self._unit, self._state.epoch, model.name, True, requests), now)

    def _tell(self, model: ModelState, told: _Reported, journal: list[Note], now: float) -> None:
        for report in self._in_order(model, journal):
            self._send(model, told, report, now)

    def _in_order(self, model: ModelState, journal: list[Note]) -> list[RollingReport]:
        """The journal as reports, each of which is right if what came is taken first and what left last: one that left
        and came again does so in the next."""
        reports = [RollingReport(self._unit, self._state.epoch, model.name)]
        left: set[str] = set()
        for event, request_id, tokens, max_tokens, with_kv, over in journal:
            if event is Event.CAME:
                if request_id in left:
                    left.clear()
                    reports.append(RollingReport(self._unit, self._state.epoch, model.name))
                # What comes with its KV decodes as soon as it is adopted.
                since = 0.0 if with_kv else None
                reports[-1].requests.append(RollingRequest(request_id, tokens, max_tokens, with_kv, since))
            elif event is Event.PREFILLED:
                reports[-1].prefilled.append(request_id)
            else:
                left.add(request_id)
                reports[-1].left.append(request_id)
                reports[-1].over += over
        return reports

    def _send(self, model: ModelState, told: _Reported, report: RollingReport, now: float) -> None:
        assert self._scheduler is not None
        engine, prefills = model.decode, model.prefill.of(Phase.PREFILL)
        report.steps = engine.jobs - told.steps_before
        report.counted_ago, report.step_seconds = now - told.counted_at, engine.step_seconds
        report.decoded = engine.tokens - told.decoded
        report.prefill_tokens = prefills.tokens - told.prefill_tokens
        report.prefill_seconds = prefills.busy_seconds - told.prefill_seconds
        told.at, told.steps, told.decoded = now, engine.jobs, engine.tokens
        told.prefill_tokens, told.prefill_seconds = prefills.tokens, prefills.busy_seconds
        self._state.send(self._scheduler, report)


def _request(live: LiveRequest, now: float) -> RollingRequest:
    prefilled = live.place not in (RequestPlace.QUEUED, RequestPlace.PREFILLING)
    since: float | None = None
    if live.decoding_since is not None:
        since = now - live.decoding_since
    elif prefilled and live.request_id not in live.model.fresh:
        since = 0.0  # it waits to be adopted, or moves
    return RollingRequest(live.request_id, live.tokens, max(1, live.max_tokens - live.output_tokens), prefilled, since)
