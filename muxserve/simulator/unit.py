"""A unit: a machine, a scheduler, and, where memory decides which models are awake, the residency of its models."""

from __future__ import annotations

from muxserve.costs import LatencyModel
from muxserve.simulator.clock import Clock
from muxserve.simulator.compute import Compute
from muxserve.simulator.machine import UnitMachine
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.resident import ResidentModels
from muxserve.simulator.result import EngineUse, UnitResult
from muxserve.simulator.scheduler import EngineTypes, LeaseScheduler
from muxserve.simulator.setup import Options, SimUnit
from muxserve.simulator.stages import PipelineEngine


class SimulatedUnit:
    """Simulates one unit. Without a `clock` and `compute` it has its own.

    Raises:
        CostError: the latency model does not know a model or shape of the unit.
        ValueError: there is no such policy, or the residency is that of other models.
    """

    def __init__(
        self,
        spec: SimUnit,
        latency: LatencyModel,
        options: Options | None = None,
        clock: Clock | None = None,
        compute: Compute | None = None,
        engine_types: EngineTypes | None = None,
    ) -> None:
        self.spec = spec
        self.clock = clock or Clock()
        self.machine = UnitMachine(spec, latency, options or Options(), self.clock, compute)
        self.scheduler = LeaseScheduler(self.machine, engine_types or EngineTypes())
        residency = spec.residency
        self.residents = ResidentModels(self.machine, self.scheduler, residency) if residency is not None else None
        self._longest = {model.name: model.max_len or float("inf") for model in spec.models}

    def arrive(self, request: SimRequest, now: float) -> None:
        """A request comes to the unit."""
        self.machine.record.requests.append(request)
        request.unit = self.spec.name
        if self.too_long(request):
            longest = self._longest[request.model]
            self.machine.refuse(request, now, f"longer than the {longest:.0f} tokens of {request.model}")
        elif self.residents is None:
            self.scheduler.serve(request, now)
        else:
            self.residents.arrived(request, now)

    def too_long(self, request: SimRequest) -> bool:
        """Whether it is longer than its model can be asked for."""
        return request.prompt + request.output > self._longest[request.model]

    def end(self) -> None:
        """The unit goes: it has nothing to do any more."""
        self.machine.record.ended = self.clock.now

    def result(self) -> UnitResult:
        """What happened, once all requests have ended."""
        machine, record = self.machine, self.machine.record
        record.works(record.running, machine.clock.now)
        engines = self.scheduler.engines
        found = UnitResult(
            spec=self.spec,
            record=record,
            engines=[EngineUse(e.model.name, str(e.phase), e.jobs, e.tokens, e.busy_seconds) for e in engines],
            pool_pages={pool.profile.name: pool.profile.pages for pool in machine.pages.pools.values()},
            peak_pages=tuple(pages.peak for pages in machine.pages.models),
            turns=self.scheduler.turns,
            looks=sum(engine.looks for engine in engines),
            timelines=[machine.timeline] if machine.timeline is not None else [],
        )
        if self.residents is not None:
            found.residency = self.residents.result()
        for engine in engines:
            if isinstance(engine, PipelineEngine):
                found.micro_batches = engine.record
                found.engines[0].busy_seconds = found.busy_seconds
                found.timelines = engine.timelines() if machine.options.timeline else []
        return found
