"""How many GPUs a fleet needs if its models may sleep.

One workload is simulated for each number of GPUs twice: with all models awake, as planned; and as `muxserve deploy`
serves it with `memory:`, where each model sleeps or is awake in its own unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from muxserve.config import Fleet, MemorySection
from muxserve.costs.devices import device
from muxserve.costs.latency import LatencyModel
from muxserve.costs.measured import overheads_on
from muxserve.gpu.budget import at_rest, pool_beside, resting_room
from muxserve.gpu.unit import LEAST_POOL_PART
from muxserve.metrics.definitions import Objectives
from muxserve.metrics.summary import Summary, summarise
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.planning.candidates.resident_units import TPOT_SECONDS, TTFT_SECONDS, NoUnitError, resident_units
from muxserve.planning.demand.demands import batch_of, default_batch, memory_of
from muxserve.planning.demand.private import with_shapes
from muxserve.planning.place.prediction import Simulated, simulated_of
from muxserve.planning.place.simulations import Simulations
from muxserve.planning.specs.gpus import (
    ALL_SMS,
    copier_bytes,
    part_of_gpu,
    resident_policy,
    resting_bytes,
    unplanned_shares,
)
from muxserve.planning.specs.residency import gpu_residency, gpu_wake_costs
from muxserve.scheduling.residency_types import KvRules
from muxserve.simulator import FleetResult, Options, ResidencyResult, mode_of, simulate
from muxserve.spec import ResidencySpec, RestingSpec
from muxserve.workload.trace import TraceRequest
from placement.cluster import Cluster, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from placement.memory import model_bytes

# Cores of the machine that has the GPUs.
_CORES = 16

# How far it is: which way, requests done, and all of them.
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the workload on some GPUs. Requests of models `without_place` count as not within their objectives.
    `residency` adds up all units, where models sleep."""

    summary: Summary
    without_place: tuple[str, ...] = ()
    residency: ResidencyResult | None = None

    @property
    def within(self) -> float:
        """The part of all requests within their objectives."""
        return self.summary.overall.slo["all"]


@dataclass(frozen=True, slots=True)
class SleepingPoint:
    """One number of GPUs. `asleep`, with `memory:`, is None if models that sleep cannot be served there, for the reason
    `why_not`."""

    gpus: int
    awake: Outcome
    asleep: Outcome | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class SleepingForecast:
    """The workload, called `about`, on several numbers of GPUs; `attainment` is the part of all requests that is to be
    within their objectives."""

    about: str
    attainment: float
    points: tuple[SleepingPoint, ...]

    @property
    def awake_gpus(self) -> int | None:
        """The fewest that are enough with all models awake."""
        return self._fewest(lambda point: point.awake)

    @property
    def asleep_gpus(self) -> int | None:
        """The fewest that are enough with models that sleep."""
        return self._fewest(lambda point: point.asleep)

    def _fewest(self, of: Callable[[SleepingPoint], Outcome | None]) -> int | None:
        outcomes = ((point.gpus, of(point)) for point in self.points)
        enough = (n for n, o in outcomes if o is not None and not o.without_place and o.within >= self.attainment)
        return min(enough, default=None)


def objectives_of(demands: Sequence[Demand]) -> dict[str, Objectives]:
    """What requests are held to. A model without objectives has a first token within `TTFT_SECONDS`, for which it is
    woken."""
    return {
        each.name: Objectives(TTFT_SECONDS if each.slo_ttft is each.slo_tpot is None else each.slo_ttft, each.slo_tpot)
        for each in demands
    }


def all_awake(
    planned: Simulated,
    demands: Sequence[Demand],
    requests: Sequence[TraceRequest],
    simulations: Simulations,
    tell: Tell,
) -> Outcome:
    """The workload on a plan.

    Raises:
        SimulationError, CostError: as `simulate`.
    """
    how = mode_of("muxserve")
    units, rules = planned.units(how), planned.rules_of(how)
    placed = {model.name for unit in units for model in unit.models}
    records = simulations.records(units, requests, rules, lambda done, total: tell("all awake", done, total))
    summary = summarise(records, objectives=objectives_of(demands))
    return Outcome(summary, tuple(each.name for each in demands if each.name not in placed))


