"""Ways to serve a fleet: how each is planned, and how its plan is served."""

from __future__ import annotations

from dataclasses import replace

from muxserve.config import Fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.dedicated_units import OpenLayout, rearranged
from muxserve.planning.layouts import is_open, says_nothing
from muxserve.planning.prediction import Surroundings
from placement.cluster import PlacedUnit
from placement.demand import Demand
from placement.planner import ClusterPlan, ModeName

# How each way is planned, and what is said of it.
WAYS: dict[str, tuple[ModeName, str]] = {
    "shares per lease": ("muxserve", "models share GPUs, and their shares of the SMs follow the load"),
    "shared": ("muxserve", "models share GPUs, each job on its planned SMs"),
    "turns": ("temporal", "models share GPUs, each job on all SMs"),
    "first come": ("temporal", "models share GPUs and take turns in order of arrival (FCFS)"),
    "dedicated": ("spatial", "every replica has GPUs of its own"),
    "even": ("even", "GPUs are divided among the models evenly, one engine of both phases each: the simplest way"),
    "one engine": ("spatial", "every replica has GPUs of its own and one engine of both phases, as stock vLLM"),
    "replicas": ("spatial", "as one engine, on as many GPUs as let the replicas of a model serve most"),
    "split replicas": ("spatial", "as replicas, with an engine for each phase"),
    "stages": ("spatial", "as one engine, and those of models with `engines: auto` are over stages"),
    "rolling": ("spatial", "as one engine, and prefill of models with `engines: auto` rolls over their replicas"),
}
# What everybody would do without a plan.
SIMPLEST = "even"
# The layout of models in these.
_OPEN = {
    "replicas": OpenLayout(whole=True),
    "split replicas": OpenLayout(whole=True, split=True),
    "stages": OpenLayout(),
    "rolling": OpenLayout(rolling=True),
}


def as_way(way: str, plan: ClusterPlan, fleet: Fleet, around: Surroundings, latency: LatencyModel) -> ClusterPlan:
    """A plan in that way's mode as `muxserve deploy` serves it."""
    if way in _OPEN:
        plan = rearranged(plan, _OPEN[way], fleet, around, latency)
    units = plan.placement.units
    if way == "shares per lease":
        units = tuple(replace(unit, policy="slack") for unit in units)
    if way == "shared" and fleet.policy == "slack":
        units = tuple(replace(unit, policy="adbs") for unit in units)
    if way == "first come":
        units = tuple(replace(unit, policy="fcfs") for unit in units)
    if way in ("one engine", SIMPLEST) or way in _OPEN:
        demands = {demand.name: demand for demand in plan.demands}
        units = tuple(
            _with_one_engine(unit)
            if len(unit.models) == 1
            and all(_has_one_engine(way, unit, fleet, demands[placed.model]) for placed in unit.models)
            else unit
            for unit in units
        )
    return replace(plan, mode="muxserve", placement=replace(plan.placement, units=units))


def ways_of(fleet: Fleet, short: bool) -> list[str]:
    """Ways in which models do not share GPUs as MuxServe has it. Models are only laid out anew if one of them leaves
    its engines open, or the plan falls short."""
    auto = any(map(is_open, fleet.models))
    return [way for way, (mode, _) in WAYS.items() if mode != "muxserve" and (way not in _OPEN or short or auto)]


def shared_ways(fleet: Fleet, elastic: bool) -> tuple[str, ...]:
    """Ways of a plan whose models share GPUs, the one of the fleet's own policy first. `elastic`: engines can change
    their share from one lease to the next."""
    if not elastic:
        return ("shared",)
    return ("shares per lease", "shared") if fleet.policy == "slack" else ("shared", "shares per lease")


def _has_one_engine(way: str, unit: PlacedUnit, fleet: Fleet, demand: Demand) -> bool:
    """Whether a model has an engine of both phases, as stock vLLM has, in a way in which models have that if the file
    leaves it to the plan. Models without answers have nothing to arrange."""
    model = fleet.model(demand.name)
    if demand.architecture.pooling or way == "split replicas":
        return False
    if is_open(model):
        return way == "replicas" or unit.split
    return says_nothing(model)


def _with_one_engine(unit: PlacedUnit) -> PlacedUnit:
    models = tuple(replace(each, shape="one") for each in unit.models)
    return replace(unit, models=models, stages=1, policy="", batching="vllm")
