"""Rolling and pipelined models in a plan: each has devices to itself, and the other models share what is left.

`divide_gpus` and `divide_cpu` compare the arrangements of models that leave theirs open, and give devices to every
model whose replicas are dedicated units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from muxserve.config import Fleet
from muxserve.costs.devices import device
from muxserve.costs.latency import LatencyModel
from muxserve.planning.arrangements import ARRANGEMENTS, arrangement, is_open, may_be_dedicated
from muxserve.planning.arrangements.base import DevicePool, NoPlaceError, ReplicaLayout, SimulatedLayout, wanted_of
from muxserve.planning.comparison import ArrangementFigures, Comparison, Tell, compare, places_of, silent
from muxserve.planning.device_pool import CpuPool, GpuPool
from muxserve.planning.prediction import Surroundings
from muxserve.spec import PhasesName
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand, Member, Mesh
from placement.estimator import ModelEstimate, UnitEstimate
from placement.objective import Objective
from placement.planner import ClusterPlan, notes_of

# Devices of each replica of that layout on the pool of that model, or None: they are not there (any more).
Take = Callable[[DevicePool, ReplicaLayout], tuple[tuple[int, ...], ...] | None]


@dataclass(frozen=True, slots=True)
class DedicatedModel:
    """A model with devices to itself: `devices` has those of each replica. Its figures are of the simulation that its
    arrangement was compared in. `share` is of the compute of each device."""

    demand: Demand
    place: SimulatedLayout
    figures: ArrangementFigures
    devices: tuple[tuple[int, ...], ...]
    share: float = 1.0


@dataclass(slots=True)
class ArrangedFleet:
    """What became of the models: those that are `arranged` in their own way have devices to themselves, `shared` ones
    are planned together, `missing` ones cannot be served as the file says (and why). `comparisons` are of those that
    leave it open, or were asked for. `notes` are for the user; `impossible` are the demands of what is missing."""

    arranged: list[DedicatedModel] = field(default_factory=list)
    shared: list[Demand] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    impossible: list[Demand] = field(default_factory=list)

    @property
    def phases(self) -> Mapping[str, PhasesName]:
        """The arrangement of every model that has devices to itself."""
        return {each.demand.name: each.place.layout.phases for each in self.arranged}


def concerns(fleet: Fleet, asked: Sequence[str] = ()) -> bool:
    """Whether there is a model that is not simply multiplexed, or to be compared."""
    return bool(asked) or any(map(may_be_dedicated, fleet.models))


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """How arrangements are compared: with which costs and seed. `asked` are models to be compared although the file
    says how they are arranged; that stays. Without `goodputs` that of what is not compared with anything is not looked
    for; see `compare`. `tell` is told how far it is."""

    latency: LatencyModel
    asked: Sequence[str] = ()
    goodputs: bool = True
    seed: int = 0
    tell: Tell = silent


def arrange(
    fleet: Fleet,
    demands: Sequence[Demand],
    pool_of: Callable[[str], DevicePool],
    take: Take,
    options: TrialOptions,
    free: bool = True,
) -> ArrangedFleet:
    """Compare what is open, and give every model that is rolling or pipelined devices to itself.

    Args:
        demands: of the fleet's models, in their order.
        pool_of: the devices that the model of a name is compared on.
        take: takes devices away.
        free: see `choose_phases`.
    """
    found = ArrangedFleet()
    open_models = [model.name for model in fleet.models if may_be_dedicated(model) or model.name in options.asked]
    for model, demand in zip(fleet.models, demands, strict=True):
        if model.name not in open_models:
            found.shared.append(demand)
            continue
        number = open_models.index(model.name)

        def told(part: float, text: str, number: int = number) -> None:
            options.tell((number + part) / len(open_models), text)

        wanted, pool = wanted_of(model, demand, free), pool_of(model.name)
        whole = is_open(model) or model.name in options.asked
        only = ARRANGEMENTS if model.phases == "auto" or whole else (model.phases,)
        comparison = compare(wanted, pool, options.latency, options.seed, told, only, options.goodputs or whole)
        if whole:
            found.comparisons.append(comparison)
        phases = comparison.recommended if model.phases == "auto" else model.phases
        what = comparison.of(phases)
        if not arrangement(phases).dedicated:
            found.shared.append(demand)
            continue
        if what.figures is None:
            found.missing[model.name] = what.why_not
            found.impossible.append(demand)
            continue
        layout = what.figures.layout
        devices = take(pool, layout)
        if devices is not None:
            place = pool.place(wanted, layout)
            found.arranged.append(DedicatedModel(demand, place, what.figures, devices))
        elif is_open(model):
            found.notes.append(f"{model.name} shares devices with others: {_taken(phases, layout, pool)}")
            found.shared.append(demand)
        else:
            found.missing[model.name] = _taken(phases, layout, pool)
            found.impossible.append(demand)
    return found


def _taken(phases: PhasesName, layout: ReplicaLayout, pool: DevicePool) -> str:
    return (
        f"{phases} needs {layout.devices} {pool.kind} for it alone ({layout.words}), which the other models do not "
        "leave"
    )


# ---------------------------------------------------------------- devices of a plan


class FreeDevices:
    """Devices of a cluster that are still free, while some are taken."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._free: list[list[int]] = []
        number = 0
        for node in cluster.nodes:
            self._free.append(list(range(number, number + node.count)))
            number += node.count

    def take(self, kind: str, layout: ReplicaLayout) -> tuple[tuple[int, ...], ...] | None:
        """Devices of type `kind` for each replica of a layout: those of one within a machine if that has them, the
        stages of a longer pipeline over several. None, and nothing taken, if they are not there."""
        free = [list(numbers) for numbers in self._free]
        mine = [number for number, node in enumerate(self.cluster.nodes) if node.device == kind]
        taken = []
        for _ in range(layout.replicas):
            devices = _replica([free[number] for number in mine], layout)
            if devices is None:
                return None
            taken.append(devices)
        self._free = free
        return tuple(taken)

    def rest(self) -> tuple[Cluster, list[int]]:
        """What is free as a cluster, and the number in this one of each of its devices."""
        nodes = [(node, numbers) for node, numbers in zip(self.cluster.nodes, self._free, strict=True) if numbers]
        cluster = Cluster(tuple(Node(node.device, len(numbers)) for node, numbers in nodes))
        return cluster, [number for _, numbers in nodes for number in numbers]


