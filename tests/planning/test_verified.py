"""Plans that fall short in simulation are made again with spare, and only as often as that helps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.planning.place.prediction import SPARE, Trial, falls_short, predict, restated, verified
from placement.cluster import Cluster, Node
from placement.demand import Demand
from placement.objective import Objective
from placement.planner import ClusterPlan, PlanOptions, plan_cluster

A100 = "A100-80GB"


def demand(name: str, rate: float, ttft: float = 1.0, tpot: float = 0.06, like: str = "llama-7b") -> Demand:
    return Demand(
        name,
        planned_architecture(like, Path()),
        rate=rate,
        prompt_tokens=200,
        output_tokens=150,
        slo_ttft=ttft,
        slo_tpot=tpot,
    )


def planner(gpus: int, objective: Literal["gpus", "slo"] = "gpus"):
    cluster, memory = Cluster((Node(A100, gpus),)), {A100: device(A100).memory_bytes}

    def plan(demands: Sequence[Demand]) -> ClusterPlan:
        return plan_cluster(demands, cluster, Roofline(), memory, PlanOptions(objective=Objective(objective)))

    return plan


def simulated(plan: ClusterPlan):
    return predict(plan, Roofline(), Trial(60.0))


def test_a_plan_that_is_borne_out_is_left_alone() -> None:
    demands = [demand("a", 1.0), demand("b", 0.5)]
    found = verified(demands, planner(4), simulated)
    assert found.spare == {}
    assert found.plan.demands == tuple(demands)


@pytest.mark.slow
def test_a_plan_close_to_what_the_gpus_can_do_gets_more_of_them() -> None:
    demands = [demand("a", 0.43, 0.3, 0.03), demand("b", 0.21, 0.3, 0.03, "llama-13b")]
    plan = planner(8)
    first = plan(demands)
    short = falls_short(first, simulated(first))
    assert first.meets
    assert short, "this load is to be one that the estimate is too hopeful for"
    found = verified(demands, plan, simulated)
    assert falls_short(found.plan, found.prediction) == []
    assert found.plan.devices > first.devices
    assert set(found.spare) >= set(short)
    # What is asked and served is told of the true rates, and replicas take them all.
    assert sum(m.rate for unit in found.plan.placement.units for m in unit.models) == sum(d.rate for d in demands)
    assert found.plan.meets


def test_what_cannot_be_mended_ends_with_the_best_that_was_found() -> None:
    demands = [demand("late", 1.0, ttft=1e-4)]
    asked: list[float] = []
    plan = planner(1, "slo")

    def counted(demands: Sequence[Demand]) -> ClusterPlan:
        asked.append(demands[0].rate)
        return plan(demands)

    found = verified(demands, counted, simulated)
    assert len(asked) <= 5
    assert found.plan.demands == tuple(demands)


def test_scaling_back_keeps_places_and_shares() -> None:
    demands = [demand("a", 2.0), demand("b", 1.0)]
    raised = [demand("a", 2.0 * SPARE), demand("b", 1.0)]
    made = planner(4)(raised)
    back = restated(made, demands, {"a": SPARE})
    for before, after in zip(made.placement.units, back.placement.units, strict=True):
        assert (before.devices, before.kv_bytes) == (after.devices, after.kv_bytes)
        for one, other in zip(before.models, after.models, strict=True):
            assert (one.model, one.prefill_share, one.decode_share) == (
                other.model,
                other.prefill_share,
                other.decode_share,
            )
            assert other.rate == one.rate / (SPARE if one.model == "a" else 1.0)
    assert back.throughput <= 3.0 + 1e-9
