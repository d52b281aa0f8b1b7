"""Several replicas of one model: which of them a request goes to, requests that move between them, and replicas that
come and go. What decides is `muxserve.replicas`, the very objects that serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from muxserve.replicas.decisions import Decision, Dispatch, Drain, RefuseRequest, Resume, Start, StopInstance
from muxserve.replicas.dispatch import DispatchPolicy, FreestOfQueues, NewRequest
from muxserve.replicas.global_scheduler import GlobalScheduler
from muxserve.replicas.migration import MigrationRules, choose_request
from muxserve.replicas.prefixes import KEY_TOKENS, MOST_KEYS
from muxserve.replicas.priorities import DEFAULT_LEVELS, Levels
from muxserve.replicas.scaling import ScalingRules
from muxserve.replicas.views import InstanceLoad
from muxserve.simulator.block_keys import Key, extend_keys
from muxserve.simulator.clock import Clock
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.moves import MigrationCosts, SimulatedMove
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.result import ReplicasResult
from muxserve.simulator.setup import SimUnit
from muxserve.simulator.unit import SimulatedUnit


@dataclass(frozen=True, slots=True)
class ReplicaRules:
    """How the replicas of a model work together.

    `dispatch` makes the policy, since some remember what they did. With `migration` running requests move, at the costs
    of `copying`. With `scaling` replicas go, and come where `spares` say, `start_seconds` after it is decided. The
    global scheduler's rounds are `tick` seconds apart; what it sees of the replicas is `stale` seconds old at most (0:
    never).
    """

    dispatch: Callable[[Levels], DispatchPolicy] = FreestOfQueues
    migration: MigrationRules | None = None
    scaling: ScalingRules | None = None
    levels: Levels = DEFAULT_LEVELS
    copying: MigrationCosts = field(default_factory=MigrationCosts)
    tick: float = 0.1
    stale: float = 0.0
    start_seconds: float = 15.0
    spares: tuple[SimUnit, ...] = ()

    def __post_init__(self) -> None:
        if not self.tick > 0 or self.stale < 0 or self.start_seconds < 0:
            raise ValueError("stale and start_seconds must not be negative, and tick be above zero")


class ReplicaSet:
    """What all ways have in common in which replicas of a model work together: units, those that start and stop, and
    moves between them. `start` makes a unit of a spare."""

    def __init__(
        self,
        model: str,
        units: Sequence[SimulatedUnit],
        clock: Clock,
        spares: Iterable[SimUnit],
        start_seconds: float,
        start: Callable[[SimUnit], SimulatedUnit],
    ) -> None:
        self.model = model
        self.clock = clock
        self.units = {unit.spec.name: unit for unit in units}
        self.result = ReplicasResult(model, started=len(units), peak=len(units), counts=[(0.0, len(units))])
        self._spares = list(spares)
        self._start_seconds = start_seconds
        self._start_unit = start
        self._since = dict.fromkeys(self.units, 0.0)
        self._moving: set[str] = set()

    def arrive(self, request: SimRequest, now: float) -> None:
        """A request comes in."""
        raise NotImplementedError

    # ------------------------------------------------------------ units that come and go

    def _start(self, count: int, now: float) -> int:
        """Have replicas come; returns how many do."""
        chosen, self._spares = self._spares[:count], self._spares[count:]
        for spare in chosen:
            self.clock.at(now + self._start_seconds, _ReplicaUp(self, spare, now))
        return len(chosen)

    def replica_up(self, spare: SimUnit, decided: float, now: float) -> None:
        """A replica serves that was `decided` on then."""
        unit = self._start_unit(spare)
        self.units[spare.name] = unit
        self._since[spare.name] = decided
        self.result.started += 1
        self.result.counts.append((now, len(self.units)))
        self.result.peak = max(self.result.peak, len(self.units))
        self._came(unit, now)

    def _came(self, unit: SimulatedUnit, now: float) -> None:
        """A replica has come."""
        raise NotImplementedError

    def _gone(self, name: str, now: float) -> None:
        """A replica has nothing to do and goes; another may come in its place."""
        unit = self.units.pop(name)
        unit.end()
        self.result.counts.append((now, len(self.units)))
        self.result.replica_seconds += now - self._since.pop(name)
        self._spares.append(unit.spec)

    def finish(self, now: float) -> ReplicasResult:
        """What happened, once all has ended."""
        self.result.seconds = now
        for since in self._since.values():
            self.result.replica_seconds += max(0.0, now - since)
        self._since.clear()
        return self.result

    # ------------------------------------------------------------ moves

    def _move_one(
        self,
        source: SimulatedUnit,
        load: InstanceLoad,
        destination: SimulatedUnit,
        there: InstanceLoad,
        rules: MigrationRules,
        levels: Levels,
        copying: MigrationCosts,
    ) -> bool:
        """Let the source move its next request there, if there is one that may."""
        here, destined = source.scheduler, destination.scheduler
        view = here.view(self.model, load, levels, self._moving)
        block = here.ledger.by_name[self.model].block_tokens
        chosen = choose_request(view, there, rules, levels, growth=2 * block)
        if chosen is None:
            return False
        request = here.live[chosen.request_id]
        move = SimulatedMove(self.clock, copying, request, here, destined, self._ended, self.result.downtimes)
        if not move.begin(self.clock.now):
            return False
        self._moving.add(request.request_id)
        return True

    def _ended(self, move: SimulatedMove, arrived: bool, now: float) -> None:
        self._moving.discard(move.request.request_id)
        result = self.result
        if not arrived:
            result.aborted += 1
            return
        result.migrations += 1
        result.copy_seconds.append(now - move.began)
        self._moved(move, now)

    def _moved(self, move: SimulatedMove, now: float) -> None:
        """A request is where it was to go."""


class Dispatched(ReplicaSet):
    """Replicas under a `GlobalScheduler`."""

    def __init__(
        self,
        model: str,
        units: Sequence[SimulatedUnit],
        clock: Clock,
        rules: ReplicaRules,
        start: Callable[[SimUnit], SimulatedUnit],
    ) -> None:
        super().__init__(model, units, clock, rules.spares, rules.start_seconds, start)
        self.rules = rules
        self.scheduler = GlobalScheduler(
            model, rules.levels, rules.dispatch(rules.levels), rules.migration, rules.scaling
        )
        self._block_tokens = next(m for m in units[0].spec.models if m.name == model).profile.kv.block_tokens
        self._waiting: dict[str, SimRequest] = {}
        self._draining: set[str] = set()
        self._reported = -1.0
        self._ranks = {level.name: level.rank for level in rules.levels} | {"": rules.levels[rules.levels.default].rank}
        for unit in units:
            self._came(unit, 0.0)
        if rules.migration or rules.scaling:
            clock.at(rules.tick, _RoundDue(self))

    def arrive(self, request: SimRequest, now: float) -> None:
        default = self.rules.levels.default
        request.scheduling, request.execution = request.scheduling or default, request.execution or default
        request.priority = -self.rules.levels[request.scheduling].rank
        self._waiting[request.request_id] = request
        self._report(now)
        self._dispatch(request, now)

    def drain(self, name: str, now: float) -> None:
        """Somebody wants that replica drained."""
        self._apply(self.scheduler.drain(name), now)

    # ------------------------------------------------------------ the global scheduler

    def _dispatch(self, request: SimRequest, now: float) -> None:
        demand = -(-request.tokens // self._block_tokens) * self._block_tokens
        prefix: list[Key] = []
        extend_keys(prefix, request.content, min(request.prompt // KEY_TOKENS, MOST_KEYS), KEY_TOKENS)
        new = NewRequest(request.request_id, demand, request.arrival, request.scheduling, request.execution, prefix)
        self._apply(self.scheduler.arrive(now, new), now)

    def _load(self, unit: SimulatedUnit) -> InstanceLoad:
        load = unit.scheduler.load(self.model)
        load.terminating = unit.spec.name in self._draining
        return load

    def _report(self, now: float) -> None:
        if self.rules.stale and now - self._reported < self.rules.stale:
            return
        self._reported = now
        for unit in self.units.values():
            self.scheduler.report(self._load(unit))

    def round(self, now: float) -> None:
        """The global scheduler's round."""
        self._report(now)
        self._apply(self.scheduler.tick(now), now)
        for source in list(self.scheduler.pairs):
            self._pump(source)
        self.clock.at(now + self.rules.tick, _RoundDue(self))

    def _pump(self, name: str) -> None:
        """Let a source move its next request."""
        source = self.units.get(name)
        destination = self.units.get(self.scheduler.pairs.get(name, ""))
        rules = self.rules
        if rules.migration is not None and source is not None and destination is not None:
            here, there = self._load(source), self._load(destination)
            self._move_one(source, here, destination, there, rules.migration, rules.levels, rules.copying)

    def _moved(self, move: SimulatedMove, now: float) -> None:
        self._pump(move.source.spec.name)

    def _apply(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            match decision:
                case Dispatch(request_id, name):
                    self.units[name].arrive(self._waiting.pop(request_id), now)
                case RefuseRequest(request_id, reason):
                    self._waiting.pop(request_id).error = reason
                    self.clock.open -= 1
                case Start(count):
                    for _ in range(count - self._start(count, now)):
                        self.scheduler.start_failed()
                case Drain(name):
                    self._draining.add(name)
                    for request in self.units[name].scheduler.withdraw(self.model, now):
                        self._waiting[request.request_id] = request
                        self._dispatch(request, now)
                case Resume(name):
                    self._draining.discard(name)
                case StopInstance(name) if self._load(self.units[name]).idle:
                    self._draining.discard(name)
                    self.scheduler.down(name)
                    self._gone(name, now)
                case _:
                    # Sources ask for their destination whenever they may move a request. And something may have reached
                    # a replica since it was last looked at.
                    pass

    def _came(self, unit: SimulatedUnit, now: float) -> None:
        unit.scheduler.ranks = self._ranks
        self.scheduler.up(self._load(unit))
        self._apply(self.scheduler.dispatch(now), now)


@dataclass(slots=True)
class _ReplicaUp(TimedEvent):
    """A replica has started."""

    replicas: ReplicaSet
    spare: SimUnit
    decided: float

    def handle(self, now: float) -> None:
        self.replicas.replica_up(self.spare, self.decided, now)


@dataclass(slots=True)
class _RoundDue(TimedEvent):
    """The global scheduler looks at all replicas again."""

    replicas: Dispatched

    def handle(self, now: float) -> None:
        self.replicas.round(now)
