"""Units of one plan that are served in different ways: with two engines per model here and one there, under leases or
not. Which models share which devices stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from muxserve.config import Fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.planning.demand.demands import memory_of
from placement.candidates import Candidates
from placement.cluster import PlacedUnit, Placement, ShapeName
from placement.demand import Mesh
from placement.engines import Engines
from placement.estimator import Estimator, UnitEstimate
from placement.layout import Unit
from placement.planner import ClusterPlan, notes_of, placed_unit
from placement.values import Values


class UnitWay(NamedTuple):
    """How a unit may be served: the engines of models that leave them open, whether each job has all compute, and the
    policy."""

    shape: ShapeName
    turns: bool
    policy: str


@dataclass(frozen=True, slots=True)
class Alternative:
    """Units of a plan, by their numbers, as they would be served in another way. They have all replicas of their
    models, which are `models`."""

    way: UnitWay
    models: frozenset[str]
    units: Mapping[int, tuple[PlacedUnit, UnitEstimate]]


def unit_ways(fleet: Fleet, elastic: bool) -> tuple[UnitWay, ...]:
    """The ways that are tried. `elastic`: engines can change their share of the compute from one lease to the next.
    Without MPS none has a share."""
    turns = fleet.cluster.mps == "off"
    shared = UnitWay("split", turns, policy="slack" if elastic or turns else "adbs")
    return (UnitWay("one", turns=True, policy="free"), UnitWay("one", turns=True, policy="slack"), shared)


def alternatives(
    plan: ClusterPlan, ways: Iterable[UnitWay], around: Surroundings, latency: LatencyModel, models: Collection[str]
) -> Iterator[Alternative]:
    """Those of the `ways` to serve the units of some models that differ from the plan's. Units that have a model in
    common are served alike, since its replicas must be. Models over stages, and those whose prefill rolls, stay as they
    are."""
    memory = memory_of(plan.placement.cluster)
    groups = [numbers for names, numbers in _groups(plan.placement) if names & set(models)]
    groups = [numbers for numbers in groups if all(_may_change(plan, number) for number in numbers)]
    for way in ways:
        sharing = None if way.turns else around.sharing
        engines = Engines(plan.demands, latency, memory, around.rules, way.shape, sharing)
        values = Values(Estimator(Candidates(engines)), plan.objective)
        for group in groups:
            try:
                units = {number: _otherwise(plan, number, way, values) for number in group}
            except ValueError:
                # There is no room for these engines.
                continue
            if any(plan.placement.units[number] != unit for number, (unit, _) in units.items()):
                served = frozenset(placed.model for unit, _ in units.values() for placed in unit.models)
                yield Alternative(way, served, units)


def with_units(plan: ClusterPlan, chosen: Mapping[int, tuple[PlacedUnit, UnitEstimate]]) -> ClusterPlan:
    """The plan with some of its units, by their numbers, replaced."""
    both = list(zip(plan.placement.units, plan.estimates, strict=True))
    for number, changed in chosen.items():
        both[number] = changed
    units, estimates = zip(*both, strict=True)
    whole = replace(plan, placement=replace(plan.placement, units=units), estimates=estimates)
    return replace(whole, placement=replace(whole.placement, notes=notes_of(whole)))


def _groups(placement: Placement) -> list[tuple[frozenset[str], list[int]]]:
    """The units, divided into those that have models in common: their models, and their numbers."""
    groups: list[tuple[frozenset[str], list[int]]] = []
    for number, unit in enumerate(placement.units):
        names = frozenset(placed.model for placed in unit.models)
        alike = [group for group in groups if group[0] & names]
        groups = [group for group in groups if not group[0] & names]
        numbers = sorted([number, *(each for _, mine in alike for each in mine)])
        groups.append((names.union(*(each for each, _ in alike)), numbers))
    return groups


def _may_change(plan: ClusterPlan, number: int) -> bool:
    unit = plan.placement.units[number]
    return unit.stages == 1 and not unit.rolls


def _otherwise(plan: ClusterPlan, number: int, way: UnitWay, values: Values) -> tuple[PlacedUnit, UnitEstimate]:
    """
    Raises:
        ValueError: there is no room.
    """
    unit, estimate = plan.placement.units[number], plan.estimates[number]
    members = tuple(sorted(model.member for model in estimate.models))
    placed, estimated = placed_unit(
        values, unit.name, unit.devices, Unit(Mesh(unit.device, len(unit.devices)), members)
    )
    # An engine that has GPUs to itself waits for nobody.
    return replace(placed, policy="free" if placed.alone else way.policy), estimated
