"""Plans a fleet on a cluster: demands in, a placement with its estimates out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from muxserve.costs.latency import LatencyModel
from placement.candidates import SHARES, Candidates
from placement.cluster import Cluster, PlacedModel, PlacedUnit, Placement, ShapeName
from placement.demand import Demand, splits_evenly
from placement.engines import SHARED, Engines, ShareRules
from placement.estimator import Estimator, UnitEstimate
from placement.even import even
from placement.format import enumerate_words, format_size
from placement.greedy import GreedyLimits, greedy
from placement.improve import ImproveLimits, improve
from placement.layout import Layout, Unit
from placement.memory import MemoryRules
from placement.meshes import Machines
from placement.objective import Objective
from placement.values import Values

ModeName = Literal["muxserve", "spatial", "temporal", "one", "alone", "even"]
# Those that somebody may ask for; the others are candidates of a plan alone.
MODES: tuple[ModeName, ...] = ("muxserve", "spatial", "temporal")


class _Rules(NamedTuple):
    """What a mode does: jobs have all compute in `turns`, models `colocate`, and have engines of that `shape`."""

    turns: bool = False
    colocate: bool = True
    shape: ShapeName = "split"


_RULES: dict[ModeName, _Rules] = {
    "muxserve": _Rules(),
    "temporal": _Rules(turns=True),
    "spatial": _Rules(turns=True, colocate=False),
    "one": _Rules(turns=True, shape="one"),
    "alone": _Rules(turns=True, colocate=False, shape="one"),
    "even": _Rules(turns=True, shape="one"),
}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`mode`: `muxserve` colocates with SM shares, `spatial` gives every model meshes of its own, `temporal` colocates
    with all compute to one job at a time. `one` colocates models of one engine each, `alone`
    gives each of them meshes of its own, and `even` divides the devices among them evenly (`placement.even`).
    `sharing` is how engines have shares where they do not take turns. `improved` adds the local search."""

    objective: Objective = field(default_factory=Objective)
    mode: ModeName = "muxserve"
    improved: bool = True
    rules: MemoryRules = field(default_factory=MemoryRules)
    shares: tuple[float, ...] = SHARES
    sharing: ShareRules = SHARED
    greedy: GreedyLimits = field(default_factory=GreedyLimits)
    local: ImproveLimits = field(default_factory=ImproveLimits)


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """What the search for a placement came to. `value` is the objective's, `greedy_value` what the placement was worth
    before the local search; `evaluations` counts the units that were estimated."""

    value: float = 0.0
    greedy_value: float = 0.0
    evaluations: int = 0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A fleet on a cluster. `estimates` are those of `placement.units`, in their order; `missing` names models that no
    place was found for, with the reason."""

    demands: tuple[Demand, ...]
    placement: Placement
    estimates: tuple[UnitEstimate, ...]
    missing: Mapping[str, str]
    objective: Objective
    mode: ModeName
    search: SearchRecord = SearchRecord()

    @property
    def asked(self) -> float:
        """Requests per second that are asked of the fleet."""
        return sum(demand.rate for demand in self.demands)

    @property
    def throughput(self) -> float:
        """Requests per second that are served."""
        return sum(unit.throughput for unit in self.estimates)

    @property
    def weighted_throughput(self) -> float:
        """Throughput of the models averaged with their rates as weights: MuxServe's aggregated throughput."""
        by_model = [0.0] * len(self.demands)
        for unit in self.estimates:
            for model in unit.models:
                by_model[model.member.model] += model.throughput
        return sum(t * d.rate for t, d in zip(by_model, self.demands, strict=True)) / self.asked

    @property
    def attainment(self) -> float:
        """Part of all requests that meets its model's objectives."""
        met = sum(model.rate * model.level.attainment for unit in self.estimates for model in unit.models)
        return met / self.asked

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(len(unit.devices) for unit in self.placement.units)

    @property
    def meets(self) -> bool:
        """Every model is placed, meets its rate, and its objectives as often as the objective asks."""
        return not self.missing and all(
            model.meets_rate and model.level.attainment >= self.objective.attainment
            for unit in self.estimates
            for model in unit.models
        )


def plan_cluster(
    demands: Sequence[Demand],
    cluster: Cluster,
    latency: LatencyModel,
    memory: Mapping[str, int],
    options: PlanOptions | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str], None] = lambda _: None,
) -> ClusterPlan:
    """Place `demands` on `cluster`.

    Args:
        latency: costs of jobs.
        memory: bytes of each device type of the cluster.
        stop: ends the local search early when it is true.
        progress: told what is going on, in words.

    Raises:
        ValueError: no demands, or an empty cluster.
    """
    options = options or PlanOptions()
    if not demands or not cluster.devices:
        raise ValueError("a plan needs at least one model and one device")
    rules = _RULES[options.mode]
    machines = Machines(cluster)
    sharing = None if rules.turns else options.sharing
    engines = Engines(demands, latency, memory, options.rules, rules.shape, sharing)
    values = Values(Estimator(Candidates(engines, options.shares)), options.objective, colocate=rules.colocate)
    if options.mode == "even":
        first = final = even(values, machines)
    else:
        first = final = greedy(values, machines, options.greedy, progress)
        if options.improved:
            final = improve(first, options.local, stop, progress)
    return describe(values, final, options, first.value)


