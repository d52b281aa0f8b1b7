"""One engine of both phases per replica, its layers over several stages with micro-batches in flight (gLLM)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from muxserve.config import AUTO, Fleet, Model, Problem
from muxserve.costs.architecture import split_layers
from muxserve.costs.latency import EngineShape
from muxserve.planning.arrangements.base import (
    Arrangement,
    GpuDevices,
    NoPlaceError,
    ReplicaLayout,
    SimulatedLayout,
    Wanted,
    block_tokens,
    one_engine,
    token_bytes,
)
from muxserve.scheduling.token_throttling import FixedBudget, Throttle, TokenBudget, TokenThrottling
from muxserve.simulator import Pipeline, UnitResult
from muxserve.simulator.stages import kv_blocks
from muxserve.spec import BatchingName
from placement.cluster import PlacedUnit
from placement.format import enumerate_words
from placement.memory import activation_bytes

# On CPU when the fleet file leaves it open.
CPU_STAGES = 2


class PipelinedArrangement(Arrangement):
    """See the module."""

    name = "pipelined"

    def declare(self, model: Model, stages: int) -> Model:
        """See `Arrangement`."""
        return model.model_copy(update={"phases": self.name, "stages": stages})

    def batching(self, model: Model) -> BatchingName:
        """See `Arrangement`."""
        return model.batching

    def stages(self, fleet: Fleet, model: Model, layers: int, gpus: int) -> tuple[int, Problem | None]:
        """See `Arrangement`."""
        if model.stages == AUTO:
            return gpus or min(CPU_STAGES, layers), None
        if gpus and gpus % model.stages:
            message = f"{model.stages} stages do not divide the {gpus} GPUs of a unit evenly"
            hint = "those of a stage split its tensors; give a divisor, or another number of GPUs"
            return model.stages, fleet.model_problem(model.name, "stages", f"{message} ({hint})")
        return model.stages, None

    def check_pool(self, wanted: Wanted, most: int, devices: int | None, one: str) -> None:
        """See `Arrangement`."""
        stages = wanted.stages or CPU_STAGES
        if devices is not None and devices < stages:
            raise NoPlaceError(f"a pipeline of {stages} stages needs as many GPUs, and there is one")
        if devices is None and stages > wanted.demand.architecture.layers:
            raise NoPlaceError(_too_many(wanted, stages))

    def cpu_stages(self, wanted: Wanted) -> int:
        """See `Arrangement`."""
        return wanted.stages or CPU_STAGES

    def allows(self, layout: ReplicaLayout, wanted: Wanted) -> bool:
        """See `Arrangement`."""
        if wanted.replicas not in (None, layout.replicas) or layout.stages > wanted.demand.architecture.layers:
            return False
        # One stage is a pipeline if somebody wants it: steps are throttled there, too.
        return layout.stages >= 2 if wanted.stages is None else layout.stages == wanted.stages

    def no_layout(self, wanted: Wanted, pool: str) -> str:
        """See `Arrangement`."""
        stages = wanted.stages or 2
        if stages > wanted.demand.architecture.layers:
            return _too_many(wanted, stages)
        asked = "" if wanted.replicas is None else f"{wanted.replicas} replicas of "
        return f"{pool} cannot be divided into {asked}{stages} or more stages"

    def on_gpus(self, pool: GpuDevices, wanted: Wanted, layout: ReplicaLayout) -> SimulatedLayout:
        """See `Arrangement`."""
        demand, tp, stages, rules = wanted.demand, layout.tp, layout.stages, one_engine(pool.rules)
        tokens = block_tokens(demand)
        engine = activation_bytes(demand, tp) + rules.graph_bytes + rules.processes * rules.context_bytes
        free = [float(tp * (pool.usable - engine))] * stages
        try:
            blocks = kv_blocks(demand.architecture, demand.dtype, stages, free, tokens)
        except ValueError as error:
            raise NoPlaceError(str(error)) from None
        # Devices beyond the KV heads hold copies.
        blocks = tuple(int(count / max(1.0, tp / demand.architecture.kv_heads)) for count in blocks)
        pool.check_room(wanted, min(blocks) * tokens, layout)
        crossing = pool.crossing(layout)
        layers = demand.architecture.layers
        part = max(split_layers(layers, stages))
        kv_bytes = int(min(blocks) * tokens * token_bytes(demand, tp) * part / layers)
        return SimulatedLayout(
            layout,
            EngineShape(pool.kind, tp, 1.0, demand.dtype, demand.graphs),
            tokens,
            blocks,
            kv_bytes,
            pool.usable - kv_bytes,
            tuple(pool.link(tp, crosses) for crosses in crossing),
        )

    def pipeline(self, wanted: Wanted, place: SimulatedLayout) -> Pipeline | None:
        """See `Arrangement`. The steps of an engine of one stage are vLLM's own, unless they are throttled."""
        if len(place.blocks) == 1 and wanted.throttle is None:
            return None
        budgets = _Budgets(wanted.demand.max_num_batched_tokens, wanted.throttle)
        return Pipeline(split_layers(wanted.demand.architecture.layers, len(place.blocks)), place.links, budgets)

    def unit_words(self, unit: PlacedUnit) -> str:
        """See `Arrangement`."""
        return f"{self.name}, {unit.stages} stages" if unit.stages > 1 else "one engine for both"

    def plan_keys(self, unit: PlacedUnit) -> dict[str, object]:
        """See `Arrangement`."""
        return {"phases": self.name, "stages": unit.stages}

    def report(self, unit: UnitResult) -> dict[str, object]:
        """See `Arrangement`."""
        stages = zip(unit.stages, _bubbles(unit), strict=True)
        return {"stages": [{"busy_seconds": busy, "bubbles": part} for busy, part in stages]}

    def report_words(self, model: str, units: Sequence[UnitResult]) -> str:
        """See `Arrangement`."""
        parts = [f"{statistics.fmean(each):.0%}" for each in zip(*map(_bubbles, units), strict=True)]
        replicas = f"{len(units)} replica{'s' if len(units) > 1 else ''}"
        if len(parts) <= 1:
            return f"{model} has {replicas} with one engine for both phases"
        return f"{model} is pipelined, {replicas} of {len(parts)} stages with {enumerate_words(parts)} bubbles"


@dataclass(frozen=True, slots=True)
class _Budgets:
    """Makes the budget of an engine: throttled, or of so many tokens. Those that make the same are equal, and so are
    the pipelines that have them."""

    tokens: int
    throttle: Throttle | None

    def __call__(self) -> TokenBudget:
        return FixedBudget(self.tokens) if self.throttle is None else TokenThrottling(self.throttle)


def _too_many(wanted: Wanted, stages: int) -> str:
    return f"{wanted.demand.architecture.layers} layers cannot be spread over {stages} stages"


def _bubbles(unit: UnitResult) -> list[float]:
    """Of each stage, the part of the time with something in flight in which it does nothing."""
    return [1.0 - busy / unit.active if unit.active else 0.0 for busy in unit.stages]
