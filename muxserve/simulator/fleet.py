"""Simulates all units of a fleet on one workload."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from muxserve.costs import LatencyModel
from muxserve.replicas.priorities import DEFAULT_LEVELS, Levels
from muxserve.simulator.clock import Clock, SimulationError
from muxserve.simulator.compute import Compute
from muxserve.simulator.replicas import Dispatched, ReplicaRules, ReplicaSet
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.result import FleetResult
from muxserve.simulator.ring import Ring, RingRules
from muxserve.simulator.setup import Options, SimUnit
from muxserve.simulator.unit import SimulatedUnit
from muxserve.workload.trace import TraceRequest

CPU = "CPU"
_CPU_KEY = ("device", CPU)
_PROGRESS_EVERY = 200

# How the replicas of a model work together, by its name.
Rules = Mapping[str, ReplicaRules | RingRules]
# (scheduling, execution) priority of the n-th request.
PriorityOf = Callable[[int], tuple[str, str]]
# Tenant of the n-th request.
TenantOf = Callable[[int], str]


def simulate(
    units: Sequence[SimUnit],
    workload: Iterable[TraceRequest],
    latency: LatencyModel,
    options: Options | None = None,
    rules: Rules | None = None,
    priorities: PriorityOf | None = None,
    levels: Levels = DEFAULT_LEVELS,
    progress: Callable[[int, int], None] | None = None,
    tenants: TenantOf | None = None,
) -> FleetResult:
    """Play `workload` (in order of arrival) on the units. The same arguments give the same result.

    Replicas of a model work together by its `rules`; without any its requests go to the freest. `priorities` are of
    these `levels`: lower ones wait longer, and give way first when pages run out. Service is fair among `tenants`.
    `progress` is told requests that have arrived, and all there are.

    Raises:
        SimulationError: arrivals fall, or a unit cannot go on.
        CostError: the latency model does not know a model or shape.
        PriorityError: `priorities` names a level that the rules do not have.
    """
    collecting = gc.isenabled()
    # Many small objects and hardly a cycle: collecting costs a third of the time.
    gc.disable()
    try:
        groups = [Group(members, latency, options, rules or {}, levels) for members in coupled(units)]
        parts: list[list[SimRequest]] = [[] for _ in groups]
        part_of = {name: part for group, part in zip(groups, parts, strict=True) for name in group.models}
        requests = list(_requests(workload, priorities, levels, tenants))
        refused = 0
        for request in requests:
            if request.model in part_of:
                part_of[request.model].append(request)
            else:
                request.error = f"no unit serves {request.model}"
                refused += 1
        told = _Progress(progress, len(requests), refused)
        for group, part in zip(groups, parts, strict=True):
            group.run(told.counted(part))
    finally:
        if collecting:
            gc.enable()
    told.end()
    order = {unit.name: number for number, unit in enumerate(units)}
    simulated = [unit for group in groups for unit in group.units]
    simulated.sort(key=lambda unit: order.get(unit.spec.name, len(order)))
    replicas = [each.finish(group.clock.now) for group in groups for each in group.replicas.values()]
    return FleetResult(requests, [unit.result() for unit in simulated], replicas)


class Group:
    """Units that depend on each other: those that serve the same model, and those that share a CPU."""

    def __init__(
        self,
        units: Sequence[SimUnit],
        latency: LatencyModel,
        options: Options | None,
        rules: Rules,
        levels: Levels = DEFAULT_LEVELS,
    ) -> None:
        self._ranks = {level.name: level.rank for level in levels} | {"": levels[levels.default].rank}
        self._options = options or Options()
        self.clock = Clock(self._options.until)
        self.models = list(dict.fromkeys(model.name for unit in units for model in unit.models))
        self._pooling = frozenset(model.name for unit in units for model in unit.models if model.profile.pooling)
        self._latency = latency
        self._cpu: Compute | None = None
        self.replicas: dict[str, ReplicaSet] = {}
        # All of them, and one of each model.
        self.units: list[SimulatedUnit] = []
        self._first: dict[str, SimulatedUnit] = {}
        by_model: dict[str, list[SimulatedUnit]] = {}
        fallback = ReplicaRules(levels=levels)
        for spec in units:
            unit = self._start(spec)
            for model in spec.models:
                by_model.setdefault(model.name, []).append(unit)
        for name, mine in by_model.items():
            self._first[name] = mine[0]
            given = rules.get(name)
            if isinstance(given, RingRules):
                self.replicas[name] = Ring(name, mine, self.clock, given, self._start, latency)
            elif given is not None or len(mine) > 1:
                self.replicas[name] = Dispatched(name, mine, self.clock, given or fallback, self._start)

    def _start(self, spec: SimUnit) -> SimulatedUnit:
        compute = None
        if spec.device == CPU:
            # Each is a part of one machine.
            compute = self._cpu = self._cpu or Compute(spec.device, self._latency, shared=True)
        unit = SimulatedUnit(spec, self._latency, self._options, self.clock, compute)
        unit.scheduler.ranks = self._ranks
        self.units.append(unit)
        return unit

    def run(self, requests: Iterator[SimRequest]) -> None:
        """Play these requests, in order of arrival."""
        self.clock.run(requests, self._arrive, self._options.overheads.request)

    def _arrive(self, request: SimRequest, now: float) -> None:
        if request.model in self._pooling:
            request.output = 0
        first, replicas = self._first[request.model], self.replicas.get(request.model)
        if replicas is None or first.too_long(request):
            first.arrive(request, now)
        else:
            replicas.arrive(request, now)


def _requests(
    workload: Iterable[TraceRequest], priorities: PriorityOf | None, levels: Levels, tenants: TenantOf | None
) -> Iterator[SimRequest]:
    before = 0.0
    for number, each in enumerate(workload):
        if each.arrival < before:
            raise SimulationError(f"the workload's arrivals fall: {each.arrival} s after {before} s")
        before = each.arrival
        request = SimRequest.of(each, number)
        if priorities is not None:
            request.scheduling, request.execution = priorities(number)
            request.priority = -levels[request.scheduling].rank
        if tenants is not None:
            request.tenant = tenants(number)
        yield request


def coupled(units: Sequence[SimUnit]) -> list[list[SimUnit]]:
    """The units, divided into groups that know nothing of each other."""
    groups: list[tuple[set[object], list[SimUnit]]] = []
    for unit in units:
        keys: set[object] = {model.name for model in unit.models}
        if unit.device == CPU:
            keys.add(_CPU_KEY)
        mine = [unit]
        apart = []
        for other in groups:
            if other[0] & keys:
                keys |= other[0]
                mine = other[1] + mine
            else:
                apart.append(other)
        groups = [*apart, (keys, mine)]
    return [mine for _, mine in groups]


class _Progress:
    def __init__(self, progress: Callable[[int, int], None] | None, count: int, done: int) -> None:
        self._progress = progress
        self._count = count
        self._done = done

    def counted(self, requests: Sequence[SimRequest]) -> Iterator[SimRequest]:
        progress, done = self._progress, self._done
        for number, request in enumerate(requests):
            if progress is not None and number % _PROGRESS_EVERY == 0:
                progress(done + number, self._count)
            yield request
        self._done += len(requests)

    def end(self) -> None:
        if self._progress is not None:
            self._progress(self._count, self._count)
