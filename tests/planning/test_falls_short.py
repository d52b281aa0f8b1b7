"""Where the simulation does not bear the estimate out."""

from __future__ import annotations

from pathlib import Path

from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.planning.place.prediction import Trial, falls_short, predict
from placement.cluster import Cluster, Node
from placement.demand import Demand
from placement.objective import Objective
from placement.planner import PlanOptions, plan_cluster


def demand(rate: float, ttft: float) -> Demand:
    return Demand(
        "m",
        planned_architecture("llama-7b", Path()),
        rate=rate,
        prompt_tokens=200,
        output_tokens=100,
        slo_ttft=ttft,
        slo_tpot=0.1,
    )


def short(rate: float, ttft: float) -> list[str]:
    cluster, memory = Cluster((Node("A100-80GB", 1),)), {"A100-80GB": device("A100-80GB").memory_bytes}
    plan = plan_cluster([demand(rate, ttft)], cluster, Roofline(), memory, PlanOptions(objective=Objective("slo")))
    return falls_short(plan, predict(plan, Roofline(), Trial(60.0)))


def test_an_easy_load_is_borne_out() -> None:
    assert short(1.0, ttft=2.0) == []


def test_a_model_that_is_late_in_simulation_is_named() -> None:
    assert short(1.0, ttft=0.001) == ["m"]
