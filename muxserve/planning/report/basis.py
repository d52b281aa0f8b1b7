"""What the figures of a plan rest on: which costs each model has, how far such costs were off where others measured,
and what each model's steps wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from muxserve.costs.latency import EngineShape, LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.sources import CostsUsed, source_of
from muxserve.planning.candidates.device_pool import CPU
from muxserve.planning.report.sureness import Sureness
from placement.cluster import PlacedUnit, Placement
from placement.demand import Demand
from placement.planner import ClusterPlan

KV_ROOM = "KV room"
_WORDS = ("compute", "memory bandwidth", "communication", "the host")
# So much of a pool in use on average leaves too few pages when many requests come.
_FULL = 0.9


@dataclass(frozen=True, slots=True)
class Basis:
    """`bottlenecks` has what a model waits for most, by unit and model."""

    costs: CostsUsed
    bottlenecks: Mapping[tuple[str, str], str]
    sureness: Sureness | None = None

    @property
    def waiting(self) -> dict[str, list[str]]:
        """The models that wait for each of the bottlenecks."""
        found: dict[str, list[str]] = {}
        for (_, model), what in self.bottlenecks.items():
            names = found.setdefault(what, [])
            if model not in names:
                names.append(model)
        return found


def costs_used(latency: LatencyModel, demands: Sequence[Demand], placement: Placement) -> CostsUsed:
    """The sources of the costs of all models that have a place."""
    by_name = {demand.name: demand for demand in demands}
    found = {}
    for unit in placement.units:
        for placed in unit.models:
            demand = by_name[placed.model]
            shape = _shape(unit, demand)
            found[demand.name, unit.device] = source_of(latency, demand.architecture, shape)
    return CostsUsed(tuple((name, device, source) for (name, device), source in found.items()))


def bottlenecks(plan: ClusterPlan) -> dict[tuple[str, str], str]:
    """What each model waits for most, by unit and model: room for KV where the pool is full, else what most of the time
    of its requests goes to by the roofline."""
    found = {}
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        full = estimate.kv_bytes >= _FULL * estimate.pool_bytes
        for model in estimate.models:
            demand = plan.demands[model.member.model]
            shape = _shape(unit, demand)
            lacks_pages = model.limit == "memory" and (full or not model.meets_rate)
            slowest = _slowest(demand, shape, model.batch, (estimate.prefill_share, model.decode_share))
            found[unit.name, demand.name] = KV_ROOM if lacks_pages else slowest
    return found


def _slowest(demand: Demand, shape: EngineShape, batch: float, shares: tuple[float, float]) -> str:
    """What most of the time of a request goes to: its prompt, and its part of decode steps of that batch."""
    prefill, decode = (Roofline().engine(demand.architecture, replace(shape, share=share)) for share in shares)
    tokens, sequences = demand.prompt_tokens, max(1, round(batch))
    prompt = prefill.prefill_parts(tokens, tokens * (tokens + 1) // 2, 1)
    step = decode.decode_parts(sequences, sequences * demand.sequence_tokens)
    request = [once + demand.decode_steps * each / sequences for once, each in zip(prompt, step, strict=True)]
    return _WORDS[request.index(max(request))]


def _shape(unit: PlacedUnit, demand: Demand) -> EngineShape:
    """A whole engine of a model in a unit, or a stage of one."""
    tp = 1 if unit.device == CPU else len(unit.devices) // unit.stages
    return EngineShape(unit.device, tp, 1.0, demand.dtype, demand.graphs, ahead=demand.ahead and tp == 1)
