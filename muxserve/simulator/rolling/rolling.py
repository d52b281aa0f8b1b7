"""EcoServe: the policies of `muxserve.rolling`, the very objects, over instances that prefill or decode for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from muxserve.costs import LatencyModel
from muxserve.metrics.definitions import Objectives as Latencies
from muxserve.rolling.constraints import Demand
from muxserve.rolling.member import Member, Objectives
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.scaling import Attainment, ScalingRules
from muxserve.rolling.scheduler import RollingScheduler, Sent
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.rolling.clock import Arrangement
from muxserve.simulator.rolling.engine import Engine
from muxserve.simulator.rolling.requests import PhasedRequest
from muxserve.simulator.rolling.result import met


@dataclass(frozen=True, slots=True)
class RollingOptions:
    """`expected_output` tokens are promised to a request whatever it will make, since nobody knows. With `scaling`
    instances come, `start_seconds` after it is decided, and go."""

    instances: int
    objectives: Objectives
    bounds: Bounds = field(default_factory=Bounds)
    expected_output: int = 256
    scaling: ScalingRules | None = None
    start_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.instances < 1 or self.expected_output < 1 or self.start_seconds < 0:
            raise ValueError("instances and expected_output must be at least 1, start_seconds not negative")


class Rolling(Arrangement):
    """Instances under a `RollingScheduler`. An instance itself prefills what it was given before it decodes."""

    def __init__(self, spec: InstanceSpec, latency: LatencyModel, options: RollingOptions) -> None:
        super().__init__(spec, latency)
        self.options = options
        self.scheduler = RollingScheduler(options.objectives, options.bounds)
        self._by_id: dict[str, PhasedRequest] = {}
        self._names = 0
        self._due: float | None = None
        self._coming = 0
        self._attainment = Attainment(options.scaling) if options.scaling else None
        self._busy_before = (0.0, 0.0)
        for _ in range(options.instances):
            self._up(0.0)
        if options.scaling:
            self.at(1.0, self._round)

    # ------------------------------------------------------------ requests

    def place(self, request: PhasedRequest, now: float) -> None:
        """See `Arrangement.place`."""
        tokens = request.tokens
        request.predicted = self.costs.prefill(tokens, tokens * (tokens + 1) // 2, 1) + self.spec.step_seconds
        self._by_id[request.request_id] = request
        promised = min(self.spec.capacity, tokens + self.options.expected_output)
        demand = Demand(request.request_id, request.predicted, promised, request.arrival)
        self._deliver(self.scheduler.arrive(demand, now), now)
        self._watch(now)

    def _deliver(self, sent: Sent, now: float) -> None:
        for demand, member in sent:
            engine = self.engines[member.name]
            engine.enqueue(self._by_id[demand.request_id])
            self.kick(engine, now)

    def _watch(self, now: float) -> None:
        """Have what waits looked at when it becomes overdue, though nothing may happen until then."""
        due = self.scheduler.due(now)
        if due is not None and (self._due is None or due < self._due or self._due <= now):
            self._due = due
            self.at(due + 1e-9, self._overdue)

    def _overdue(self, now: float) -> None:
        if self._due is not None and now >= self._due:
            self._due = None
        self._deliver(self.scheduler.retry(now), now)
        due = self.scheduler.due(now)
        # What is overdue and still waits has no room anywhere: it is tried again when something ends.
        if due is not None and due > now:
            self._watch(now)

    def prefilled(self, engine: Engine, requests: Sequence[PhasedRequest], now: float, seconds: float) -> None:
        """See `engine.Told`."""
        member = self.scheduler.member(engine.name)
        member.observed(sum(request.predicted for request in requests), seconds)
        for request in requests:
            member.prefilled(request.request_id, now)

    def decoded(self, engine: Engine) -> None:
        """See `engine.Told`."""
        self.scheduler.member(engine.name).stepped()

    def finished(self, engine: Engine, request: PhasedRequest, now: float) -> None:
        """See `engine.Told`."""
        super().finished(engine, request, now)
        self.scheduler.member(engine.name).left(request.request_id, now)
        del self._by_id[request.request_id]
        if self._attainment:
            objectives = self.options.objectives
            self._attainment.told(met(request, Latencies(objectives.ttft, objectives.tpot)), now)

    def preempted(self, engine: Engine, request: PhasedRequest, now: float) -> None:
        """It is prefilled again where it was, which opens a prefill window there."""
        member = self.scheduler.member(engine.name)
        promised = member.requests[request.request_id].tokens
        member.left(request.request_id, now)
        tokens = request.tokens
        request.predicted = self.costs.prefill(tokens, tokens * (tokens + 1) // 2, 1) + self.spec.step_seconds
        member.admitted(request.request_id, max(promised, tokens), request.predicted, now)
        engine.enqueue(request, first=True)

    def stepped(self, engine: Engine, now: float) -> None:
        """Any step may have made room, or have given decodes time to spare."""
        if self.scheduler.waiting:
            self._deliver(self.scheduler.retry(now), now)
            due = self.scheduler.due(now)
            if due is not None and due > now:
                self._watch(now)

    # ------------------------------------------------------------ instances

    def _up(self, now: float) -> None:
        self._names += 1
        engine = Engine(f"i{self._names}", self._names, self.spec, self.costs, self)
        self.add(engine)
        sent = self.scheduler.grow(
            Member(engine.name, self.spec.capacity, self.options.objectives.tpot, switched_at=now), now
        )
        self.result.replicas.append((now, len(self.scheduler.members)))
        self.result.moves = self.scheduler.moved
        self._deliver(sent, now)

    def _round(self, now: float) -> None:
        rules, attainment = self.options.scaling, self._attainment
        assert rules is not None
        assert attainment is not None
        self._lost(now)
        members = self.scheduler.members
        prefill = sum(self.engines[name].prefill_busy for name in members)
        before, at = self._busy_before
        busy = max(0.0, prefill - before) / ((now - at) * len(members)) if members and now > at else 1.0
        self._busy_before = (prefill, now)
        wanted = attainment.wanted(len(members) + self._coming, busy, now, self.scheduler.waiting)
        for _ in range(wanted):
            self._coming += 1
            self.at(now + self.options.start_seconds, self._started)
        if wanted < 0:
            _, sent = self.scheduler.shrink(now)
            self.result.replicas.append((now, len(members)))
            self.result.moves = self.scheduler.moved
            self._deliver(sent, now)
        self.scheduler.drained()
        self.at(now + 1.0, self._round)

    def _lost(self, now: float) -> None:
        """Who waits for a first token longer than allowed counts before it is there, or an overload would be seen only
        when it ends."""
        assert self._attainment is not None
        for request in self._by_id.values():
            if request.first_token is None and 0.0 <= now - request.arrival - self.options.objectives.ttft < 1.0:
                self._attainment.told(False, now)

    def _started(self, now: float) -> None:
        self._coming -= 1
        self._up(now)
