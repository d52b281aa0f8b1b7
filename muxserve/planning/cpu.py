"""The plan of a fleet without GPUs: the one machine that `muxserve deploy` would serve it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muxserve.cluster.plan import FleetPlan
from muxserve.costs.latency import LatencyModel
from placement.candidates import Candidates
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand, Member, Mesh
from placement.engines import Engines
from placement.estimator import Estimator, Shares
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.planner import ClusterPlan, notes_of

CPU = "CPU"


def plan_machine(
    plan: FleetPlan, demands: Sequence[Demand], latency: LatencyModel, objective: Objective
) -> ClusterPlan:
    """What the fleet's plan for this machine will deliver. The pool and the shares are those of the plan.

    Raises:
        ValueError: the costs of a model on a CPU are not known.
    """
    by_name = {model.name: model for model in plan.unit.models}
    mesh = Mesh(CPU, 1)
    members = tuple(Member(index) for index in range(len(demands)))
    # The pool has been sized already, and weights are mapped once: nothing else is to be subtracted.
    rules = MemoryRules(utilisation=1.0, context_bytes=0, graph_bytes=0)
    engines = Engines(demands, latency, {CPU: 0}, rules)
    own = sum(engines.footprint(member.model, mesh).own for member in members)
    engines.memory[CPU] = own + plan.unit.pool_bytes
    shares = Shares(
        max(by_name[demand.name].share for demand in demands), tuple(by_name[demand.name].share for demand in demands)
    )
    estimate = Estimator(Candidates(engines)).unit(mesh, members, shares)
    if estimate is None:
        raise ValueError("; ".join(engines.unknown.values()) or "the pool is too small for one request of every model")
    unit = PlacedUnit(
        name="unit0",
        device=CPU,
        devices=(0,),
        models=tuple(
            PlacedModel(demand.name, demand.rate, by_name[demand.name].share, by_name[demand.name].share)
            for demand in demands
        ),
        kv_bytes=plan.unit.pool_bytes,
    )
    made = ClusterPlan(
        demands=tuple(demands),
        placement=Placement(Cluster((Node(CPU, 1),)), (unit,)),
        estimates=(estimate,),
        missing={},
        objective=objective,
        mode="muxserve",
        value=0.0,
        greedy_value=0.0,
        evaluations=1,
    )
    notes = (*notes_of(made), *plan.unit.notes)
    return replace(made, placement=replace(made.placement, notes=notes))
