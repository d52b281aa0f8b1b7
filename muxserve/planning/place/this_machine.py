"""The plan of a fleet without GPUs: units of this machine's CPU, as `muxserve deploy` would serve them, and what they
will deliver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from muxserve.cluster.machine import this_machine
from muxserve.config import Fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.candidates.dedicated_units import ArrangedFleet, DedicatedModel, Divided
from muxserve.planning.candidates.device_pool import CPU, CpuPool, on_cores
from muxserve.planning.candidates.layouts import LayoutRequest, NoPlaceError, ReplicaLayout, wanted_of
from muxserve.planning.candidates.one_engine import OneEngine
from muxserve.planning.specs.fleet_planner import FleetPlanner, notes_of
from muxserve.planning.specs.residency import residency_of
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.spec import ResidencySpec
from placement import Machine, planner
from placement.candidates import Candidates
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand, Member, Members, Mesh
from placement.engines import Engines
from placement.estimator import Estimator, Shares, UnitEstimate
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.planner import ClusterPlan, SearchRecord


def plan_this_machine(
    fleet: Fleet, demands: Sequence[Demand], pool: CpuPool, latency: LatencyModel, objective: Objective
) -> ClusterPlan:
    """Plan as many units as the fleet begins with; the plan has one device for each.

    Args:
        fleet: as declared.
        demands: of its models, in their order.
        pool: the machine.

    Raises:
        FleetError: the units do not fit.
        ValueError: the costs of a model are not known.
    """
    found, alone = ArrangedFleet(), list[_OwnUnits]()
    for model, demand in zip(fleet.models, demands, strict=True):
        if not model.has_own_unit:
            found.shared.append(demand)
            continue
        wanted = wanted_of(model, demand, free=False)
        try:
            (layout,) = pool.layouts(wanted)
        except NoPlaceError as error:
            found.missing[model.name] = str(error)
            found.impossible.append(demand)
            continue
        alone.append(_OwnUnits(wanted, layout))
    plans = _served(fleet, {each.wanted.demand.name: each.layout for each in alone}, found.missing, pool.machine)
    shared = [plan for plan in plans if not plan.fleet.models[0].has_own_unit]
    found.shared = [as_served(demand, shared) for demand in found.shared]
    made = plan_machine(shared, found.shared, latency, objective, len(plans)) if shared else None
    found.arranged = _placed(alone, plans[len(shared) :], len(shared), latency)
    machine = Cluster((Node(CPU, max(1, len(plans))),))
    left = Cluster((Node(CPU, max(1, len(shared))),))
    whole = made
    if whole is None or found.arranged or found.missing:
        whole = Divided(machine, found, left, list(range(len(shared)))).joined(made, objective)
    named = [replace(plan, name=unit.name) for plan, unit in zip(plans, whole.placement.units, strict=True)]
    notes = (*whole.placement.notes, *(notes_of(named) if named else ()))
    return replace(whole, placement=replace(whole.placement, notes=notes))


def as_served(demand: Demand, units: Sequence[ResolvedUnit]) -> Demand:
    """A demand with the type and the length, tokens, that all of these units have its model in."""
    found = [
        (needs.dtype, model.max_len)
        for unit in units
        for needs, model in zip(unit.demands, unit.unit.models, strict=True)
        if model.name == demand.name
    ]
    if not found:
        return demand
    return replace(demand, dtype=found[0][0], max_len=min(length for _, length in found))


class _OwnUnits(NamedTuple):
    """A model whose replicas have units to themselves."""

    wanted: LayoutRequest
    layout: ReplicaLayout


def _served(
    fleet: Fleet, layouts: Mapping[str, ReplicaLayout], missing: Collection[str], machine: Machine
) -> list[ResolvedUnit]:
    """The units that `muxserve deploy` would begin with."""
    models = []
    for model in fleet.models:
        if model.name in missing:
            continue
        layout = layouts.get(model.name)
        models.append(model.with_engines("one", layout.stages, layout.rolling) if layout else model)
    return FleetPlanner(fleet.with_models(models), machine, _no_gpus).at_start() if models else []


def _placed(
    alone: Sequence[_OwnUnits], plans: Sequence[ResolvedUnit], first: int, latency: LatencyModel
) -> list[DedicatedModel]:
    """The models with devices of their own, from number `first` on, as their units are planned."""
    found, number = [], 0
    units = first + len(plans)
    for wanted, layout in alone:
        plan = plans[number]
        place = on_cores(layout, plan.demands[0], plan.unit)
        devices = tuple((first + number + n,) for n in range(layout.replicas))
        engine = OneEngine.of(wanted, place, latency)
        found.append(DedicatedModel(wanted.demand, place, engine, devices, 1.0 / units))
        number += layout.replicas
    return found


def residency_here(fleet: Fleet, placement: Placement) -> dict[str, ResidencySpec]:
    """By what memory decides which models of the placement's only unit are awake, as `muxserve deploy` has it on this
    machine; nothing where it does not, or would decide over several units.

    Raises:
        FleetError: its limit has no room.
    """
    if fleet.memory is None or len(placement.units) > 1:
        return {}
    planner = FleetPlanner(fleet, this_machine(), _no_gpus)
    (spec,) = residency_of(planner.fleet, planner.at_start(), planner.machine).values()
    return {placement.units[0].name: spec}


def _no_gpus() -> NoReturn:
    raise AssertionError("a fleet without GPUs asks for none")


# ---------------------------------------------------------------- units of several models


def plan_machine(
    plans: Sequence[ResolvedUnit],
    demands: Sequence[Demand],
    latency: LatencyModel,
    objective: Objective,
    units: int = 0,
) -> ClusterPlan:
    """What units that models share on this machine will deliver. Pools and shares are those of their plans.

    Args:
        plans: one of each unit; a model may be in several, and each has an equal part of its rate.
        units: how many there are on the machine, with those of one model; they divide its cores evenly.

    Raises:
        ValueError: the costs of a model on a CPU are not known.
    """
    parts = max(units, len(plans))
    number = {demand.name: index for index, demand in enumerate(demands)}
    replicas = Counter(model.name for plan in plans for model in plan.unit.models)
    placed: list[PlacedUnit] = []
    estimates: list[UnitEstimate] = []
    for place, plan in enumerate(plans):
        members = tuple(Member(number[model.name], replicas[model.name]) for model in plan.unit.models)
        estimates.append(_estimate(plan, members, demands, latency, parts))
        models = tuple(
            PlacedModel(
                model.name,
                demands[member.model].rate / member.replicas,
                model.share,
                model.share,
                "one" if needs.one_engine else "split",
            )
            for needs, model, member in zip(plan.demands, plan.unit.models, members, strict=True)
        )
        placed.append(PlacedUnit(f"unit{place}", CPU, (place,), models, plan.unit.kv_bytes))
    made = ClusterPlan(
        demands=tuple(demands),
        placement=Placement(Cluster((Node(CPU, len(plans)),)), tuple(placed)),
        estimates=tuple(estimates),
        missing={},
        objective=objective,
        mode="muxserve",
        search=SearchRecord(evaluations=len(plans)),
    )
    return replace(made, placement=replace(made.placement, notes=planner.notes_of(made)))


def _estimate(
    plan: ResolvedUnit, members: Members, demands: Sequence[Demand], latency: LatencyModel, parts: int
) -> UnitEstimate:
    mesh = Mesh(CPU, 1)
    # Pools and private caches have been sized already, and weights are mapped once: nothing else is to be subtracted.
    rules = MemoryRules(utilisation=1.0, context_bytes=0, graph_bytes=0)
    engines = Engines(demands, latency, {CPU: 0}, rules)
    own = sum(engines.footprint(member.model, mesh).own for member in members)
    engines.memory[CPU] = own + plan.unit.kv_bytes
    shares = tuple(min(model.share, 1.0 / parts) for model in plan.unit.models)
    estimate = Estimator(Candidates(engines)).unit(mesh, members, Shares(max(shares), shares))
    if estimate is None:
        raise ValueError("; ".join(engines.unknown.values()) or "the pool is too small for one request of every model")
    return estimate
