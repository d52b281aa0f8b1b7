"""The unit's engines: what they say, how they come and go, and leases that end without a word."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from msgspec import structs

from muxserve.net.inbox import ImpossibleMessageError
from muxserve.net.server import shown
from muxserve.scheduling.quarantine import LoneRequest, is_culprit
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import Grant, Phase, RequestPlace, StepsDone
from muxserve.spec import EnginePhase
from muxserve.unit.costs import UnitCosts
from muxserve.unit.pages import PageQuotas
from muxserve.unit.reconcile import EngineProcess, Reconciliation
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.state import UnitState
from muxserve.wire import (
    Cause,
    EngineDown,
    EngineHello,
    EngineLost,
    EngineSuspect,
    HeldRequests,
    Lease,
    Reset,
    StepFailed,
    StepReport,
)

log = logging.getLogger(__name__)

ENGINE_CHECK_SECONDS = 0.05
SILENCE_SECONDS = 0.25
EMPTY_SECONDS = 1.0


class EngineTable:
    """Every engine of the unit, by its ZeroMQ identity.

    `failures` counts crashes of engines and steps that failed, `culprits` the requests that turned out to be the cause,
    by model.
    """

    def __init__(self, state: UnitState, table: UnitRequestTable, pages: PageQuotas) -> None:
        self._state = state
        self._table = table
        self._pages = pages
        self._due = state.started
        # Lease ids start from the time, so that an id is never used again by a later unit scheduler while a report of
        # an earlier lease may still come.
        self._first_lease = self._lease_id = int(state.started * 1_000_000)
        self.failures: Counter[str] = Counter()
        self.culprits: Counter[str] = Counter()
        self._engines: dict[bytes, EngineProcess] = {}
        self.add(state.ledger.models)
        self.reconciliation = Reconciliation(state, table, self._engines.values())
        self.costs = UnitCosts(state.unit_spec)

    def add(self, models: Iterable[ModelState]) -> None:
        """These models are of the unit, too."""
        for model in models:
            for engine in model.engines:
                address = f"{model.name}/{engine.phase}".encode()
                self._engines[address] = EngineProcess(model, engine, address)

    @property
    def pids(self) -> dict[str, int]:
        """Pids of the engines that are there, by MODEL/PHASE."""
        return {peer.name: peer.pid for peer in self._engines.values() if peer.pid is not None}

    @property
    def bubbles(self) -> dict[str, list[float]]:
        """Seconds without anything to compute, for each stage of each model."""
        return {peer.model.name: peer.bubbles for peer in self._engines.values() if peer.bubbles}

    def tick(self, now: float) -> None:
        """Look after engines that are silent, and after what they have."""
        if now >= self._due:
            self._mind_leases(now)
        self.reconciliation.tick(now)

    def wakeup(self) -> float:
        """When `tick` is due although no message came."""
        due = self.reconciliation.wakeup()
        return min(due, self._due) if self._state.ledger.share_used else due

    # ------------------------------------------------------------ what is heard

    def hello(self, peer: bytes, hello: EngineHello, now: float) -> None:
        """An engine is there, and has nothing."""
        engine = self._engines.get(peer)
        if engine is None or engine.name != f"{hello.model}/{hello.phase}":
            log.warning("an engine %s/%s of identity %s is none of this unit", hello.model, hello.phase, shown(peer))
            return
        lost = [*engine.state.inside]
        self._table.give_up_hand_offs(lost, engine.model)
        gone = self._state.ledger.engine_up(hello.model, engine.state.phase, now)
        self._table.tell_lost(gone, f"engine {shown(peer)} started anew")
        engine.anew(hello.pid)
        self._state.send(peer, Reset(self._state.epoch))
        log.info("engine %s is up, pid %d", shown(peer), hello.pid)

    def down(self, down: EngineDown, now: float) -> None:
        """The controller saw an engine die."""
        engine = self._engines.get(f"{down.model}/{down.phase}".encode())
        if engine is None:
            log.warning("%s/%s is no engine of this unit", down.model, down.phase)
            return
        if engine.is_another(down.pid):
            log.info("engine %s, pid %s, was up before it was told that pid %d died", engine.name, engine.pid, down.pid)
            return
        model = engine.model
        self._blame(engine, self._batch(engine), down.cause)
        self._table.give_up_hand_offs([*engine.state.inside, *engine.state.incoming], model)
        gone = self._state.ledger.engine_down(down.model, engine.state.phase, now)
        engine.anew(None)
        log.warning("engine %s/%s is down: %s", down.model, down.phase, down.reason)
        self._table.tell_lost(gone, f"engine {down.model}/{down.phase} died: {down.reason}")

    def suspect(self, message: EngineSuspect) -> None:
        """The controller has no sign of life of an engine, or has it again."""
        engine = self._engines.get(f"{message.model}/{message.phase}".encode())
        if engine is None:
            log.warning("%s/%s is no engine of this unit", message.model, message.phase)
            return
        if engine.is_another(message.pid):
            return
        log.warning("engine %s %s", engine.name, "gives no sign of life" if message.on else "gives signs of life again")
        self._state.ledger.engine_suspect(engine.model.name, engine.state.phase, message.on)

    def step_failed(self, peer: bytes, message: StepFailed, now: float) -> None:
        """A step of an engine raised an exception. The engine goes on, without the requests of that step."""
        engine = self._engines.get(peer)
        if engine is None or not engine.state.up:
            return
        inside, name = engine.state.inside, engine.model.name
        lives = zip(message.request_ids, message.incarnations, strict=False)
        batch = [r for r, incarnation in lives if r in inside and inside[r].lease_id == incarnation]
        log.error("a step of engine %s with %d requests failed: %s", shown(peer), len(batch), message.reason)
        self._blame(engine, batch, Cause.CRASH)
        lost = [r for r in message.lost if r in inside]
        # The engine has dropped it.
        self._state.ledger.lease_void(name, engine.state.phase, now)
        gone = self._state.ledger.lost([*batch, *lost], now)
        self._table.tell_lost(gone, f"a step of engine {engine.name} failed: {message.reason}")

    @staticmethod
    def _batch(engine: EngineProcess) -> list[str]:
        """The requests that an engine computes, as far as its lease tells."""
        # One that was just sent may not have reached it.
        state, model = engine.state, engine.model
        lease = state.lease
        if lease is None:
            return []
        if not lease.confirmed:
            return [*state.inside]
        if lease.alone:
            return [lease.alone] if lease.alone in state.inside else []
        if model.both and lease.phase is not Phase.BOTH:
            return [*(model.prefilling if lease.phase is Phase.PREFILL else model.decoding)]
        return [*state.inside]

    def _blame(self, engine: EngineProcess, batch: list[str], cause: Cause) -> None:
        """An engine failed while it computed these requests."""
        quarantine, name = self._table.quarantine, engine.model.name
        self.failures[name] += cause is Cause.CRASH
        quarantine.failed(batch, cause)
        self.culprits[name] += sum(is_culprit(quarantine.record(request_id)) for request_id in batch)

    def lost(self, peer: bytes, message: EngineLost, now: float) -> None:
        """An engine dropped requests, most likely with the memory manager that had their pages."""
        engine = self._engines.get(peer)
        if engine is None or not engine.state.up:
            return
        if not self._state.memory.alive():
            self._pages.gone(now)
            # The engine has let go of its lease, and waits for the memory manager as well.
            self._state.ledger.lease_void(engine.model.name, engine.state.phase, now)
        mine = [r for r in message.request_ids if r in engine.state.inside]
        self._table.tell_lost(self._state.ledger.lost(mine, now), message.reason)
        if not engine.state.inside:
            # Also when all that it lost had been cancelled: it has nothing to use its lease on.
            self._state.ledger.lease_void(engine.model.name, engine.state.phase, now)

    def reported(self, peer: bytes, report: StepReport, now: float) -> None:
        """An engine tells of its steps, and of what became of requests in them."""
        engine = self._engines.get(peer)
        if engine is None or not engine.state.up:
            # Last words of an engine that was given up, or that does not know this unit scheduler yet.
            if engine is not None:
                for late in report.handed:
                    self._state.memory.drop(engine.model.name, late.key)
            return
        # One that was up before this unit scheduler was has a lease of an earlier one, whose ids are all smaller.
        if report.lease_id > max(engine.state.last_lease, self._first_lease):
            raise ImpossibleMessageError(f"lease {report.lease_id} was not given to it")
        if report.seconds > 0.0 and not report.steps:
            raise ImpossibleMessageError(f"{report.seconds} s without a step")
        ledger, table, name, inside = self._state.ledger, self._table, engine.model.name, engine.state.inside
        for request_id in report.finished:
            if ledger.finished(request_id, engine.state.phase, report.lease_id, now):
                table.finished(request_id)
        # What is not in it was cancelled meanwhile; what somebody else has is not for it to speak of.
        for each in report.handed:
            if each.request_id in inside:
                table.handed_over(name, each, now)
            else:
                self._state.memory.drop(name, each.key)
        for first in report.prefilled:
            if first.request_id in inside:
                table.prefilled(first, now)
        for back in report.returned:
            if back.request_id in inside:
                table.returned(back, now)
        if report.bubbles:
            known = engine.bubbles or [0.0] * len(report.bubbles)
            engine.bubbles = [sum(pair) for pair in zip(known, report.bubbles, strict=False)]
        lease = engine.state.lease
        if lease is not None and lease.alone and lease.lease_id == report.lease_id:
            live = ledger.requests.get(lease.alone)
            if live is not None and live.place is RequestPlace.DECODING:
                table.quarantine.decoded(lease.alone, report.steps)
        if report.seconds > 0.0:
            self._computed(engine, report, now)
            self.costs.reported(name, lease.share if lease is not None else 0, report)
        done = StepsDone(
            report.lease_id,
            report.lease_left,
            report.seconds,
            report.tokens,
            report.running + report.waiting,
            report.steps,
            report.prefill_tokens,
            report.prefill_seconds,
        )
        ledger.stepped(name, engine.state.phase, done, now)
        self.reconciliation.reported(engine, report)

    def _computed(self, engine: EngineProcess, report: StepReport, now: float) -> None:
        """Keep for those who look at the fleet that steps were computed, and on which share of it."""
        state = engine.state
        lease = state.lease
        phase = state.phase if lease is None else lease.phase
        share = state.share if lease is None else lease.share
        self._state.timeline.computed(
            engine.name, engine.model.name, phase, share, report.seconds, report.steps, report.tokens, now
        )

    def held(self, peer: bytes, message: HeldRequests, now: float) -> None:
        """An engine says which requests it has."""
        engine = self._engines.get(peer)
        if engine is not None and engine.state.up:
            self.reconciliation.heard(engine, message, now)

    # ------------------------------------------------------------ silence

    def _mind_leases(self, now: float) -> None:
        """Look after leases whose engines are silent.

        A lease can run out in the engine between two steps without a word; one more step makes it speak up. One whose
        requests were all cancelled answers that; if the answer does not come, its lease ends some time after.
        """
        self._due = now + ENGINE_CHECK_SECONDS
        for peer in self._engines.values():
            state = peer.state
            lease = state.lease
            if lease is None or state.suspect:
                continue
            if not state.inside:
                if now > lease.deadline + max(EMPTY_SECONDS, 20 * state.step_seconds):
                    log.warning("engine %s did not say that it is empty", shown(peer.address))
                    self._state.ledger.lease_void(peer.model.name, state.phase, now)
            elif now > lease.deadline + SILENCE_SECONDS:
                length = 2 * max(lease.deadline - lease.granted_at, SILENCE_SECONDS)
                self.grant([Grant(peer.model.name, lease.phase, 1, length, lease.share)], now)

    # ------------------------------------------------------------ leases

    def grant(self, grants: Sequence[Grant], now: float) -> None:
        """Give engines leases."""
        leases = [self._lease(grant, now) for grant in grants]
        models = self._state.ledger.models
        decoding = sum(model.decode.lease.share for model in models if model.decode.lease is not None)
        for model, phase, lease in leases:
            region = lease.share if phase is Phase.PREFILL else decoding
            self._state.send(f"{model}/{phase}".encode(), structs.replace(lease, region=region))

    def _lease(self, grant: Grant, now: float) -> tuple[str, Phase, Lease]:
        """Enter a grant into the ledger; returns model and phase of the engine, and what it is to be sent."""
        self._lease_id += 1
        lone = self._alone_in(grant, now) if self._table.quarantine else None
        if lone is not None:
            grant = grant._replace(steps=min(grant.steps, lone.steps))
        alone = lone.request_id if lone is not None else ""
        ledger = self._state.ledger
        engine = ledger.by_name[grant.model].engine(grant.phase)
        ledger.granted(grant, self._lease_id, now, alone)
        if self._table.traced:
            self._table.leased(grant, now)
        admits = [self._table.admit(self._state.ledger.requests[request_id]) for request_id in grant.admit]
        phase = cast(EnginePhase, str(grant.phase))
        lease = Lease(self._lease_id, grant.steps, grant.seconds, admits, grant.tokens, phase, alone, grant.share)
        return grant.model, engine.phase, lease

    def _alone_in(self, grant: Grant, now: float) -> LoneRequest | None:
        """Which suspect an engine computes alone under that lease, of those that it has or takes in."""
        model = self._state.ledger.by_name[grant.model]
        inside: Iterable[str] = model.engine(grant.phase).inside
        if model.both and grant.phase is not Phase.BOTH:
            inside = model.prefilling if grant.phase is Phase.PREFILL else model.decoding
        return self._table.quarantine.alone({*inside, *grant.admit}, now)
