"""Models that have units to themselves, in a fleet of several arrangements: a ring whose prefill rolls over replicas,
and replicas that are pipelines. Each is played by the simulator of its arrangement, and told in the words of other
units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import msgspec

from muxserve.costs import EngineShape, LatencyModel, ModelArchitecture
from muxserve.costs.architecture import split_layers
from muxserve.metrics.records import RequestRecord
from muxserve.scheduling.token_throttling import TokenBudget
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.pipeline import Pipeline, PipelineResult, PipelineSpec
from muxserve.simulator.pipeline.costs import StageCosts
from muxserve.simulator.rolling import Rolling, RollingOptions, StuckError
from muxserve.simulator.setup import Options
from muxserve.simulator.timeline import Timeline
from muxserve.simulator.watch import Watch
from muxserve.simulator.world import EngineUse, SimulationError, UnitResult
from muxserve.workload.trace import TraceRequest

# Seconds that an output token is taken to need where requests are dealt out to replicas.
_TOKEN_SECONDS = 0.05
_POOL = "pool0"


@dataclass(frozen=True, slots=True)
class Replica:
    """A unit with one model: its name, and its devices, those of the first stage first."""

    name: str
    devices: tuple[int, ...]


@dataclass(slots=True)
class ApartResult(UnitResult):
    """A unit of one model that is not multiplexed.

    `waits` are, of a rolling one, the seconds that each answered request waited for the phase switch (from its first
    token to the begin of its first decode step). `stages` are, of a pipelined one, the seconds in which each worked,
    and `active` those in which something was in flight; `busy_seconds` is the mean of stages then. `timelines` are
    theirs.
    """

    phases: str = ""
    waits: list[float] = field(default_factory=list)
    stages: tuple[float, ...] = ()
    active: float = 0.0
    timelines: list[Timeline] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RollingModel:
    """A model whose prefill rolls over `replicas`, each an instance like `spec`. Requests of more than `max_len` tokens
    (prompt and output) are refused."""

    name: str
    replicas: tuple[Replica, ...]
    spec: InstanceSpec
    options: RollingOptions
    max_len: int

    @property
    def alone(self) -> tuple[ModelArchitecture, EngineShape, int]:
        """What `Alone` must know of it: the model, the devices of a replica with all of their compute, and the tokens
        that a step may have."""
        return self.spec.architecture, replace(self.spec.shape, share=1.0), self.spec.max_num_batched_tokens

    def play(
        self, requests: Sequence[TraceRequest], latency: LatencyModel, options: Options
    ) -> tuple[list[RequestRecord], list[ApartResult]]:
        """Simulate these requests of the model.

        Raises:
            SimulationError: some would wait forever.
            CostError: the latency model does not know the model on these devices.
        """
        spec = replace(self.spec, step_seconds=options.overheads.decode_step)
        simulated = Rolling(spec, latency, self.options)
        device = spec.shape.device
        watches = []
        for engine, unit in zip(simulated.engines.values(), self.replicas, strict=True):
            timeline = Timeline(unit.name, device, unit.devices) if options.timeline else None
            engine.watch = Watch(self.name, options.sample_seconds, timeline)
            watches.append(engine.watch)
        try:
            result = simulated.run(requests)
        except StuckError as error:
            raise SimulationError(f"{self.name}: {error}") from None
        records = result.records()
        seconds = _ended(records)
        units = []
        per_block = _pages(spec.architecture, spec.shape.tp, spec.architecture.layers)
        for engine, unit, watch in zip(simulated.engines.values(), self.replicas, watches, strict=True):
            watch.holds(seconds, 0)
            mine = [number for number, each in enumerate(result.requests) if each.engine == engine.name]
            units.append(
                ApartResult(
                    unit=unit.name,
                    device=device,
                    devices=len(unit.devices),
                    models=(self.name,),
                    seconds=seconds,
                    busy_seconds=engine.busy,
                    records=[records[number] for number in mine],
                    engines=[EngineUse(self.name, "both", engine.steps, watch.tokens, engine.busy)],
                    pool_pages={_POOL: spec.blocks * per_block},
                    pages=[(at, (blocks * per_block,)) for at, blocks in watch.samples],
                    peak_pages=(watch.peak * per_block,),
                    turns=0,
                    looks=engine.steps,
                    timeline=watch.timeline,
                    phases="rolling",
                    waits=[result.requests[n].switch_wait for n in mine if result.requests[n].finish is not None],
                )
            )
        return records, units


@dataclass(frozen=True, slots=True)
class PipelinedModel:
    """A model of which each of `replicas` is a pipeline, like the one of `specs` at its place. `budget` makes what
    decides on a step. `token_seconds` is for `dealt`. `max_len` as of `RollingModel`."""

    name: str
    replicas: tuple[Replica, ...]
    specs: tuple[PipelineSpec, ...]
    budget: Callable[[], TokenBudget]
    max_len: int
    max_num_batched_tokens: int = 2048
    token_seconds: float | None = None

    @property
    def alone(self) -> tuple[ModelArchitecture, EngineShape, int]:
        """As of `RollingModel`. A request alone is on one stage after the other, which together are the whole model on
        the devices of one."""
        spec = self.specs[0]
        return spec.architecture, replace(spec.shape, share=1.0), self.max_num_batched_tokens

    def play(
        self, requests: Sequence[TraceRequest], latency: LatencyModel, options: Options
    ) -> tuple[list[RequestRecord], list[ApartResult]]:
        """As of `RollingModel`. Requests are dealt out to the replicas beforehand (`dealt`)."""
        places = dealt(requests, len(self.replicas), self.token_seconds)
        records: list[RequestRecord | None] = [None] * len(requests)
        units = []
        for number, (unit, spec) in enumerate(zip(self.replicas, self.specs, strict=True)):
            mine = [place for place, replica in enumerate(places) if replica == number]
            made = self._unit(unit, spec, [requests[place] for place in mine], latency, options)
            for place, record in zip(mine, made.records, strict=True):
                records[place] = record
            units.append(made)
        return [record for record in records if record is not None], units

    def _unit(
        self,
        unit: Replica,
        spec: PipelineSpec,
        requests: Sequence[TraceRequest],
        latency: LatencyModel,
        options: Options,
    ) -> ApartResult:
        spec = replace(spec, step_seconds=options.overheads.decode_step)
        costs = StageCosts(latency, spec.architecture)
        watch = Watch(self.name, options.sample_seconds)
        result = Pipeline(spec, costs, self.budget(), watch).run(requests)
        records = result.records()
        seconds = _ended(records)
        watch.holds(seconds, 0)
        busy = result.busy()
        mean = sum(busy) / len(busy)
        # Every stage has as many blocks in use; the one with the most layers has most pages.
        layers = max(spec.layers or split_layers(spec.architecture.layers, spec.stages))
        per_block = _pages(spec.architecture, spec.shape.tp, layers)
        return ApartResult(
            unit=unit.name,
            device=spec.shape.device,
            devices=len(unit.devices),
            models=(self.name,),
            seconds=seconds,
            busy_seconds=mean,
            records=records,
            engines=[EngineUse(self.name, "both", len(result.steps), result.tokens, mean)],
            pool_pages={_POOL: spec.capacity // spec.block_tokens * per_block},
            pages=[(at, (blocks * per_block,)) for at, blocks in watch.samples],
            peak_pages=(watch.peak * per_block,),
            turns=0,
            looks=len(result.steps),
            phases="pipelined",
            stages=tuple(busy),
            active=result.active(),
            timelines=self._timelines(unit, spec, result) if options.timeline else [],
        )

    def _timelines(self, unit: Replica, spec: PipelineSpec, result: PipelineResult) -> list[Timeline]:
        """One of each stage, on devices of its own; where they share one, as processes on a CPU do, one of all."""
        tp = len(unit.devices) // spec.stages
        found: list[Timeline] = []
        for number in range(spec.stages):
            name = f"{self.name}, stage {number + 1},"
            if tp or not found:
                devices = unit.devices[number * tp :][:tp] or unit.devices
                found.append(Timeline(unit.name, spec.shape.device, devices))
            for step in result.steps_of(number):
                phase = "mixed" if step.prefill and step.decode else "prefill" if step.prefill else "decode"
                sequences, tokens = step.prompts + step.decode, step.prefill + step.decode
                found[-1].job(name, phase, step.began, step.ended, sequences, tokens)
        return found


Apart = RollingModel | PipelinedModel


def play_apart(
    model: Apart, requests: Sequence[TraceRequest], latency: LatencyModel, options: Options
) -> tuple[list[RequestRecord], list[ApartResult]]:
    """Simulate all requests of one model, with the delays of the control path around its engines; those that are too
    long for it are refused. Records are in the order of the requests.

    Raises:
        SimulationError, CostError: as `RollingModel.play`.
    """
    delays = options.overheads
    served = [request for request in requests if request.prompt_tokens + request.output_tokens <= model.max_len]
    shifted = served
    if delays.request:
        shifted = [msgspec.structs.replace(each, arrival=each.arrival + delays.request) for each in served]
    made, units = model.play(shifted, latency, options)
    records = iter(made)
    found = []
    for request in requests:
        if request.prompt_tokens + request.output_tokens > model.max_len:
            error = f"longer than the {model.max_len} tokens of {model.name}"
            found.append(RequestRecord(model.name, request.arrival, request.prompt_tokens, 0, error=error))
            continue
        record = next(records)
        record.arrival = request.arrival
        if record.first_token is not None:
            record.first_token += delays.token
        if record.finish is not None:
            record.finish += delays.token
        found.append(record)
    return found, units


def dealt(requests: Sequence[TraceRequest], replicas: int, token_seconds: float | None) -> list[int]:
    """The replica of each request: the one with the fewest tokens, as if a request were there for as long as its answer
    takes with `token_seconds` for each token (None: 50 ms). It is what dispatching by load would do, told beforehand.
    """
    each = token_seconds or _TOKEN_SECONDS
    there, count = [0] * replicas, [0] * replicas
    leaving: list[tuple[float, int, int]] = []
    found = []
    for request in requests:
        while leaving and leaving[0][0] <= request.arrival:
            _, number, tokens = heappop(leaving)
            there[number] -= tokens
        number = min(range(replicas), key=lambda n: (there[n], count[n]))
        tokens = request.prompt_tokens + request.output_tokens
        there[number] += tokens
        count[number] += 1
        heappush(leaving, (request.arrival + request.output_tokens * each, number, tokens))
        found.append(number)
    return found


def _pages(architecture: ModelArchitecture, tp: int, layers: int) -> int:
    """Pages of one block on each device."""
    return layers * max(1, architecture.kv_heads // tp)


def _ended(records: Sequence[RequestRecord]) -> float:
    last = max((record.finish for record in records if record.finish is not None), default=0.0)
    return max(last, records[-1].arrival if records else 0.0)