def _replica(nodes: Sequence[list[int]], layout: ReplicaLayout) -> tuple[int, ...] | None:
    size = layout.stages * layout.tp
    fitting = [numbers for numbers in nodes if len(numbers) >= size]
    if fitting:
        return _pop(min(fitting, key=len), size)
    devices: list[int] = []
    for numbers in sorted(nodes, key=len, reverse=True):
        while len(numbers) >= layout.tp and len(devices) < size:
            devices += _pop(numbers, layout.tp)
    return tuple(devices) if len(devices) == size else None


def _pop(numbers: list[int], count: int) -> tuple[int, ...]:
    taken = tuple(numbers[:count])
    del numbers[:count]
    return taken


def part_of(plan: ClusterPlan, name: str) -> tuple[str, tuple[int, ...]]:
    """The devices that a model would have to itself: their type, and how many on each machine. Alone it has all of the
    type of which there is most; of units that it shares it has the part that its tokens per second times its weights
    are of all, at least one device."""
    cluster = plan.placement.cluster
    by_kind: dict[str, float] = {}
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        work = {plan.demands[m.member.model].name: _work(plan.demands[m.member.model], m.rate) for m in estimate.models}
        if name in work:
            part = len(unit.devices) * work[name] / sum(work.values())
            by_kind[unit.device] = by_kind.get(unit.device, 0.0) + part
    kinds: dict[str, int] = {}
    for node in cluster.nodes:
        kinds[node.device] = kinds.get(node.device, 0) + node.count
    if len(plan.demands) == 1 or not by_kind:
        kind = max(kinds, key=lambda each: kinds[each])
        count = kinds[kind]
    else:
        kind = max(by_kind, key=lambda each: by_kind[each])
        count = max(1, round(by_kind[kind]))
    return kind, nodes_of(cluster, kind, count)


def nodes_of(cluster: Cluster, kind: str, count: int) -> tuple[int, ...]:
    """How many of `count` devices of a type are on each machine, if they are taken from the largest first."""
    nodes = []
    for size in sorted((node.count for node in cluster.nodes if node.device == kind), reverse=True):
        if count > 0:
            nodes.append(min(size, count))
            count -= nodes[-1]
    return tuple(nodes)


def _work(demand: Demand, rate: float) -> float:
    a = demand.architecture
    active = a.parameters if a.experts <= 1 else a.parameters * a.active_experts / a.experts
    return rate * demand.sequence_tokens * active


def joined(
    rest: ClusterPlan, cluster: Cluster, numbers: Sequence[int], arranged: Sequence[DedicatedModel]
) -> ClusterPlan:
    """The plan of the models that share devices, and those that have some to themselves.

    Args:
        cluster: all devices.
        numbers: the number in `cluster` of each device that `rest` was planned on.
    """
    units = [replace(unit, devices=tuple(numbers[n] for n in unit.devices)) for unit in rest.placement.units]
    estimates, demands = list(rest.estimates), list(rest.demands)
    for each in arranged:
        member = Member(len(demands), each.place.layout.replicas)
        demands.append(each.demand)
        for devices in each.devices:
            units.append(_unit(f"unit{len(units)}", each, devices))
            estimates.append(_estimate(each, member))
    return replace(rest, demands=tuple(demands), placement=Placement(cluster, tuple(units)), estimates=tuple(estimates))


def _unit(name: str, each: DedicatedModel, devices: tuple[int, ...]) -> PlacedUnit:
    layout = each.place.layout
    rate = each.demand.rate / layout.replicas
    return PlacedUnit(
        name,
        each.place.shape.device,
        devices,
        (PlacedModel(each.demand.name, rate, each.share, each.share),),
        each.place.kv_bytes,
        layout.phases,
        layout.stages,
    )


