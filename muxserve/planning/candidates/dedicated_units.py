"""Models whose replicas have GPUs, or a part of the CPU, to themselves: those of one engine.

The layout of such a model follows a rule: of the layouts that leave the fewest devices idle, the one that serves most
by the costs of its steps, and of equal ones the one with the fewest devices per replica. `divide_gpus` gives GPUs to
the models whose file says so. `rearranged` lays out models that leave their engines open on the GPUs that they have in
a plan, for the contest of `planning.place.contest`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from muxserve.config import Fleet, Model
from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.devices import device
from muxserve.costs.latency import CostError, LatencyModel
from muxserve.planning.candidates.device_pool import GpuPool, Surroundings
from muxserve.planning.candidates.layouts import (
    DevicePool,
    LayoutRequest,
    NoPlaceError,
    ReplicaLayout,
    SimulatedLayout,
    asks_for_choice,
    wanted_of,
)
from muxserve.planning.candidates.one_engine import OneEngine
from muxserve.planning.demand.private import private_because
from placement.candidates import Candidates
from placement.cluster import ROLLING, Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand, Member, Mesh
from placement.engines import Engines
from placement.estimator import Estimator, UnitEstimate, UnitLoad
from placement.layout import Unit
from placement.objective import Objective
from placement.planner import ClusterPlan, notes_of, placed_unit
from placement.values import Values

# Layouts that serve this much less than another are as good as it.
EQUAL = 0.05


class OpenLayout(NamedTuple):
    """How models that leave it open are laid out, in replicas of one engine over several stages (`whole`: over one) or
    with `rolling` prefill. Models that say nothing of their engines are only laid out whole. `split`: with an engine
    for each phase."""

    whole: bool = False
    split: bool = False
    rolling: bool = False


@dataclass(frozen=True, slots=True)
class DedicatedModel:
    """A model with devices to itself: `devices` has those of each replica. `engine` estimates what one replica serves;
    `share` is of the compute of each device."""

    demand: Demand
    place: SimulatedLayout
    engine: OneEngine
    devices: tuple[tuple[int, ...], ...]
    share: float = 1.0

    def units(self, first: int, member: Member) -> tuple[list[PlacedUnit], list[UnitEstimate]]:
        """A unit for each replica, named by numbers from `first` on, and what it serves. `member` is the model in the
        plan."""
        layout, rate = self.place.layout, self.demand.rate / self.place.layout.replicas
        placed = (PlacedModel(self.demand.name, rate, self.share, self.share, "one"),)
        units = [
            PlacedUnit(
                f"unit{first + number}",
                self.place.shape.device,
                devices,
                placed,
                self.place.kv_bytes,
                layout.stages,
                ROLLING if layout.rolling else "",
            )
            for number, devices in enumerate(self.devices)
        ]
        mesh = Mesh(self.place.shape.device, layout.stages * layout.tp)
        model = self.engine.estimate(member, rate, self.share, self.place.own_bytes)
        estimate = UnitEstimate(
            mesh=mesh,
            prefill_share=self.share,
            models=(model,),
            pool_bytes=self.place.kv_bytes,
            kv_bytes=model.memory.kv,
            load=UnitLoad(prefill=0.0, decode=0.0, progress=1.0),
            headroom=self.engine.within_objectives / rate,
            next_limit=self.engine.limit,
        )
        return units, [estimate] * len(units)


@dataclass(slots=True)
class ArrangedFleet:
    """What became of the models: `arranged` ones have devices to themselves, `shared` ones are planned together,
    `missing` ones cannot be served as the file says (and why); `impossible` are their demands."""

    arranged: list[DedicatedModel] = field(default_factory=list)
    shared: list[Demand] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    impossible: list[Demand] = field(default_factory=list)


# ---------------------------------------------------------------- layouts


def best_place(wanted: LayoutRequest, pool: DevicePool, latency: LatencyModel) -> tuple[SimulatedLayout, OneEngine]:
    """The layout by the rule, and what one replica of it serves.

    Raises:
        NoPlaceError: none is possible, or nothing is known of the model's speed on these devices.
    """
    places = places_of(wanted, pool)
    # Fewest devices per replica first: less goes over links.
    places.sort(key=lambda place: (place.layout.tp * place.layout.stages, place.layout.tp))
    try:
        found = [(place, OneEngine.of(wanted, place, latency)) for place in places]
    except CostError as error:
        raise NoPlaceError(str(error)) from None
    most = max(place.layout.replicas * engine.within_objectives for place, engine in found)
    return next(
        (place, engine)
        for place, engine in found
        if place.layout.replicas * engine.within_objectives >= (1.0 - EQUAL) * most
    )


def places_of(wanted: LayoutRequest, pool: DevicePool) -> list[SimulatedLayout]:
    """The layouts that are possible, of those that leave the fewest devices idle.

    Raises:
        NoPlaceError: none is possible.
    """
    if wanted.rolling and not wanted.has_objectives:
        raise NoPlaceError("needs slo.ttft_ms and slo.tpot_ms: prefill rolls on when the next one would miss them")
    places: list[SimulatedLayout] = []
    first = ""
    for layout in pool.layouts(wanted):
        if places and layout.devices < places[0].layout.devices:
            break
        try:
            places.append(pool.place(wanted, layout))
        except NoPlaceError as error:
            first = first or str(error)
            # The largest part of a model that is possible says what would be needed.
            if layout.devices == pool.devices:
                first = str(error)
    if not places:
        raise NoPlaceError(first)
    return places


# ---------------------------------------------------------------- devices of a plan


class FreeDevices:
    """Devices of a cluster that are still free, while some are taken. `numbers` are those that are free at first (None:
    all)."""

    def __init__(self, cluster: Cluster, numbers: Collection[int] | None = None) -> None:
        self.cluster = cluster
        self._free: list[list[int]] = []
        first = 0
        for node in cluster.nodes:
            mine = range(first, first + node.count)
            self._free.append([number for number in mine if numbers is None or number in numbers])
            first += node.count

    def on_machines(self, kind: str) -> tuple[int, ...]:
        """How many devices of that type are free on each machine that has some."""
        nodes = zip(self.cluster.nodes, self._free, strict=True)
        return tuple(len(free) for node, free in nodes if node.device == kind and free)

    def take(self, kind: str, layout: ReplicaLayout) -> tuple[tuple[int, ...], ...] | None:
        """Devices of type `kind` for each replica of a layout, those of one within a machine. None, and nothing taken,
        if they are not there."""
        free = [list(numbers) for numbers in self._free]
        mine = [number for number, node in enumerate(self.cluster.nodes) if node.device == kind]
        size, taken = layout.stages * layout.tp, []
        for _ in range(layout.replicas):
            fitting = [free[number] for number in mine if len(free[number]) >= size]
            if not fitting:
                return None
            taken.append(_pop(min(fitting, key=len), size))
        self._free = free
        return tuple(taken)

    def rest(self) -> tuple[Cluster, list[int]]:
        """What is free as a cluster, and the number in this one of each of its devices."""
        nodes = [(node, numbers) for node, numbers in zip(self.cluster.nodes, self._free, strict=True) if numbers]
        cluster = Cluster(tuple(Node(node.device, len(numbers)) for node, numbers in nodes))
        return cluster, [number for _, numbers in nodes for number in numbers]


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


# ---------------------------------------------------------------- models whose file says so


@dataclass(frozen=True, slots=True)
class Divided:
    """A cluster whose devices are divided: `left` is what the models of `divided.shared` are to be planned on, and
    `numbers` the number in `cluster` of each of its devices."""

    cluster: Cluster
    divided: ArrangedFleet
    left: Cluster
    numbers: list[int]

    def joined(self, rest: ClusterPlan | None, objective: Objective) -> ClusterPlan:
        """The whole plan. `rest` is that of the shared models; None where there are none, or no devices for them."""
        found = self.divided
        rest = rest or ClusterPlan((), Placement(self.left, ()), (), {}, objective, "muxserve")
        units = [replace(unit, devices=tuple(self.numbers[n] for n in unit.devices)) for unit in rest.placement.units]
        estimates, demands = list(rest.estimates), list(rest.demands)
        for each in found.arranged:
            more, estimated = each.units(len(units), Member(len(demands), each.place.layout.replicas))
            demands.append(each.demand)
            units += more
            estimates += estimated
        unplaced = [demand for demand in found.shared if demand not in rest.demands]
        missing = {
            **rest.missing,
            **found.missing,
            **{demand.name: "models that have devices to themselves leave none" for demand in unplaced},
        }
        whole = replace(
            rest,
            # Those that are placed nowhere are asked for nevertheless.
            demands=(*demands, *unplaced, *found.impossible),
            placement=Placement(self.cluster, tuple(units)),
            estimates=tuple(estimates),
            missing=missing,
        )
        return replace(whole, placement=replace(whole.placement, notes=notes_of(whole)))


def divide_gpus(
    fleet: Fleet, demands: Sequence[Demand], made: ClusterPlan, around: Surroundings, latency: LatencyModel
) -> Divided:
    """Give every model whose layers are in stages, or over whose replicas prefill rolls, GPUs to itself.

    Args:
        made: the plan as if all models had two engines: a model has as many GPUs as there, or as its file takes.
    """
    cluster, found = made.placement.cluster, ArrangedFleet()
    free = FreeDevices(cluster)
    for model, demand in zip(fleet.models, demands, strict=True):
        if not model.has_own_unit:
            found.shared.append(demand)
            continue
        wanted = wanted_of(model, demand, free=True)
        try:
            found.arranged.append(_dedicated(wanted, _own_pool(wanted, made, around), free, latency))
        except NoPlaceError as error:
            found.missing[model.name] = str(error)
            found.impossible.append(demand)
    left, numbers = free.rest()
    return Divided(cluster, found, left, numbers)


def _own_pool(wanted: LayoutRequest, made: ClusterPlan, around: Surroundings) -> GpuPool:
    """The GPUs that a model has by its load, or the fewest more that it can be laid out on."""
    cluster = made.placement.cluster
    kind, nodes = part_of(made, wanted.demand.name)
    part = GpuPool(kind, nodes, device(kind).memory_bytes, around.rules)
    for count in range(part.devices, sum(n.count for n in cluster.nodes if n.device == kind) + 1):
        pool = replace(part, nodes=nodes_of(cluster, kind, count))
        with suppress(NoPlaceError):
            places_of(wanted, pool)
            return pool
    return part


def _dedicated(wanted: LayoutRequest, pool: GpuPool, free: FreeDevices, latency: LatencyModel) -> DedicatedModel:
    """The model in its best layout on such a pool, with devices that are free.

    Raises:
        NoPlaceError: no layout is possible, or the devices that the best one needs are not there any more.
    """
    place, engine = best_place(wanted, pool, latency)
    devices = free.take(pool.kind, place.layout)
    if devices is None:
        raise NoPlaceError(
            f"its engine needs {place.layout.devices} {pool.kind} for it alone ({place.layout.words}), which the other "
            "models do not leave"
        )
    return DedicatedModel(wanted.demand, place, engine, devices)


# ---------------------------------------------------------------- models that leave it open


def rearranged(
    plan: ClusterPlan, how: OpenLayout, fleet: Fleet, around: Surroundings, latency: LatencyModel
) -> ClusterPlan:
    """A plan in which every replica has GPUs of its own, with models laid out anew: on the GPUs that they have, and on
    those that nobody uses unless as few as possible are wanted. Models for which it is not possible there stay as they
    are."""
    placed = {demand.name: demand for demand in plan.demands if not demand.architecture.pooling}
    for model in fleet.models:
        if model.name in placed and model.is_open and _is_served(how, model, placed[model.name].architecture):
            plan = _model_rearranged(plan, model.name, how, fleet, around, latency)
    return plan


def _is_served(how: OpenLayout, model: Model, architecture: ModelArchitecture) -> bool:
    """Whether such a layout of the model can be deployed."""
    if private_because(model, architecture):
        return how.whole and not how.split
    in_one_stage = architecture.latent is not None or architecture.states is not None or architecture.sees_images
    return how.whole or how.rolling or not in_one_stage


def _model_rearranged(
    plan: ClusterPlan, name: str, how: OpenLayout, fleet: Fleet, around: Surroundings, latency: LatencyModel
) -> ClusterPlan:
    units, cluster = plan.placement.units, plan.placement.cluster
    mine = [unit for unit in units if any(placed.model == name for placed in unit.models)]
    kinds = {unit.device for unit in mine}
    if len(kinds) != 1 or any(len(unit.models) > 1 for unit in mine):
        return plan
    (kind,) = kinds
    used = {number for unit in units for number in unit.devices}
    own = {number for unit in mine for number in unit.devices}
    if plan.objective.name != "gpus":
        own |= set(range(cluster.devices)) - used
    free = FreeDevices(cluster, own)
    pool = GpuPool(kind, free.on_machines(kind), device(kind).memory_bytes, around.rules)
    index, demand = next((n, each) for n, each in enumerate(plan.demands) if each.name == name)
    wanted = replace(
        wanted_of(fleet.model(name), demand, free=True),
        stages=1 if how.whole or how.rolling else None,
        least_stages=2,
        rolling=how.rolling,
    )
    try:
        own_devices = _dedicated(wanted, pool, free, latency)
        member = Member(index, own_devices.place.layout.replicas)
        found = own_devices.units(0, member)
        if how.split:
            found = _split(plan, found[0], member, around, latency)
    except NoPlaceError:
        return plan
    others = [(unit, estimate) for unit, estimate in zip(units, plan.estimates, strict=True) if unit not in mine]
    both = [*others, *zip(*found, strict=True)]
    named = tuple(replace(unit, name=f"unit{number}") for number, (unit, _) in enumerate(both))
    whole = replace(
        plan,
        placement=replace(plan.placement, units=named),
        estimates=tuple(estimate for _, estimate in both),
    )
    return replace(whole, placement=replace(whole.placement, notes=notes_of(whole)))


def _split(
    plan: ClusterPlan, units: Sequence[PlacedUnit], member: Member, around: Surroundings, latency: LatencyModel
) -> tuple[list[PlacedUnit], list[UnitEstimate]]:
    """The units with an engine for each phase, at the shares of the SMs that the planner gives these.

    Raises:
        NoPlaceError: two engines do not fit.
    """
    kind, tp = units[0].device, len(units[0].devices)
    engines = Engines(plan.demands, latency, {kind: device(kind).memory_bytes}, around.rules, sharing=around.sharing)
    values = Values(Estimator(Candidates(engines)), plan.objective)
    try:
        found = [placed_unit(values, each.name, each.devices, Unit(Mesh(kind, tp), (member,))) for each in units]
    except ValueError as error:
        raise NoPlaceError(str(error)) from None
    return [unit for unit, _ in found], [estimate for _, estimate in found]


def open_units(plan: ClusterPlan, fleet: Fleet) -> Mapping[str, PlacedUnit]:
    """A unit in the plan of every model that asks for a choice of its engines, by the model's name."""
    found = {placed.model: unit for unit in plan.placement.units for placed in unit.models}
    return {model.name: found[model.name] for model in fleet.models if asks_for_choice(model) and model.name in found}
