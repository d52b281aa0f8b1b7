"""Plans that compete: models share GPUs, take turns on them or have their own, and simulation decides.

Estimates of different ways to serve are not comparable enough to choose by them, so every way is planned, all plans are
simulated on a quarter of the same requests, and the better half of them on all of these (successive halving; where only
requests per second count, which a quarter does not show, all of them on all requests). Of those
that are equal then, the one is taken that holds up best under workloads that differ from the one that was told
(`prediction.PERTURBATIONS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from muxserve.config import Fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.arrangements import arrangement, is_open
from muxserve.planning.dedicated_units import OpenLayout, rearranged
from muxserve.planning.prediction import Prediction, Surroundings, falls_short
from placement.cluster import PlacedUnit
from placement.demand import Demand
from placement.planner import ClusterPlan, ModeName

# The part of the requests on which all plans are compared at first.
FIRST = 0.25
# Plans whose scores differ by less are equal.
EQUAL = 0.005

# How each way is planned, and what is said of it.
WAYS: dict[str, tuple[ModeName, str]] = {
    "shares per lease": ("muxserve", "models share GPUs, and their shares of the SMs follow the load"),
    "shared": ("muxserve", "models share GPUs, each job on its planned SMs"),
    "turns": ("temporal", "models share GPUs, each job on all SMs"),
    "first come": ("temporal", "models share GPUs and take turns in order of arrival (FCFS)"),
    "dedicated": ("spatial", "every replica has GPUs of its own"),
    "one engine": ("spatial", "every replica has GPUs of its own and one engine of both phases, as stock vLLM"),
    "replicas": ("spatial", "as one engine, on as many GPUs as let the replicas of a model serve most"),
    "split replicas": ("spatial", "as replicas, with an engine for each phase"),
    "stages": ("spatial", "as one engine, and those of models with `phases: auto` are over stages"),
    "rolling": ("spatial", "as one engine, and prefill of models with `phases: auto` rolls over their replicas"),
}
# The layout of models in these.
_OPEN = {
    "replicas": OpenLayout("pipelined", whole=True),
    "split replicas": OpenLayout("pipelined", whole=True, split=True),
    "stages": OpenLayout("pipelined"),
    "rolling": OpenLayout("rolling"),
}


@dataclass(frozen=True, slots=True)
class Rival:
    """One way to serve a fleet, and what its simulation says. `score` is what the objective counts: requests per second
    that are answered, within their objectives unless throughput alone counts; `latency` is their mean, seconds; `short`
    are the models that meet their objectives less often than the plan's objective asks. `stressed` is the part of the
    requests that count under each other workload, if the plan was tried under any."""

    way: str
    plan: ClusterPlan
    prediction: Prediction | None = None
    stressed: Mapping[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """See the class; 0 of what was not simulated."""
        return score(self.plan, self.prediction) if self.prediction else 0.0

    @property
    def is_measured(self) -> bool:
        """Its simulation was long enough to show the score. Any simulation in which no queue grows shows how many
        requests are within their objectives."""
        if self.prediction is None:
            return False
        parts = self.plan.objective.name != "throughput" and not self.prediction.grows
        return parts or self.prediction.is_long_enough

    @property
    def robust(self) -> float:
        """The mean over other workloads; 0 without any."""
        return fmean(self.stressed.values()) if self.stressed else 0.0

    @property
    def latency(self) -> float:
        """See the class."""
        latency = self.prediction.summary.overall.latency if self.prediction else None
        return latency.mean if latency else math.inf

    @property
    def is_served(self) -> bool:
        """All requests of its simulation were answered, so that their latency has a mean."""
        overall = self.prediction.summary.overall if self.prediction else None
        return overall is not None and 0 < overall.requests == overall.completed

    @property
    def short(self) -> int:
        """See the class."""
        if self.prediction is None or self.plan.objective.name == "throughput":
            return 0
        return len(falls_short(self.plan, self.prediction))

    @property
    def worst(self) -> float:
        """The part of the requests within their objectives, in hundredths, of the model that has the fewest."""
        if self.prediction is None or self.plan.objective.name == "throughput":
            return 1.0
        models = self.prediction.summary.models.values()
        return round(min((figures.slo.get("all", 1.0) for figures in models), default=1.0), 2)

    @property
    def words(self) -> str:
        """The way with its figures, as far as they were measured."""
        within = "" if self.plan.objective.name == "throughput" else " within their objectives"
        figures = [self.way]
        if self.is_measured:
            figures.append(f"{self.score:.2f} requests/s{within}")
        if self.is_served:
            figures.append(f"{self.latency:.3g} s each")
        return f"{', '.join(figures)} on {self.plan.devices} devices"


def score(plan: ClusterPlan, prediction: Prediction) -> float:
    """Requests per second that are answered, and within their objectives unless the objective is throughput; whether
    that was measured, `Rival.is_measured` says."""
    if plan.objective.name == "throughput":
        return prediction.rate
    total = 0.0
    for demand in plan.demands:
        figures = prediction.summary.models.get(demand.name)
        if figures is not None and figures.requests:
            met = figures.slo.get("all")
            total += demand.rate * (figures.completed / figures.requests if met is None else met)
    return total


def kept(plan: ClusterPlan, prediction: Prediction) -> float | None:
    """The part of the requests that are answered within their objectives, or in time if the objective is throughput,
    whatever their rate; None if that was not measured."""
    overall, throughput = prediction.summary.overall, prediction.throughput
    if plan.objective.name != "throughput":
        return overall.slo.get("all")
    if throughput is None or not overall.requests:
        return None
    return min(1.0, throughput * prediction.seconds / overall.requests)


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
    if way == "one engine" or way in _OPEN:
        how = arrangement("pipelined")
        demands = {demand.name: demand for demand in plan.demands}
        units = tuple(
            replace(unit, phases=how.name, stages=1, batching="vllm")
            if all(_has_one_engine(way, unit, fleet, demands[placed.model]) for placed in unit.models)
            else unit
            for unit in units
        )
    return replace(plan, mode="muxserve", placement=replace(plan.placement, units=units))


def ways_of(fleet: Fleet, short: bool) -> list[str]:
    """Ways in which models do not share GPUs as MuxServe has it. Models are only laid out anew if one of them leaves
    its arrangement open, or the plan falls short."""
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
        return way == "replicas" or unit.phases == "multiplexed"
    return "phases" not in model.model_fields_set


def best_of(
    rivals: Sequence[Rival],
    simulate: Callable[[ClusterPlan, float], Prediction | None],
    stress: Callable[[ClusterPlan], Mapping[str, float]] | None = None,
    first_part: float = FIRST,
) -> list[Rival]:
    """The plans that were simulated on all requests, the best first. Plans without a place for a model that others have
    one for do not compete.

    Args:
        rivals: the one that is taken where nothing can be simulated comes first. Predictions that they have are of all
            requests.
        simulate: a plan on a part of the requests, the same for all; None: that is not possible.
        stress: what a plan keeps under other workloads (see `Rival`), which is asked of plans that are equal otherwise.
        first_part: the part of the requests on which all plans are compared at first.
    """
    fewest = min(len(each.plan.missing) for each in rivals)
    heat = [each for each in rivals if len(each.plan.missing) == fewest]
    whole = first_part == 1.0
    looks = [
        each if whole and each.prediction else replace(each, prediction=simulate(each.plan, first_part))
        for each in heat
    ]
    rival_of = {id(look): look if whole else each for look, each in zip(looks, heat, strict=True) if look.prediction}
    looks = [look for look in looks if look.prediction]
    if not looks:
        return list(rivals[:1])
    order = _ranked(looks)
    final = []
    for look in order[: max(2, math.ceil(len(order) / 2))]:
        rival = rival_of[id(look)]
        final.append(rival if rival.prediction else replace(rival, prediction=simulate(rival.plan, 1.0)))
    ranked = _ranked([each for each in final if each.prediction is not None])
    if stress is not None and ranked:
        equal = _equal(ranked, bool(ranked[0].short), ranked[0].plan.devices)
        if len(equal) > 1:
            tried = {id(each): replace(each, stressed=stress(each.plan)) for each in equal}
            ranked = _ranked([tried.get(id(each), each) for each in ranked])
    return ranked or list(rivals[:1])


def _equal(rivals: Sequence[Rival], short: bool, devices: int) -> list[Rival]:
    """Those with about the highest score, of the plans that fall short or not, on so many devices where these count."""
    pool = [each for each in rivals if bool(each.short) == short]
    if pool and not short and pool[0].plan.objective.name == "gpus":
        pool = [each for each in pool if each.plan.devices == devices]
    most = max(each.score for each in pool)
    return [each for each in pool if each.score >= (1.0 - EQUAL) * most]


def _ranked(rivals: Sequence[Rival]) -> list[Rival]:
    """The best first: those of which no model falls short, with the objective `gpus` those of them on the fewest
    devices, then the highest score; of equal ones the one that holds up best under other workloads, as far as that is
    known, then the one whose worst model is best off, and then the one that answers soonest."""
    remaining, order = list(rivals), []
    while remaining:
        borne_out = [each for each in remaining if not each.short]
        fewest = min(each.plan.devices for each in borne_out or remaining)
        equal = _equal(remaining, not borne_out, fewest)
        most = max(each.robust for each in equal)
        equal = [each for each in equal if each.robust >= (1.0 - EQUAL) * most]
        first = min(equal, key=lambda each: (-each.worst, each.latency))
        order.append(first)
        remaining = [each for each in remaining if each is not first]
    return order
