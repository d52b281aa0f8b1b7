"""The scheduler of a unit: the ledger and the policy of the live unit, driven by virtual events.

It tells the ledger what `muxserve.unit.executor` tells it, and when: reports, page counts before each turn, grants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muxserve.replicas.priorities import NORMAL, Levels, ServiceClass
from muxserve.replicas.views import InstanceLoad, InstanceView
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.loads import load_of, view_of
from muxserve.scheduling.policies import make_policy
from muxserve.scheduling.policy import AGAIN_SECONDS, Policy
from muxserve.scheduling.quotas import quota_when_back
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import BOTH, DECODE, PREFILL, Grant, Phase, QueuedRequest
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.job import IDLE
from muxserve.simulator.leased import LeasedEngine, PhaseEngine, SimLease, SimReport
from muxserve.simulator.machine import UnitMachine
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.stages import PipelineEngine

# Ways of a message between scheduler and engine.
_TO, _FROM = range(2)


class EngineTypes(NamedTuple):
    """What engines are, of one stage and of several."""

    steps: type[PhaseEngine] = PhaseEngine
    stages: type[PipelineEngine] = PipelineEngine


class LeaseScheduler:
    """The scheduler of the unit on `machine`. `watcher` is told of each report after the ledger was; `ranks` are of
    execution levels, and say who gives way first (without any the last to have joined)."""

    def __init__(self, machine: UnitMachine, engine_types: EngineTypes) -> None:
        spec = machine.spec
        self.machine = machine
        self.spec = spec
        self.clock = machine.clock
        # Seconds from here to an engine, and back.
        self.way = machine.overheads.way
        self.policy: Policy = make_policy(spec.policy, spec.share_steps)
        self.ledger = UnitLedger([model.counted for model in spec.models], spec.pools)
        self.live: dict[str, SimRequest] = {}
        self.turns = 0
        self.watcher: Callable[[SimReport, float], None] | None = None
        self.moving_in = self.moving_out = 0
        self.ranks: dict[str, int] = {}
        self.engines: list[LeasedEngine] = []
        self._engine: dict[tuple[str, Phase], LeasedEngine] = {}
        # Messages on their way, by engine: those to it and those from it.
        self._flying: dict[LeasedEngine, list[int]] = {}
        self._lease_id = 0
        self._wake_at = -1.0
        machine.turn = self.turn
        steps, stages = engine_types
        for model, pages in zip(spec.models, machine.pages.models, strict=True):
            if spec.pipeline is not None:
                self._enter(stages(machine, self, model, spec.pipeline, pages))
            else:
                self._enter(steps(machine, self, model, BOTH if model.profile.engines.both else DECODE, pages))
        # Decode steps come before prefill steps that begin at the same moment, since prefill takes whatever is left.
        for model, pages in zip(spec.models, machine.pages.models, strict=True):
            if not model.profile.engines.both:
                self._enter(steps(machine, self, model, PREFILL, pages))

    def _enter(self, engine: LeasedEngine) -> None:
        self.engines.append(engine)
        self.machine.add(engine)
        self._flying[engine] = [0, 0]
        name = engine.model.name
        engine.account = self.ledger.by_name[name].engine(engine.phase)
        for phase in (engine.phase, *((PREFILL, DECODE) if engine.phase is BOTH else ())):
            self._engine[name, phase] = engine
        self.ledger.engine_up(name, engine.phase, self.clock.now)

    # ------------------------------------------------------------ requests

    def serve(self, request: SimRequest, now: float) -> None:
        """Queue a request."""
        # The last token is not computed upon, so it needs no place; but prompts are admitted with room for one.
        if self._too_long(request, request.prompt + max(1, request.output - 1), now):
            return
        self.live[request.request_id] = request
        self.ledger.arrived(self._queued(request), now)
        self.machine.decide_again()

    def _queued(self, request: SimRequest) -> QueuedRequest:
        return QueuedRequest(
            request.request_id,
            request.model,
            request.prompt,
            request.output,
            request.arrival,
            ServiceClass(request.priority, execution=request.execution or NORMAL, tenant=request.tenant),
            request.made,
            request.made > 0,
        )

    def _too_long(self, request: SimRequest, tokens: int, now: float) -> bool:
        model = self.ledger.by_name[request.model]
        capacity = self.capacity(model)
        pages = (-(-tokens // model.block_tokens) + model.state_blocks) * model.pages_per_block
        if pages <= capacity:
            return False
        most = max(0, capacity // model.pages_per_block - model.state_blocks) * model.block_tokens
        self.machine.refuse(request, now, f"longer than the {most} tokens that {model.name} has pages for")
        return True

    def capacity(self, model: ModelState) -> int:
        """Most pages that the model can ever be given."""
        return self.policy.capacity(model) if self.spec.adapt_quotas else model.quota

    # ------------------------------------------------------------ engines

    def report(self, report: SimReport) -> None:
        """An engine's `StepReport`, which takes its time. One that says nothing but that a lease is half used does not
        have to: it is sent, and answered, well before the lease ends."""
        delay, engine = self.way, report.engine
        if not delay or (report.renews and not self._flying[engine][_FROM]):
            self.told(report, self.clock.now)
            return

        self._flying[engine][_FROM] += 1
        self.clock.at(self.clock.now + delay, _ReportArrives(self, report))

    def landed(self, engine: LeasedEngine, way: int) -> None:
        """A message to (0) or from (1) that engine is there."""
        self._flying[engine][way] -= 1

    def told(self, report: SimReport, now: float) -> None:
        """A report is there."""
        engine, ledger = report.engine, self.ledger
        phase, name, lease_id = engine.phase, engine.model.name, report.done.lease_id
        both = phase is BOTH
        for request in report.finished:
            ledger.finished(request.request_id, phase, lease_id, now)
            del self.live[request.request_id]
        for request in report.through:
            through = ledger.prefilled if both else ledger.handed_over
            through(request.request_id, request.lease_id, request.made, now)
        for request in report.returned:
            ledger.returned(request.request_id, request.lease_id, request.made, now)
            if self._too_long(request, request.prompt + request.made + 1, now):
                ledger.cancelled(request.request_id, now)
                del self.live[request.request_id]
        ledger.stepped(name, phase, report.done, now)
        held = engine.account.lease
        if held is not None and held.lease_id == engine.lease_id and engine.state == IDLE and not engine.account.inside:
            # What left the engine while this report was on its way is known already (live it is told after it): nobody
            # will tell that the engine rests.
            ledger.lease_void(name, phase, now)
        self.machine.decide_again()
        if self.watcher is not None:
            self.watcher(report, now)

    def releasing(self, pages: ModelPages) -> None:
        """Sequences are about to give pages back: what their model held at most is what the ledger would have heard of
        at a turn just before."""
        model = self.ledger.models[pages.index]
        if pages.held > model.peak:
            model.peak = pages.held

    def victim(self, running: Sequence[SimRequest]) -> SimRequest:
        """Which of the sequences gives way first."""
        ranks = self.ranks
        return min(reversed(running), key=lambda request: ranks[request.execution]) if ranks else running[-1]

    # ------------------------------------------------------------ requests that move

    def decoder(self, name: str) -> LeasedEngine:
        """The engine in which the model's sequences decode."""
        return self._engine[name, DECODE]

    def decodes(self, request: SimRequest) -> bool:
        """Whether the ledger has heard that the sequence decodes. An engine of both phases knows it earlier."""
        return request.request_id in self.ledger.by_name[request.model].decoding

    def reserve(self, name: str, blocks: int, now: float) -> bool:
        """Have blocks for a sequence on its way here, or (negative) give them back; False: there are too few."""
        pages = self.machine.pages.of[name]
        if blocks > 0:
            return pages.take(blocks, now, -1)
        pages.release(-blocks)
        self.machine.decide_again()
        return True

    def detach(self, request: SimRequest, now: float) -> int:
        """A sequence leaves its engine between two steps; returns its blocks, which stay taken."""
        blocks = self.decoder(request.model).leave(request)
        self.ledger.detached(request.request_id, request.lease_id, request.made, now)
        self.machine.decide_again()
        return blocks

    def forget(self, request: SimRequest, now: float) -> None:
        """A detached request is none of the unit's any more."""
        self.ledger.moved(request.request_id, now)
        del self.live[request.request_id]

    def moved(self, request: SimRequest, blocks: int, now: float) -> None:
        """Another unit has a sequence that left with so many blocks."""
        self.forget(request, now)
        pages = self.machine.pages.of[request.model]
        pages.give_up(request, blocks)
        self.machine.decide_again()

    def take_over(self, request: SimRequest, now: float) -> None:
        """A sequence comes with its KV, in blocks that were reserved."""
        request.unit = self.spec.name
        self.live[request.request_id] = request
        self.ledger.taken_over(self._queued(request), now)
        self.machine.decide_again()

    def withdraw(self, name: str, now: float) -> list[SimRequest]:
        """All that wait for that model leave."""
        queue = self.ledger.by_name[name].queue
        gone = [live.request_id for live in queue.first(len(queue))]
        for request_id in gone:
            self.ledger.given_back(request_id, now)
        return [self.live.pop(request_id) for request_id in gone]

    # ------------------------------------------------------------ how its replicas stand

    def load(self, name: str) -> InstanceLoad:
        """How the replica of that model stands, as the global scheduler sees it."""
        self.machine.pages.count(self.clock.now)
        pages = self.machine.pages.of[name]
        pool = pages.pool
        return load_of(
            self.spec.name,
            self.ledger.by_name[name],
            self.policy,
            moving_in=self.moving_in,
            moving_out=self.moving_out,
            used=pages.held,
            available=pool.room - pool.held,
        )

    def view(self, name: str, load: InstanceLoad, levels: Levels, staying: Collection[str]) -> InstanceView:
        """The replica as it sees itself, with the sums of `load`. Requests that decode can be moved, those in `staying`
        apart, and those that their engine has not taken in yet."""
        model, engine, now = self.ledger.by_name[name], self.decoder(name), self.clock.now
        entering = {each for each in model.decoding if not engine.has(self.live[each])}
        return view_of(
            model,
            load,
            levels,
            entering.union(staying),
            lambda live: engine.computed(self.live[live.request_id], now),
        )

    # ------------------------------------------------------------ the scheduler

    def turn(self, now: float) -> None:
        """Decide what runs."""
        self.turns += 1
        self.tell_pages(now)
        if self.spec.adapt_quotas:
            self._rebalance(now)
        for grant in self.policy.decide(self.ledger, now):
            self._grant(grant, now)
        self._plan_to_wake(now)

    def _rebalance(self, now: float) -> None:
        changes = self.policy.rebalance(self.ledger, now)
        if changes:
            for change in changes:
                self._set_quota(change.model, change.pages)
            for pool in self.machine.pages.pools.values():
                pool.check(now)

    def _plan_to_wake(self, now: float) -> None:
        wakeup = self.policy.wakeup(self.ledger, now) if self.spec.adapt_quotas else self.ledger.next_retry()
        if wakeup < self._wake_at or (self._wake_at <= now and wakeup != float("inf")):
            self._wake_at = wakeup if wakeup > now else now + AGAIN_SECONDS
            self.clock.at(self._wake_at, _PolicyDue(self))

    def retire(self, name: str) -> None:
        """The model sleeps, and others have the use of its pages."""
        self.ledger.by_name[name].retired = True
        self._set_quota(name, 0)

    def revive(self, name: str) -> None:
        """The model is awake, and has pages again."""
        model = self.ledger.by_name[name]
        model.retired = False
        self._set_quota(name, quota_when_back(model))

    def _set_quota(self, name: str, quota: int) -> None:
        if self.spec.adapt_quotas:
            pages = self.machine.pages.of[name]
            pages.quota = quota
            self.ledger.pages(name, pages.held, 0, quota)

    def policy_due(self, now: float) -> None:
        """The policy wanted to be asked now, unless it has named another time since."""
        if now == self._wake_at:
            self.machine.decide_again()

    # ------------------------------------------------------------ what the scheduler sees and does

    def tell_pages(self, now: float) -> None:
        """Have the ledger know who holds how many pages."""
        everything, ledger = self.machine.pages, self.ledger
        everything.count(now)
        for pages in everything.models:
            held = pages.held
            if held != pages.told:
                pages.told = held
                ledger.pages(pages.model, held, 0, pages.quota)
        for name, pool in everything.pools.items():
            held = pool.held
            if held != pool.told:
                pool.told = held
                ledger.pool_pages(name, pool.room - held, 0, pool.room, pool.room)

    def _lease(self, grant: Grant, now: float) -> SimLease:
        """Carry out a decision, but for telling the engine."""
        self._lease_id += 1
        lease_id = self._lease_id
        self.ledger.granted(grant, lease_id, now)
        admit = [self.live[request_id] for request_id in grant.admit]
        for request in admit:
            request.lease_id = lease_id
        return SimLease(lease_id, grant.phase, grant.steps, grant.share, grant.seconds, admit)

    def _grant(self, grant: Grant, now: float) -> None:
        delay = self.way
        renews = bool(delay) and self._renewed_ahead(grant, now)
        lease = self._lease(grant, now)
        engine = self._engine[grant.model, grant.phase]
        if not delay or (renews and not self._flying[engine][_TO]):
            # A lease that is renewed ahead takes effect when the one before is not over yet, however long it takes.
            engine.receive(lease, now)
            return

        self._flying[engine][_TO] += 1
        self.clock.at(now + delay, _LeaseArrives(self, engine, lease))

    def _renewed_ahead(self, grant: Grant, now: float) -> bool:
        """The grant only renews a lease to decode, since half of it is used up."""
        lease = self.ledger.by_name[grant.model].engine(grant.phase).lease
        if lease is None or grant.admit or not (grant.renewable and lease.renewable and lease.due(now)):
            return False
        return grant.phase is lease.phase and grant.phase is not PREFILL and grant.share == lease.share


@dataclass(slots=True)
class _ReportArrives(TimedEvent):
    """A report has come from its engine."""

    scheduler: LeaseScheduler
    report: SimReport

    def handle(self, now: float) -> None:
        self.scheduler.landed(self.report.engine, _FROM)
        self.scheduler.told(self.report, now)


@dataclass(slots=True)
class _LeaseArrives(TimedEvent):
    """A lease has come to its engine."""

    scheduler: LeaseScheduler
    engine: LeasedEngine
    lease: SimLease

    def handle(self, now: float) -> None:
        self.scheduler.landed(self.engine, _TO)
        self.engine.receive(self.lease, now)


@dataclass(slots=True)
class _PolicyDue(TimedEvent):
    """The policy is to be asked even if nothing has happened."""

    scheduler: LeaseScheduler

    def handle(self, now: float) -> None:
        self.scheduler.policy_due(now)