def describe(values: Values, layout: Layout, options: PlanOptions, greedy_value: float) -> ClusterPlan:
    """A layout with device numbers, estimates and notes."""
    units = sorted(layout.units.values(), key=lambda unit: (-unit.mesh.size, unit.mesh.device, unit.members))
    devices = layout.machines.assign([unit.mesh for unit in units])
    assert devices is not None, "layouts only have meshes that fit"
    demands = values.demands
    placed = [
        placed_unit(values, f"unit{index}", numbers, unit)
        for index, (unit, numbers) in enumerate(zip(units, devices, strict=True))
    ]
    missing = {demands[model].name: why_missing(values, layout.machines, model) for model in sorted(layout.missing)}
    plan = ClusterPlan(
        demands=demands,
        placement=Placement(layout.machines.cluster, tuple(unit for unit, _ in placed)),
        estimates=tuple(estimate for _, estimate in placed),
        missing=missing,
        objective=options.objective,
        mode=options.mode,
        search=SearchRecord(layout.value, greedy_value, values.evaluations),
    )
    return replace(plan, placement=replace(plan.placement, notes=notes_of(plan)))


def placed_unit(values: Values, name: str, devices: tuple[int, ...], unit: Unit) -> tuple[PlacedUnit, UnitEstimate]:
    """A unit on devices with these numbers, at the best shares, and its estimate.

    Raises:
        ValueError: its models do not fit.
    """
    estimate = values.estimate(unit.mesh, unit.members)
    shapes = values.estimator.engines.shapes
    models = tuple(
        PlacedModel(
            values.demands[m.member.model].name, m.rate, estimate.prefill_share, m.decode_share, shapes[m.member.model]
        )
        for m in estimate.models
    )
    return PlacedUnit(name, unit.mesh.device, devices, models, estimate.pool_bytes), estimate


def why_missing(values: Values, machines: Machines, model: int) -> str:
    """Why a model has no place, in words."""
    engines, demand = values.estimator.engines, values.demands[model]
    meshes = machines.kinds()
    if any(engines.fits(model, mesh) for mesh in meshes):
        if demand.least > 1:
            more = "give the fleet more devices, or fewer replicas"
            return f"there is no room for all of its {demand.least} replicas beside the others; {more}"
        return "all devices are taken; give the fleet more devices, or fewer or smaller models"
    if demand.name in engines.unknown:
        return engines.unknown[demand.name]
    ways = [mesh for mesh in meshes if splits_evenly(demand.architecture, mesh.size)]
    largest = max(ways, key=lambda mesh: mesh.size * engines.memory.get(mesh.device, 0), default=None)
    if largest is None:
        return f"its {demand.architecture.heads} heads cannot be split over any mesh of the cluster"
    footprint = engines.footprint(model, largest)
    need = format_size(int(footprint.own + footprint.sequence))
    have = format_size(engines.memory.get(largest.device, 0))
    more = "; a model is served by one machine" if len(machines.nodes[largest.device]) > 1 else ""
    return f"needs {need} on each of {largest.size} {largest.device}, of which {have} may be used{more}"


def limits_in_words(plan: ClusterPlan, estimate: UnitEstimate) -> str:
    """Why a unit serves what it serves: what limits it, or what would first."""
    short = [m for m in estimate.models if not m.meets_rate]
    names = {m.member: plan.demands[m.member.model].name for m in estimate.models}
    if short:
        by_limit: dict[str, list[str]] = {}
        for m in short:
            by_limit.setdefault(m.limit, []).append(f"{names[m.member]} {m.throughput / m.rate:.0%}")
        words = {
            "memory": "memory: the page pool is full",
            "compute": "SMs: prefill and decode use all compute",
            "sequences": "max_num_seqs: the batch is full",
            "batch": "vLLM's default batch is full; max_num_seqs sets another",
            "slo": "SLO: larger batches would miss the TPOT objective",
        }
        return "; ".join(f"{words[limit]} ({', '.join(who)} of the rate)" for limit, who in by_limit.items())
    late = [m for m in estimate.models if m.level.attainment < plan.objective.attainment]
    if late:
        parts = [f"{names[m.member]} {m.level.attainment:.0%}" for m in late]
        return f"SLO: objectives missed ({', '.join(parts)} met)"
    names_of = {
        "memory": "the page pool",
        "compute": "SMs",
        "sequences": "max_num_seqs",
        "batch": "vLLM's default batch",
        "slo": "the TPOT objective",
    }
    if not estimate.next_limit:
        return "meets its rates, with much to spare"
    return f"meets its rates, up to {estimate.headroom:.1f}x of them; then limited by {names_of[estimate.next_limit]}"


def notes_of(plan: ClusterPlan) -> tuple[str, ...]:
    """What was decided and what limits it."""
    notes = []
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        notes.append(f"{unit.name}: {limits_in_words(plan, estimate)}")
    idle: dict[str, int] = {}
    for node in plan.placement.cluster.nodes:
        idle[node.device] = idle.get(node.device, 0) + node.count
    for unit in plan.placement.units:
        idle[unit.device] -= len(unit.devices)
    left = [f"{count} {device}" for device, count in idle.items() if count]
    if left:
        why = ""
        if plan.meets:
            why = ": rates and objectives are met without them"
        else:
            why = ": no way was found to serve noticeably more with them"
        notes.append(f"{enumerate_words(left)} left idle{why}")
    for name, reason in plan.missing.items():
        notes.append(f"{name} is placed nowhere: {reason}")
    return tuple(notes)


__all__ = ["MODES", "ClusterPlan", "ModeName", "PlanOptions", "describe", "limits_in_words", "plan_cluster"]
