"""A plan whose units are served in different ways: each group of units as it keeps most of its requests."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from muxserve.config import parse_fleet
from muxserve.costs.roofline import Roofline
from muxserve.metrics.records import RequestRecord
from muxserve.metrics.summary import summarise
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.planning.candidates.mixed import alternatives, unit_ways, with_units
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.planning.place.contest import Contest
from muxserve.planning.place.mixing import mixed
from muxserve.planning.place.prediction import Prediction
from muxserve.planning.place.workloads import DECLARED, Variation
from placement.cluster import Cluster, Node, PlacedUnit
from placement.demand import Demand
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.planner import ClusterPlan, PlanOptions, plan_cluster

KIND = "A100-80GB"
AROUND = Surroundings(MemoryRules.served())
FLEET = parse_fleet("models: [{name: a, hub: org/a}]\n", "fleet.yaml", Path(), {})
ELASTIC = unit_ways(FLEET, elastic=True)
BURSTS = Variation("bursts", cv=4.0)
# Requests to each model.
REQUESTS = 10
# (engines, policy) of a unit: requests that are answered under each workload.
Kept = dict[tuple[str, str], dict[str, int]]


def demand(name: str, **changes: Any) -> Demand:
    return replace(Demand(name, planned_architecture("llama-2-7b", Path()), rate=1.0), **changes)


def plan_of(*demands: Demand, gpus: int = 2) -> ClusterPlan:
    """Every model with GPUs of its own, and two engines."""
    cluster = Cluster((Node(KIND, gpus),))
    options = PlanOptions(Objective("slo"), "spatial", rules=AROUND.rules)
    plan = plan_cluster(demands, cluster, Roofline(), {KIND: 80 << 30}, options)
    assert not plan.missing
    return plan


def shared(*demands: Demand) -> ClusterPlan:
    """All models on one GPU."""
    options = PlanOptions(Objective("slo"), "temporal", rules=AROUND.rules)
    plan = plan_cluster(demands, Cluster((Node(KIND, 1),)), Roofline(), {KIND: 80 << 30}, options)
    assert not plan.missing
    return plan


def served(unit: PlacedUnit) -> tuple[list[str], str]:
    return [placed.shape for placed in unit.models], unit.policy


class TestAlternatives:
    def test_a_unit_has_other_engines_and_another_policy_on_the_same_devices(self) -> None:
        plan = shared(demand("a"), demand("b"))
        found = list(alternatives(plan, ELASTIC, AROUND, Roofline(), ["a"]))
        assert all(each.models == {"a", "b"} for each in found)
        units = [each.units[0] for each in found]
        assert [served(unit) for unit, _ in units] == [
            (["one", "one"], "free"),
            (["one", "one"], "slack"),
            (["split", "split"], "slack"),
        ]
        before = plan.placement.units[0]
        assert all((unit.name, unit.devices) == (before.name, before.devices) for unit, _ in units)
        # One engine per model leaves more of the memory than two.
        assert units[0][0].kv_bytes > before.kv_bytes
        assert all(unit.kv_bytes == estimate.pool_bytes for unit, estimate in units)

    def test_what_the_file_says_of_engines_holds(self) -> None:
        plan = shared(demand("a", shape="split"), demand("b"))
        found = list(alternatives(plan, unit_ways(FLEET, elastic=False), AROUND, Roofline(), ["b"]))
        assert [served(each.units[0][0]) for each in found] == [
            (["split", "one"], "free"),
            (["split", "one"], "slack"),
            (["split", "split"], "adbs"),
        ]

    def test_without_mps_no_engine_has_a_share(self) -> None:
        text = "cluster: {mps: 'off'}\nmodels: [{name: a, hub: org/a}]\n"
        fleet = parse_fleet(text, "fleet.yaml", Path(), {})
        assert all(way.turns for way in unit_ways(fleet, elastic=False))

    def test_replicas_are_served_alike_and_an_engine_alone_waits_for_nobody(self) -> None:
        plan = plan_of(demand("a", least=2))
        found = list(alternatives(plan, ELASTIC, AROUND, Roofline(), ["a"]))
        assert all(set(each.units) == {0, 1} for each in found)
        assert served(found[0].units[0][0]) == served(found[1].units[1][0]) == (["one"], "free")

    def test_other_models_stay_as_they_are_and_so_do_pipelines(self) -> None:
        plan = plan_of(demand("a"), demand("b"))
        found = list(alternatives(plan, ELASTIC, AROUND, Roofline(), ["b"]))
        number = next(n for n, unit in enumerate(plan.placement.units) if unit.models[0].model == "b")
        assert {tuple(each.units) for each in found} == {(number,)}
        made = with_units(plan, found[0].units)
        other = 1 - number
        assert made.placement.units[other] == plan.placement.units[other]
        assert made.placement.units[number] == found[0].units[number][0]
        assert made.estimates[number] == found[0].units[number][1]
        units = tuple(replace(unit, stages=2) for unit in plan.placement.units)
        staged = replace(plan, placement=replace(plan.placement, units=units))
        assert not list(alternatives(staged, ELASTIC, AROUND, Roofline(), ["a", "b"]))


class TestMixing:
    @pytest.fixture
    def plan(self) -> ClusterPlan:
        return plan_of(demand("a"), demand("b"))

    def best(self, plan: ClusterPlan, kept: dict[str, Kept], tried: list[str] | None = None) -> ClusterPlan | None:
        """The mixed plan, where units of each model keep that; what is not named keeps all of its requests."""

        def simulate(plan: ClusterPlan, part: float, workload: Variation) -> Prediction:
            if tried is not None:
                tried.append(workload.name)
            records = []
            for unit in plan.placement.units:
                (placed,) = unit.models
                ways = kept.get(placed.model, {})
                answered = ways.get((placed.shape, unit.policy), {}).get(workload.name, REQUESTS)
                records += [
                    RequestRecord(placed.model, float(n), 10, 1, float(n), float(n) if n < answered else None)
                    for n in range(REQUESTS)
                ]
            return Prediction(summarise(records), 10.0, {})

        others = partial(alternatives, plan, ELASTIC, AROUND, Roofline())
        return mixed(plan, others, Contest(simulate, (DECLARED, BURSTS)))

    def test_each_unit_is_served_as_it_keeps_most(self, plan: ClusterPlan) -> None:
        kept: dict[str, Kept] = {
            "a": {("split", ""): {"bursts": 6}, ("one", "free"): {"bursts": 9}, ("split", "slack"): {"bursts": 8}},
            "b": {("split", ""): {"bursts": 6}, ("one", "free"): {"bursts": 5}, ("split", "slack"): {"bursts": 7}},
        }
        made = self.best(plan, kept)
        assert made is not None
        found = {unit.models[0].model: served(unit) for unit in made.placement.units}
        assert found == {"a": (["one"], "free"), "b": (["split"], "slack")}

    def test_nothing_is_taken_with_which_some_workload_is_worse(self, plan: ClusterPlan) -> None:
        ways = [("one", "free"), ("split", "slack")]
        worse = {("split", ""): {"bursts": 2}} | {way: {"bursts": 10, DECLARED.name: 9} for way in ways}
        assert self.best(plan, {"a": worse}) is None

    def test_a_plan_that_keeps_all_is_not_tried_further(self, plan: ClusterPlan) -> None:
        tried: list[str] = []
        assert self.best(plan, {}, tried) is None
        assert tried == [DECLARED.name, "bursts"]
