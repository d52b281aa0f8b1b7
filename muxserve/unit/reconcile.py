"""Compares what the unit believes an engine to have with what the engine has.

An engine tells what becomes of its requests; one that loses some without a word, while it goes on with others, would
leave their clients waiting for ever. Each of its reports counts the requests in it. When they are fewer than there
should be, and besides every few seconds, it is asked for a list.

Messages between the two arrive in order, so that the list is exact about what it can know: all that came with a lease
up to the one that it names, less what the engine has told of before. What was sent meanwhile is not missed. A request
that the engine has and the unit does not want may have been aborted just now; only one that is there again in the next
list was not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from muxserve.scheduling.state import EngineState, ModelState
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.state import UnitState
from muxserve.wire import Abort, HeldRequests, ShowRequests, StepReport

log = logging.getLogger(__name__)

# Between two lists of an engine that there is no doubt about.
RECONCILE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class EngineProcess:
    """What is known of an engine beside its ledger entry: its process. `bubbles` are
    seconds of each stage of a pipeline. `remaining` is how many requests it said to have; `asked`: it is to list them;
    `strays` are those, (id, incarnation), that it had last time and should not have."""

    model: ModelState
    state: EngineState
    address: bytes
    pid: int | None = None
    bubbles: list[float] = field(default_factory=list)
    remaining: int = 0
    asked: bool = False
    strays: set[tuple[str, int]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """MODEL/PHASE."""
        return self.address.decode()

    def is_another(self, pid: int) -> bool:
        """Whether the process that is up is not `pid`; 0 stands for whichever is up."""
        return pid != 0 and self.pid is not None and self.pid != pid

    def anew(self, pid: int | None) -> None:
        """It is another process by now, or none, and has nothing of what the one before had."""
        self.pid = pid
        self.remaining = 0
        self.asked = False
        self.strays = set()


class Reconciliation:
    """Finds requests that engines have lost, and such as they should not have any more. `missing` and `strays` count
    them by model."""

    def __init__(self, state: UnitState, table: UnitRequestTable, engines: Iterable[EngineProcess]) -> None:
        self.missing: Counter[str] = Counter()
        self.strays: Counter[str] = Counter()
        self._state = state
        self._table = table
        self._engines = list(engines)
        self._due = state.started + RECONCILE_SECONDS

    def reported(self, engine: EngineProcess, report: StepReport) -> None:
        """An engine has reported; what it told of is in the ledger already."""
        engine.remaining = report.running + report.waiting
        state, model = engine.state, engine.model
        if report.lease_id < state.entered_with:
            return  # what came in since is not counted
        believed = len(model.prefilling) + len(model.decoding) if model.both else len(state.inside)
        if engine.remaining < believed:
            self._ask(engine)

    def tick(self, now: float) -> None:
        """Ask whom it is time to ask."""
        if now < self._due:
            return
        self._due = now + RECONCILE_SECONDS
        for engine in self._engines:
            if engine.state.up and (engine.remaining or engine.state.inside):
                self._ask(engine)

    def wakeup(self) -> float:
        """When `tick` is due although no message came."""
        busy = self._state.ledger.requests or any(engine.remaining for engine in self._engines)
        return self._due if busy else float("inf")

    def _ask(self, engine: EngineProcess) -> None:
        if not engine.asked:
            engine.asked = True
            self._state.send(engine.address, ShowRequests())

    def heard(self, engine: EngineProcess, message: HeldRequests, now: float) -> None:
        """An engine's list."""
        engine.asked = False
        engine.remaining = len(message.request_ids)
        there = set(zip(message.request_ids, message.incarnations, strict=False))
        inside = {(request_id, live.lease_id) for request_id, live in engine.state.inside.items()}
        missing = [life for life in inside - there if life[1] <= message.lease_id]
        if missing:
            self._missing(engine, missing, now)
        unwanted = there - inside
        again = unwanted & engine.strays
        if again:
            log.error("engine %s still has requests that it should not have: %s", engine.name, _ids(again))
            self.strays[engine.model.name] += len(again)
            self._abort(engine, again)
        engine.strays = unwanted - again

    def _missing(self, engine: EngineProcess, lives: list[tuple[str, int]], now: float) -> None:
        ids = _ids(lives)
        log.error("engine %s does not have the requests that it should have: %s", engine.name, ids)
        self.missing[engine.model.name] += len(ids)
        # Whatever may be left of them there goes, and what they were to adopt.
        self._abort(engine, lives)
        self._table.give_up_hand_offs(ids, engine.model)
        self._table.tell_lost(self._state.ledger.lost(ids, now), f"engine {engine.name} does not have them")

    def _abort(self, engine: EngineProcess, lives: Iterable[tuple[str, int]]) -> None:
        ids, incarnations = zip(*sorted(lives), strict=True)
        self._state.send(engine.address, Abort(list(ids), list(incarnations)))


def _ids(lives: Iterable[tuple[str, int]]) -> list[str]:
    return sorted(request_id for request_id, _ in lives)
