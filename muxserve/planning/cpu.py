"""What multiplexed units on the CPU of one machine will deliver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from muxserve.cluster.plan import FleetPlan
from muxserve.costs.latency import LatencyModel
from placement.candidates import Candidates
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand, Member, Members, Mesh
from placement.engines import Engines
from placement.estimator import Estimator, Shares, UnitEstimate
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.planner import ClusterPlan, notes_of

CPU = "CPU"


def plan_machine(
    plans: Sequence[FleetPlan], demands: Sequence[Demand], latency: LatencyModel, objective: Objective, units: int = 0
) -> ClusterPlan:
    """What multiplexed units of this machine will deliver. Pools and shares are those of their plans.

    Args:
        plans: one of each unit; a model may be in several, and each has an equal part of its rate.
        units: how many there are on the machine, with those of other arrangements; they divide its cores evenly.

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
            PlacedModel(model.name, demands[member.model].rate / member.replicas, model.share, model.share)
            for model, member in zip(plan.unit.models, members, strict=True)
        )
        placed.append(PlacedUnit(f"unit{place}", CPU, (place,), models, plan.unit.pool_bytes))
    made = ClusterPlan(
        demands=tuple(demands),
        placement=Placement(Cluster((Node(CPU, len(plans)),)), tuple(placed)),
        estimates=tuple(estimates),
        missing={},
        objective=objective,
        mode="muxserve",
        value=0.0,
        greedy_value=0.0,
        evaluations=len(plans),
    )
    return replace(made, placement=replace(made.placement, notes=notes_of(made)))


def _estimate(
    plan: FleetPlan, members: Members, demands: Sequence[Demand], latency: LatencyModel, parts: int
) -> UnitEstimate:
    mesh = Mesh(CPU, 1)
    # The pool has been sized already, and weights are mapped once: nothing else is to be subtracted.
    rules = MemoryRules(utilisation=1.0, context_bytes=0, graph_bytes=0)
    engines = Engines(demands, latency, {CPU: 0}, rules)
    own = sum(engines.footprint(member.model, mesh).own for member in members)
    engines.memory[CPU] = own + plan.unit.pool_bytes
    shares = tuple(min(model.share, 1.0 / parts) for model in plan.unit.models)
    estimate = Estimator(Candidates(engines)).unit(mesh, members, Shares(max(shares), shares))
    if estimate is None:
        raise ValueError("; ".join(engines.unknown.values()) or "the pool is too small for one request of every model")
    return estimate