def _estimate(each: DedicatedModel, member: Member) -> UnitEstimate:
    """What the simulation says of one replica, in the words of an estimate."""
    demand, figures, layout = each.demand, each.figures, each.place.layout
    rate = demand.rate / member.replicas
    token = demand.architecture.kv_bytes_per_token(demand.dtype) / (layout.stages * layout.tp)
    used = min(float(each.place.kv_bytes), figures.running / member.replicas * demand.sequence_tokens * token)
    model = ModelEstimate(
        member=member,
        rate=rate,
        throughput=figures.served / member.replicas,
        batch=figures.running / member.replicas,
        ttft=figures.ttft.mean if figures.ttft else math.inf,
        tpot=figures.tpot.mean if figures.tpot else None,
        attainment=figures.attainment,
        decode_share=each.share,
        limit="slo",
        own_bytes=each.place.own_bytes,
        kv_bytes=used,
    )
    return UnitEstimate(
        mesh=Mesh(each.place.shape.device, layout.stages * layout.tp),
        prefill_share=each.share,
        models=(model,),
        pool_bytes=each.place.kv_bytes,
        kv_bytes=used,
        prefill_load=0.0,
        decode_load=0.0,
        progress=1.0,
        headroom=figures.goodput / demand.rate,
        next_limit="goodput" if figures.goodput >= demand.rate else "",
    )


# ---------------------------------------------------------------- division


@dataclass(frozen=True, slots=True)
class Divided:
    """A cluster whose devices are divided: `left` is what the models of `arrangements.shared` are to be planned on, and
    `numbers` the number in `cluster` of each of its devices."""

    cluster: Cluster
    arrangements: ArrangedFleet
    left: Cluster
    numbers: list[int]

    def crowds_out(self, fleet: Fleet, before: ClusterPlan, rest: ClusterPlan | None) -> bool:
        """Whether models that were free to share have taken the place of others, which had one in `before`."""
        chosen = [each for each in self.arrangements.arranged if is_open(fleet.model(each.demand.name))]
        if len(chosen) < len(self.arrangements.arranged) or self.arrangements.missing:
            return False
        missing = rest.missing if rest else {demand.name: "" for demand in self.arrangements.shared}
        return bool(set(missing) - set(before.missing))

    @property
    def has_dedicated(self) -> bool:
        """Whether some model is not to be planned with the others."""
        return bool(self.arrangements.arranged or self.arrangements.missing)

    def joined(self, rest: ClusterPlan | None, objective: Objective) -> ClusterPlan:
        """The whole plan. `rest` is that of the shared models; None where there are none, or no devices for them."""
        found = self.arrangements
        rest = rest or ClusterPlan((), Placement(self.left, ()), (), {}, objective, "muxserve", 0.0, 0.0, 0)
        demands = [demand for demand in found.shared if demand not in rest.demands]
        missing = {
            **rest.missing,
            **found.missing,
            **{demand.name: "models that have devices to themselves leave none" for demand in demands},
        }
        whole = joined(replace(rest, missing=missing), self.cluster, self.numbers, found.arranged)
        # Those that are placed nowhere are asked for nevertheless.
        nowhere = [*demands, *found.impossible]
        whole = replace(whole, demands=(*whole.demands, *nowhere))
        return replace(whole, placement=replace(whole.placement, notes=notes_of(whole)))


def divide_gpus(
    fleet: Fleet, demands: Sequence[Demand], made: ClusterPlan, around: Surroundings, options: TrialOptions
) -> Divided:
    """Give every rolling or pipelined model GPUs to itself.

    Args:
        made: the plan as if all models were multiplexed: what they have there is what they are compared on.
    """
    cluster = made.placement.cluster
    free = FreeDevices(cluster)
    asked_for = {demand.name: demand for demand in demands}

    def pool_of(name: str) -> DevicePool:
        kind, nodes = part_of(made, name)
        part = GpuPool(kind, nodes, device(kind).memory_bytes, around.rules, around.network)
        model = fleet.model(name)
        if model.phases == "auto":
            return part
        # What the file says must be possible: then as many more as that takes.
        wanted = wanted_of(model, asked_for[name], free=True)
        for count in range(part.devices, sum(n.count for n in cluster.nodes if n.device == kind) + 1):
            pool = replace(part, nodes=nodes_of(cluster, kind, count))
            with suppress(NoPlaceError):
                places_of(wanted, pool, model.phases)
                return pool
        return part

    def take(pool: DevicePool, layout: ReplicaLayout) -> tuple[tuple[int, ...], ...] | None:
        return free.take(pool.kind, layout)

    found = arrange(fleet, demands, pool_of, take, options)
    left, numbers = free.rest()
    return Divided(cluster, found, left, numbers)


def divide_cpu(fleet: Fleet, demands: Sequence[Demand], pool: CpuPool, options: TrialOptions) -> ArrangedFleet:
    """How models are arranged on the CPU of one machine, each compared as if it were there alone. The machine stands
    for as many devices as there are units; which those are is not said yet (`planning.machine`)."""

    def take(_: DevicePool, layout: ReplicaLayout) -> tuple[tuple[int, ...], ...]:
        return ((0,),) * layout.replicas

    return arrange(fleet, demands, lambda _: pool, take, options, free=False)
