"""A unit with a scheduler: the ledger and the policy of the live unit, driven by virtual events.

It tells the ledger what `muxserve.unit.executor` tells it, and when: reports, page counts before each turn, grants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import ClassVar

from muxserve.replicas.priorities import NORMAL, Levels
from muxserve.replicas.views import InstanceLoad, InstanceView
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.loads import load_of, view_of
from muxserve.scheduling.policies import make_policy
from muxserve.scheduling.policy import AGAIN_SECONDS, Policy
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import BOTH, DECODE, PREFILL, Grant, ModelProfile, Phase, QueuedRequest
from muxserve.simulator.batch import BlockCounts
from muxserve.simulator.engine import IDLE
from muxserve.simulator.leased import LeasedEngine, PhaseEngine, SimLease, SimReport
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.resident import ResidentModels
from muxserve.simulator.result import UnitResult
from muxserve.simulator.run_ahead import RunAheadEngine
from muxserve.simulator.setup import SimModel
from muxserve.simulator.stages import PipelineEngine
from muxserve.simulator.unit import SimulatedUnit


class ScheduledUnit(SimulatedUnit):
    """Simulates a unit under the policy that it names. `watcher` is told of each report after the ledger was, and of
    requests that are refused.

    Raises:
        ValueError: the policy is for models with other engines, or the residency for other models.
    """

    phase_engine: ClassVar[type[PhaseEngine]] = PhaseEngine
    pipeline_engine: ClassVar[type[PipelineEngine]] = RunAheadEngine

    def _begin(self) -> None:
        spec = self.spec
        self.policy: Policy = make_policy(spec.policy, spec.share_steps)
        self.ledger = UnitLedger([_counted(model.profile) for model in spec.models], spec.pools)
        self.live: dict[str, SimRequest] = {}
        self.watcher: Callable[[SimReport, float], None] | None = None
        self.moving_in = self.moving_out = 0
        # Of execution levels: who gives way first. Without any, the last to have joined.
        self.ranks: dict[str, int] = {}
        self._lease_id = 0
        self._wake_at = -1.0
        self.decoders: list[tuple[ModelState, LeasedEngine]] = []
        self.prefillers: list[tuple[ModelState, LeasedEngine]] = []
        # Messages on their way, by engine: those to it and those from it.
        self._flying: dict[LeasedEngine, list[int]] = {}
        self._in_flight = 0
        self._engine: dict[tuple[str, Phase], LeasedEngine] = {}
        for model, pages in zip(spec.models, self.pages, strict=True):
            engine = self._make(model, pages)
            self._enter(engine)
            self.decoders.append((self.ledger.by_name[model.name], engine))
        # Of steps that begin at the same moment decode comes first, since prefill takes whatever is left.
        for model, pages in zip(spec.models, self.pages, strict=True):
            if not model.profile.both:
                engine = PhaseEngine(self, model, PREFILL, pages)
                self._enter(engine)
                self.prefillers.append((self.ledger.by_name[model.name], engine))

        # Where memory decides which models are awake.
        residency = spec.residency
        self.residents = ResidentModels(self, residency) if residency is not None else None

    def block_counts(self, profile: ModelProfile) -> BlockCounts:
        return BlockCounts.of(_counted(profile), windows=True)

    def _make(self, model: SimModel, pages: ModelPages) -> LeasedEngine:
        if self.spec.pipeline is not None:
            return self.pipeline_engine(self, model, self.spec.pipeline, pages)
        return self.phase_engine(self, model, BOTH if model.profile.both else DECODE, pages)

    def _enter(self, engine: LeasedEngine) -> None:
        self._add(engine)
        self._flying[engine] = [0, 0]
        name = engine.model.name
        engine.account = self.ledger.by_name[name].engine(engine.phase)
        for phase in (engine.phase, *((PREFILL, DECODE) if engine.phase is BOTH else ())):
            self._engine[name, phase] = engine
        self.ledger.engine_up(name, engine.phase, self.clock.now)

    # ------------------------------------------------------------ requests

    def enqueue(self, request: SimRequest, now: float) -> None:
        if self.residents is None:
            self.serve(request, now)
        else:
            self.residents.arrived(request, now)

    def refuse(self, request: SimRequest, now: float, error: str) -> None:
        super().refuse(request, now, error)
        if self.residents is not None:
            self.residents.ended(request, now)

    def finished(self, request: SimRequest, now: float) -> None:
        super().finished(request, now)
        if self.residents is not None:
            self.residents.ended(request, now)

    def serve(self, request: SimRequest, now: float) -> None:
        """Queue a request."""
        # The last token is not computed upon, so it needs no place; but prompts are admitted with room for one.
        if self._too_long(request, request.prompt + max(1, request.output - 1), now):
            return
        self.live[request.request_id] = request
        self.ledger.arrived(self._queued(request), now)
        self.turn_due = True
        self.touch()

    def _queued(self, request: SimRequest) -> QueuedRequest:
        return QueuedRequest(
            request.request_id,
            request.model,
            request.prompt,
            request.output,
            request.arrival,
            request.priority,
            request.made,
            request.made > 0,
            request.execution or NORMAL,
            tenant=request.tenant,
        )

    def _too_long(self, request: SimRequest, tokens: int, now: float) -> bool:
        model = self.ledger.by_name[request.model]
        capacity = self.capacity(model)
        pages = (-(-tokens // model.block_tokens) + model.state_blocks) * model.pages_per_block
        if pages <= capacity:
            return False
        most = max(0, capacity // model.pages_per_block - model.state_blocks) * model.block_tokens
        self.refuse(request, now, f"longer than the {most} tokens that {model.name} has pages for")
        return True

    def capacity(self, model: ModelState) -> int:
        """Pages that the model can count on."""
        if not self.spec.adapt_quotas:
            return model.quota
        # Quotas never fall below the floor, and nothing promises that they ever rise above it.
        alone = model.pool.profile.pages if len(model.pool.models) == 1 else 0
        return min(self.policy.capacity(model), max(model.profile.floor_pages, alone))

    # ------------------------------------------------------------ engines

    def report(self, report: SimReport) -> None:
        """An engine's `StepReport`, which takes its time. One that says nothing but that a lease is half used does not
        have to: it is sent, and answered, well before the lease ends."""
        delay, engine = self.way, report.engine
        if not delay or (report.renews and not self._flying[engine][1]):
            self._told(report, self.clock.now)
            return

        def arrives(now: float) -> None:
            self._landed(engine, 1)
            self._told(report, now)

        self._takes_off(engine, 1)
        self.clock.at(self.clock.now + delay, arrives)

    def _takes_off(self, engine: LeasedEngine, way: int) -> None:
        self._flying[engine][way] += 1
        self._in_flight += 1

    def _landed(self, engine: LeasedEngine, way: int) -> None:
        self._flying[engine][way] -= 1
        self._in_flight -= 1

    def _told(self, report: SimReport, now: float) -> None:
        engine, ledger = report.engine, self.ledger
        phase, name, lease_id = engine.phase, engine.model.name, report.done.lease_id
        both = phase is BOTH
        for request in report.finished:
            ledger.finished(request.request_id, phase, lease_id, now)
            del self.live[request.request_id]
        for request in report.through:
            told = ledger.prefilled if both else ledger.handed_over
            told(request.request_id, request.lease_id, request.made, now)
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
        self.turn_due = True
        self.touch()
        if self.watcher is not None:
            self.watcher(report, now)

    def victim(self, running: Sequence[SimRequest]) -> SimRequest:
        ranks = self.ranks
        return min(reversed(running), key=lambda request: ranks[request.execution]) if ranks else running[-1]

    # ------------------------------------------------------------ requests that move

    def decoder(self, name: str) -> LeasedEngine:
        """The engine in which the model's sequences decode."""
        return self._engine[name, DECODE]

    def reserve(self, name: str, blocks: int, now: float) -> bool:
        """Have blocks for a sequence on its way here, or (negative) give them back; False: there are too few."""
        pages = self.page_of[name]
        if blocks > 0:
            return pages.take(blocks, now, -1)
        pages.release(-blocks)
        self.decide_again()
        return True

    def detach(self, request: SimRequest, now: float) -> int:
        """A sequence leaves its engine between two steps; returns its blocks, which stay taken."""
        blocks = self.decoder(request.model).leave(request)
        self.ledger.detached(request.request_id, request.lease_id, request.made, now)
        self.decide_again()
        return blocks

    def forget(self, request: SimRequest, now: float) -> None:
        """A detached request is none of the unit's any more."""
        self.ledger.moved(request.request_id, now)
        del self.live[request.request_id]

    def moved(self, request: SimRequest, blocks: int, now: float) -> None:
        """Another unit has a sequence that left with so many blocks."""
        self.forget(request, now)
        pages = self.page_of[request.model]
        pages.give_up(request, blocks)
        self.decide_again()

    def take_over(self, request: SimRequest, now: float) -> None:
        """A sequence comes with its KV, in blocks that were reserved."""
        request.unit = self.spec.name
        self.live[request.request_id] = request
        self.ledger.taken_over(self._queued(request), now)
        self.decide_again()

    def withdraw(self, name: str, now: float) -> list[SimRequest]:
        """All that wait for that model leave."""
        queue = self.ledger.by_name[name].queue
        gone = [live.request_id for live in queue.first(len(queue))]
        for request_id in gone:
            self.ledger.given_back(request_id, now)
        return [self.live.pop(request_id) for request_id in gone]

    def decide_again(self) -> None:
        """Something has changed that calls for a decision."""
        self.turn_due = True
        self.touch()

    # ------------------------------------------------------------ how its replicas stand

    def load(self, name: str) -> InstanceLoad:
        self._count_pages(self.clock.now)
        pages = self.page_of[name]
        pool = pages.pool
        return load_of(
            self.spec.name,
            self.ledger.by_name[name],
            self.policy,
            moving_in=self.moving_in,
            moving_out=self.moving_out,
            used=pages.held,
            available=pool.profile.pages - pool.held,
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

    def result(self) -> UnitResult:
        found = super().result()
        if found.phases == "rolling":
            found.waits = [request.switch_wait for request in self.requests if request.finish is not None]
        if self.residents is not None:
            found.residency = self.residents.result()
        for _, engine in self.decoders:
            if isinstance(engine, PipelineEngine):
                found.stages = tuple(engine.record.busy())
                found.active = engine.record.active()
                found.micro_batches = engine.record
                found.busy_seconds = found.engines[0].busy_seconds = sum(found.stages) / len(found.stages)
                found.timelines = engine.timelines() if self.options.timeline else []
        return found

    # ------------------------------------------------------------ the scheduler

    def turn(self, now: float) -> None:
        for grant in self._decisions(now):
            self._grant(grant, now)
        self._plan_to_wake(now)

    def _decisions(self, now: float) -> list[Grant]:
        self.turns += 1
        self._tell_pages(now)
        if self.spec.adapt_quotas:
            self._rebalance(now)
        return self.policy.decide(self.ledger, now)

    def answer(self, report: SimReport, now: float) -> SimLease | None:
        """The lease that the only engine gets for a report that comes in at `now`, before anything else happens, and is
        not on its way yet; None: there is none for that."""
        self._told(report, now)
        self.turn_due = False
        leases = [self._lease(grant, now) for grant in self._decisions(now)]
        self._plan_to_wake(now)
        return leases[0] if leases else None

    def _rebalance(self, now: float) -> None:
        changes = self.policy.rebalance(self.ledger, now)
        if changes:
            for change in changes:
                pages = self.page_of[change.model]
                pages.quota = change.pages
                self.ledger.pages(change.model, pages.held, 0, pages.quota)
            for pool in self.pools.values():
                pool.check(now)

    def _plan_to_wake(self, now: float) -> None:
        wakeup = self.policy.wakeup(self.ledger, now) if self.spec.adapt_quotas else self.ledger.next_retry()
        if wakeup < self._wake_at or (self._wake_at <= now and wakeup != float("inf")):
            self._wake_at = wakeup if wakeup > now else now + AGAIN_SECONDS
            self.clock.at(self._wake_at, self._wake)

    def _wake(self, now: float) -> None:
        if now == self._wake_at:
            self.turn_due = True
            self.touch()

    # ------------------------------------------------------------ what the scheduler sees and does

    def _tell_pages(self, now: float) -> None:
        self._count_pages(now)
        ledger = self.ledger
        for pages in self.pages:
            held = pages.held
            if held != pages.told:
                pages.told = held
                ledger.pages(pages.model, held, 0, pages.quota)
        for name, pool in self.pools.items():
            held = pool.held
            if held != pool.told:
                pool.told = held
                ledger.pool_pages(name, pool.profile.pages - held, 0)

    def releasing(self, pages: ModelPages, now: float) -> None:
        # What a model held at most is what the ledger would have heard of at a turn just before.
        model = self.ledger.models[pages.index]
        if pages.held > model.peak:
            model.peak = pages.held

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
        if not delay or (renews and not self._flying[engine][0]):
            # A lease that is renewed ahead takes effect when the one before is not over yet, however long it takes.
            engine.receive(lease, now)
            return

        def arrives(now: float) -> None:
            self._landed(engine, 0)
            engine.receive(lease, now)

        self._takes_off(engine, 0)
        self.clock.at(now + delay, arrives)

    def _renewed_ahead(self, grant: Grant, now: float) -> bool:
        """The grant only renews a decode lease, since half of it is used up."""
        lease = self.ledger.by_name[grant.model].engine(grant.phase).lease
        if lease is None or grant.admit or not (grant.renewable and lease.renewable and lease.due(now)):
            return False
        return grant.phase is lease.phase is DECODE and grant.share == lease.share


def _counted(profile: ModelProfile) -> ModelProfile:
    """How admission and engine both count a model's blocks: engines of both phases are simulated with whole ones. If
    admission counted less, it would let in again and again what the engine has no pages for."""
    return replace(profile, window=0, windowed_layers=0) if profile.both else profile