def as_deployed(fleet: Fleet, demands: Sequence[Demand], cluster: Cluster, around: Surroundings) -> Simulated:
    """The units that `muxserve deploy` would make of the fleet, with `memory:`, on such GPUs.

    Raises:
        NoUnitError: it would make none, for the reason that is said.
    """
    if len(cluster.nodes) > 1:
        raise NoUnitError("memory decides over models of one machine")
    for model in fleet.models:
        if model.replicas.max > 1 or model.has_own_unit:
            raise NoUnitError(f"{model.name} has replicas or engines that memory does not decide over")
    (node,) = cluster.nodes
    memory = fleet.memory or MemorySection()
    fleet = fleet.model_copy(update={"memory": memory})
    demands = _demands(fleet, demands, cluster)
    whole, rules = device(node.device).memory_bytes, around.rules
    if isinstance(memory.limit, int):
        try:
            rules = replace(rules, utilisation=part_of_gpu(memory.limit, whole))
        except ValueError as error:
            raise NoUnitError(f"memory.limit: {error}") from None
    asked = resting_bytes(memory)
    rules = replace(rules, reserve_bytes=rules.reserve_bytes + copier_bytes(memory, rules) + (asked or 0))
    usable, size = int(rules.utilisation * whole), fleet.kv_pool.size
    least = size if isinstance(size, int) else int(LEAST_POOL_PART * usable)
    always = frozenset(model.name for model in fleet.models if model.keep == "always")
    by_name = {demand.name: demand for demand in demands}
    units: list[PlacedUnit] = []
    specs: dict[str, ResidencySpec] = {}
    first = 0
    for number, unit in enumerate(resident_units(demands, always, node.count, whole, rules, least)):
        name = f"u{number}"
        part = fleet.with_models([fleet.model(model) for model in unit.models])
        placed, policy = _placed(part, [by_name[model] for model in unit.models])
        sleepers = [by_name[model] for model in unit.models if model not in always]
        taken = {each.name: model_bytes(each, unit.gpus, rules.of(each)) for each in sleepers}
        fixed = rules.reserve_bytes + unit.awake
        engines = [rules.of(each).resting_bytes(each) for each in sleepers]
        room = asked if asked is not None else resting_room(taken.values(), engines, usable - fixed - least, whole)
        fixed += room if asked is None else 0
        models = {
            each.name: gpu_wake_costs(
                taken[each.name],
                each.architecture.weight_bytes(each.dtype) // unit.gpus,
                node.device,
                TTFT_SECONDS if each.slo_ttft is None else each.slo_ttft,
                TPOT_SECONDS if each.slo_tpot is None else each.slo_tpot,
            )
            for each in sleepers
        }
        sleeping = [each.bytes for each in models.values()]
        pool = least if isinstance(size, int) or not sleeping else pool_beside(usable - fixed, sleeping, least)
        units.append(PlacedUnit(name, node.device, tuple(range(first, first + unit.gpus)), placed, pool, policy=policy))
        first += unit.gpus
        rest = at_rest(engines, RestingSpec(room, len(engines)))
        specs[name] = gpu_residency(memory, models, usable, fixed, KvRules.of(pool), _CORES, rest)
    made = simulated_of(Placement(cluster, tuple(units)), fleet, demands, around)
    return replace(made, residency=specs, origin="units in which memory decides who is awake, as deployed")


def _demands(fleet: Fleet, demands: Sequence[Demand], cluster: Cluster) -> list[Demand]:
    """The demands with the engines and the steps that models have where memory decides."""
    default = default_batch(fleet, memory_of(cluster).items())
    batches = [batch_of(fleet.model(each.name), default) for each in demands]
    sized = [
        replace(each, max_num_seqs=batch.seqs, max_num_batched_tokens=batch.tokens)
        for each, batch in zip(demands, batches, strict=True)
    ]
    return with_shapes(fleet, sized)


def _placed(fleet: Fleet, demands: Sequence[Demand]) -> tuple[tuple[PlacedModel, ...], str]:
    """The models of a unit, `fleet`, with the shares of SMs that they have where nobody plans them, and its policy."""
    one_engine = [each.name for each in demands if each.shape == "one"]
    if len(one_engine) == len(demands) == 1:
        return (PlacedModel(one_engine[0], demands[0].rate, ALL_SMS.prefill, ALL_SMS.decode, "one"),), "free"
    policy = resident_policy(fleet, one_engine)
    shares = unplanned_shares(fleet.with_policy(policy), one_engine)
    placed = tuple(
        PlacedModel(each.name, each.rate, shares[each.name].prefill, shares[each.name].decode, each.shape or "split")
        for each in demands
    )
    return placed, policy


def live_residency(
    made: Simulated,
    demands: Sequence[Demand],
    requests: Sequence[TraceRequest],
    latency: LatencyModel,
    tell: Tell,
) -> Outcome:
    """The workload on what `as_deployed` has made.

    Raises:
        SimulationError, CostError: as `simulate`.
    """
    units = made.units(mode_of("muxserve"))
    options = Options(overheads_on(latency, units[0].device), sample_seconds=0.0)
    result = simulate(units, requests, latency, options, progress=partial(tell, "with memory"))
    return _outcome(result, demands)


def _outcome(result: FleetResult, demands: Sequence[Demand]) -> Outcome:
    """What came of it, with the residency of all units."""
    found = [unit.residency for unit in result.units if unit.residency is not None]
    whole = ResidencyResult(
        wakes=sum(each.wakes for each in found),
        sleeps=sum(each.sleeps for each in found),
        waited=sum(each.waited for each in found),
        peak_bytes=max((each.peak_bytes for each in found), default=0),
        switches=sum(each.switches for each in found),
    )
    return Outcome(summarise(result.records, objectives=objectives_of(demands)), residency=whole)
