"""Ways to serve a fleet: how each is planned, and how its plan is served.

A way is a mode of the placement, a policy, and for models whose file leaves it open a layout of their replicas. What a
fleet file says of a model's engines holds in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from muxserve.config import AUTO, Fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.candidates.dedicated_units import OpenLayout, rearranged
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.spec.unit import share_steps
from placement.cluster import PlacedUnit
from placement.engines import ShareRules
from placement.planner import ClusterPlan, ModeName


class Way(NamedTuple):
    """How a way is planned (`mode`), what is said of it, the policy of its shared units (empty: the fleet's own), and
    the layout of models that leave it open."""

    mode: ModeName
    about: str
    policy: str = ""
    layout: OpenLayout | None = None


WAYS: dict[str, Way] = {
    "shares per lease": Way("muxserve", "models share GPUs, and their shares of the SMs follow the load", "slack"),
    "shared": Way("muxserve", "models share GPUs, each job on its planned SMs"),
    "turns": Way("temporal", "models share GPUs, each job on all SMs"),
    "free": Way("one", "models share GPUs, one engine of both phases each, and no lease is withheld", "free"),
    "one each": Way("one", "models share GPUs, one engine of both phases each, under leases", "slack"),
    "even": Way("even", "GPUs are divided among the models evenly, one engine of both phases each", "free"),
    "dedicated": Way("spatial", "every replica has GPUs of its own, and an engine for each phase"),
    "one engine": Way("alone", "every replica has GPUs of its own and one engine of both phases, as stock vLLM"),
    "replicas": Way(
        "alone", "as one engine, on as many GPUs as let the replicas of a model serve most", "", OpenLayout(whole=True)
    ),
    "split replicas": Way(
        "spatial", "as replicas, with an engine for each phase", "", OpenLayout(whole=True, split=True)
    ),
    "stages": Way("alone", "as one engine, and models with `engines: auto` are over stages", "", OpenLayout()),
    "rolling": Way(
        "alone", "as one engine, and prefill of models with `engines: auto` rolls", "", OpenLayout(rolling=True)
    ),
    "mixed": Way("muxserve", "as the best other way, and each unit with the engines and the policy that serve it best"),
}
# In a fleet of at most so many models all are laid out anew. With more the contest would take half as long again.
_MOST_LAID_OUT = 8
# Made of the plan that wins (`planning.candidates.mixed`).
MIXED = "mixed"
# What everybody would do without a plan.
SIMPLEST = "even"


def as_way(way: str, plan: ClusterPlan, fleet: Fleet, around: Surroundings, latency: LatencyModel) -> ClusterPlan:
    """A plan in that way's mode as `muxserve deploy` serves it."""
    how = WAYS[way]
    if how.layout is not None:
        plan = rearranged(plan, how.layout, fleet, around, latency)
    policy = how.policy or ("adbs" if way == "shared" and fleet.policy == "slack" else "")
    units = tuple(_under(policy, unit) for unit in plan.placement.units)
    return replace(plan, mode="muxserve", placement=replace(plan.placement, units=units))


def _under(policy: str, unit: PlacedUnit) -> PlacedUnit:
    """The unit under that policy, unless prefill rolls over it. An engine that has GPUs to itself waits for nobody."""
    if unit.rolls:
        return unit
    if len(unit.models) == 1 and not unit.split:
        return replace(unit, policy="free")
    return replace(unit, policy=policy) if policy else unit


def ways_of(fleet: Fleet, short: bool, elastic: bool) -> Iterator[str]:
    """The ways that compete, that of the fleet's own policy first. Models are laid out anew if they are few, or the
    other ways leave something to be gained.

    Args:
        short: they do.
        elastic: engines can change their share of the compute from one lease to the next.
    """
    own = shared_ways(fleet, elastic)
    yield from own
    is_small = len(fleet.models) <= _MOST_LAID_OUT
    again = short or (is_small and any(model.is_open for model in fleet.models))
    for name, way in WAYS.items():
        if way.mode != "muxserve" and name not in own and (way.layout is None or again):
            yield name


def planned_mode(fleet: Fleet, mode: ModeName) -> ModeName:
    """How models that share GPUs are placed where `mode` is asked for: without MPS no engine has a share of the SMs."""
    return "temporal" if mode == "muxserve" and fleet.cluster.mps == "off" else mode


def share_rules(fleet: Fleet) -> ShareRules:
    """How engines have shares of GPUs. Over several GPUs there are percentages only, which are for fleets that ask for
    them. In green contexts an engine has CUDA graphs for each of its shares."""
    cluster = fleet.cluster
    sets = share_steps("green_contexts", fleet.policy) if cluster.has_shares_per_lease else 0
    return ShareRules(1 if cluster.sm_sharing == AUTO else None, sets or None)


def shared_ways(fleet: Fleet, elastic: bool) -> tuple[str, ...]:
    """Those ways of which the placement is MuxServe's own: without MPS, `planned_mode`. Unless the file asks for
    percentages, no job has a share of several GPUs."""
    if fleet.cluster.mps == "off" or (fleet.cluster.sm_sharing == AUTO and not elastic):
        return ("turns",)
    if not elastic:
        return ("shared",)
    return ("shares per lease", "shared") if fleet.policy == "slack" else ("shared", "shares per lease")
