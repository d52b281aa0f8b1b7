"""Replicas whose prefill rolls (EcoServe): the policies of `muxserve.rolling`, the very objects, over units that
prefill or decode for a while under the policy `rolling`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muxserve.costs import LatencyModel
from muxserve.costs.step_costs import StepWork
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import DEFAULT_LEVELS, Levels
from muxserve.rolling.answers import AnswerLengths
from muxserve.rolling.constraints import PrefillDemand, promise
from muxserve.rolling.draining import destinations
from muxserve.rolling.member import LatencyTargets, MacroMember
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.scaling import Attainment, RollingScalingRules
from muxserve.rolling.scheduler import RollingScheduler, Sent
from muxserve.simulator.clock import Clock
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.leased import SimReport
from muxserve.simulator.moves import MigrationCosts, SimulatedMove
from muxserve.simulator.replicas import ReplicaSet
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import Pipeline, SimUnit
from muxserve.simulator.stages import make_stages
from muxserve.simulator.unit import SimulatedUnit

# What waits is tried again at least so often: live replicas tell of decode steps after this time.
REPORT_SECONDS = 0.02
# From one look at the objectives, and at what can be moved, to the next.
ROUND_SECONDS = 1.0
TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RingRules:
    """How the replicas of a rolling model work together.

    `expected_output` tokens are promised to a request whatever it will make, since nobody knows. With `learns_answers`
    that is what is expected at first, as live. A request whose `max_tokens` is told, as by `muxserve replay`, is
    promised no more than it will make. With `scaling` replicas go, and come
    where `spares` say, `start_seconds` after it is decided; decodes of those that go move if there are rules for
    `migration`, and otherwise end where they are.
    """

    objectives: LatencyTargets
    bounds: Bounds = field(default_factory=Bounds)
    expected_output: int = 256
    learns_answers: bool = True
    max_tokens_told: bool = False
    scaling: RollingScalingRules | None = None
    migration: MigrationRules | None = None
    levels: Levels = DEFAULT_LEVELS
    copying: MigrationCosts = field(default_factory=MigrationCosts)
    start_seconds: float = 10.0
    spares: tuple[SimUnit, ...] = ()

    def __post_init__(self) -> None:
        if self.expected_output < 1 or self.start_seconds < 0:
            raise ValueError("expected_output must be at least 1, start_seconds not negative")


class Ring(ReplicaSet):
    """Units under a `RollingScheduler`."""

    def __init__(
        self,
        model: str,
        units: Sequence[SimulatedUnit],
        clock: Clock,
        rules: RingRules,
        start: Callable[[SimUnit], SimulatedUnit],
        latency: LatencyModel,
    ) -> None:
        super().__init__(model, units, clock, rules.spares, rules.start_seconds, start)
        self.rules = rules
        self.scheduler = RollingScheduler(rules.objectives, rules.bounds)
        self.answers = AnswerLengths(rules.expected_output)
        spec, (first,) = units[0].spec, units[0].spec.models
        share = first.profile.engines.decode_share if first.cost_share is None else first.cost_share
        shape = spec.shape_of(first, share)
        # Prompts follow each other through a pipeline, so that each takes the time of the slowest stage.
        how = spec.pipeline or Pipeline((first.architecture.layers,), ())
        self._stages = make_stages(how, latency, first.architecture, shape)
        self._step_seconds = units[0].machine.overheads.between
        self._by_id: dict[str, SimRequest] = {}
        self._due: float | None = None
        self._coming = 0
        self._pairs: dict[str, str] = {}
        self._ticking = False
        self._attainment = Attainment(rules.scaling) if rules.scaling else None
        # Seconds of prefill, since the objectives were last looked at.
        self._busy = self._looked = 0.0
        # Who waits for a first token, in order of arrival.
        self._unanswered: deque[SimRequest] = deque()
        for unit in units:
            self._came(unit, 0.0)
        if rules.scaling is not None:
            clock.at(ROUND_SECONDS, _RoundDue(self))

    # ------------------------------------------------------------ requests

    def arrive(self, request: SimRequest, now: float) -> None:
        tokens = request.prompt + request.output
        largest = max((member.capacity for member in self.scheduler.members.values()), default=tokens)
        if tokens - 1 > largest:
            request.error = f"longer than the {largest} tokens that a replica of {self.model} has pages for"
            self.clock.open -= 1
            return
        self._by_id[request.request_id] = request
        if self._attainment is not None:
            self._unanswered.append(request)
        demand = PrefillDemand(
            request.request_id, self._predicted(request), self._promised(request, largest), request.arrival
        )
        self._count_steps(now)
        self._deliver(self.scheduler.arrive(demand, now), now)
        self._watch(now)

    def drain(self, name: str, now: float) -> None:
        """Somebody wants that replica to go."""
        self._deliver(self.scheduler.drain(name, now), now)
        self._drains(now)

    def _promised(self, request: SimRequest, capacity: int) -> int:
        left = request.output - request.made if self.rules.max_tokens_told else 0
        return promise(request.tokens, left, capacity, self.answers.expected)

    def _predicted(self, request: SimRequest) -> float:
        tokens = request.tokens
        work = StepWork(tokens, 1, tokens * (tokens + 1) // 2)
        return max(stage.seconds(work) for stage in self._stages) + self._step_seconds

    def _deliver(self, sent: Sent, now: float) -> None:
        for demand, member in sent:
            self.units[member.name].arrive(self._by_id[demand.request_id], now)

    def _retry(self, now: float) -> None:
        if self.scheduler.waiting:
            self._count_steps(now)
            self._deliver(self.scheduler.retry(now), now)
            self._watch(now)

    def _watch(self, now: float) -> None:
        """Have what waits looked at again though nothing may happen until then."""
        due = self.scheduler.due(now)
        if due is None:
            return
        due = min(due + 1e-9, now + REPORT_SECONDS) if due > now else now + REPORT_SECONDS
        if self._due is None or due < self._due or self._due <= now:
            self._due = due
            self.clock.at(due, _RetryDue(self))

    def overdue(self, now: float) -> None:
        """What waits may be admitted somewhere by now."""
        if self._due is not None and now >= self._due:
            self._due = None
        self._retry(now)

    def _count_steps(self, now: float) -> None:
        decoded = 0
        for name, unit in self.units.items():
            member, steps = self.scheduler.member(name), unit.scheduler.decoder(self.model).steps_by(now)
            decoded += (steps - member.clock.steps) * member.decoding
            member.counted(steps)
        if self.rules.learns_answers:
            self.answers.add(decoded, 0)

    # ------------------------------------------------------------ what units tell

    def _told(self, report: SimReport, now: float) -> None:
        name = report.engine.machine.spec.name
        member = self.scheduler.member(name)
        changed = bool(report.through or report.finished or report.returned)
        if spent := report.done.prefill_seconds:
            member.measured(spent, [request.request_id for request in report.through])
            self._busy += spent
        if not changed:
            return
        self._count_steps(now)
        member = self.scheduler.member(name)
        for request in report.through:
            member.prefilled(request.request_id, now)
        for request in report.finished:
            was = member.left(request.request_id, now)
            del self._by_id[request.request_id]
            if self.rules.learns_answers:
                self.answers.add(0, 1)
            if self._attainment is not None and was is not None:
                first = now if was.since is None else was.since
                met = first - request.arrival <= self.rules.objectives.ttft and member.saved_by(was, now) >= 0
                self._attainment.add(met, now)
        for request in report.returned:
            was = member.left(request.request_id, now)
            if request.error:
                del self._by_id[request.request_id]
            elif was is not None:
                # It is prefilled again where it was, which opens a prefill window there.
                promised = self._promised(request, member.capacity)
                member.admitted(request.request_id, promised, self._predicted(request), now)
        self._retry(now)

    # ------------------------------------------------------------ replicas that come and go

    def _came(self, unit: SimulatedUnit, now: float) -> None:
        unit.scheduler.watcher = self._told
        (model,) = unit.spec.models
        pages = unit.machine.pages.of[self.model]
        capacity = min(pages.quota, pages.pool.profile.pages) // pages.per_block * model.profile.kv.block_tokens
        self._coming = max(0, self._coming - 1)
        member = MacroMember(unit.spec.name, capacity, self.rules.objectives.tpot)
        sent = self.scheduler.grow(member, now)
        self.result.moves = self.scheduler.moved
        self._deliver(sent, now)

    def round(self, now: float) -> None:
        """Look at the objectives, and have replicas come or go."""
        rules, attainment = self.rules.scaling, self._attainment
        assert rules is not None
        assert attainment is not None
        self._count_steps(now)
        # Who waits for a first token for longer than allowed counts before it is there, or an overload would be seen
        # only when it ends.
        unanswered = self._unanswered
        while unanswered and now - unanswered[0].arrival > self.rules.objectives.ttft:
            if unanswered.popleft().first_token is None:
                attainment.add(False, now)
        members = self.scheduler.members
        busy = self._busy / ((now - self._looked) * len(members)) if members else 1.0
        self._busy, self._looked = 0.0, now
        wanted = attainment.wanted(len(members) + self._coming, busy, now, self.scheduler.waiting)
        if wanted > 0:
            self._coming += self._start(wanted, now)
        elif wanted < 0:
            _, sent = self.scheduler.shrink(now)
            self.result.moves = self.scheduler.moved
            self._deliver(sent, now)
            self._drains(now)
        self.clock.at(now + ROUND_SECONDS, _RoundDue(self))

    def _drains(self, now: float) -> None:
        if not self._ticking:
            self._ticking = True
            self.clock.at(now, _DrainDue(self))

    def drain_on(self, now: float) -> None:
        """Decodes of replicas that are to go move, and those that have nothing left go."""
        for name in self.scheduler.drained():
            self._gone(name, now)
        draining = self.scheduler.draining
        if not draining:
            self._ticking = False
            return
        if self.rules.migration is not None:
            self._count_steps(now)
            members = self.scheduler.members
            self._pairs = destinations(
                draining.values(), members.values(), self.rules.objectives, now, self._pairs, lambda one, other: True
            )
            for source, destination in self._pairs.items():
                self._pump(source, destination)
        self.clock.at(now + TICK_SECONDS, _DrainDue(self))

    def _pump(self, source: str, destination: str) -> None:
        rules, here, there = self.rules, self.units[source], self.units[destination]
        assert rules.migration is not None
        load, room = here.scheduler.load(self.model), there.scheduler.load(self.model)
        load.terminating = True
        # What is promised there is taken, as it is for requests that are sent there.
        room.used = max(room.used, self.scheduler.member(destination).promised)
        self._move_one(here, load, there, room, rules.migration, rules.levels, rules.copying)

    def _moved(self, move: SimulatedMove, now: float) -> None:
        request_id = move.request.request_id
        self._count_steps(now)
        source = self.scheduler.member(move.source.spec.name)
        member = self.scheduler.member(move.destination.spec.name)
        was = source.left(request_id, now)
        if was is not None:
            # What it had saved goes with it.
            place = member.place_of(source.saved_by(was, now), now)
            member.found(request_id, was.tokens, now if was.since is None else was.since, now, place)
        if source.name in self._pairs:
            self._pump(source.name, self._pairs[source.name])
        self._retry(now)


@dataclass(slots=True)
class _RetryDue(TimedEvent):
    """What waits is to be tried again."""

    ring: Ring

    def handle(self, now: float) -> None:
        self.ring.overdue(now)


@dataclass(slots=True)
class _RoundDue(TimedEvent):
    """The objectives are to be looked at again."""

    ring: Ring

    def handle(self, now: float) -> None:
        self.ring.round(now)


@dataclass(slots=True)
class _DrainDue(TimedEvent):
    """Replicas that are to go are to be looked at again."""

    ring: Ring

    def handle(self, now: float) -> None:
        self.ring.drain_on(now)
