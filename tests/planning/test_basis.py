"""What each model of a plan waits for most."""

from __future__ import annotations

import pytest

from muxserve.costs.roofline import Roofline
from muxserve.planning.report.basis import bottlenecks
from placement.cluster import Cluster, Node
from placement.demand import Demand
from placement.planner import PlanOptions, plan_cluster
from tests.costs.models import SEVEN_B, llama

GIB = 1 << 30
SMALL = llama(hidden=256, heads=8, kv_heads=8, intermediate=704, vocab=4096)


@pytest.mark.parametrize(
    ("demand", "gpus", "device", "bottleneck"),
    [
        (Demand("m", SEVEN_B, rate=2.0, prompt_tokens=200, output_tokens=300), 1, "A100-80GB", "memory bandwidth"),
        (Demand("m", SEVEN_B, rate=2.0, prompt_tokens=2000, output_tokens=2), 1, "A100-80GB", "compute"),
        (Demand("m", SEVEN_B, rate=9.0, prompt_tokens=1000, output_tokens=3000), 1, "A100-80GB", "KV room"),
        (Demand("m", SEVEN_B, rate=0.1, prompt_tokens=2000, output_tokens=2), 8, "L20-48GB", "communication"),
        (Demand("m", SMALL, rate=1.0, graphs="eager"), 1, "H100-80GB", "the host"),
    ],
)
def test_the_bottleneck_of_a_model_is_named(demand: Demand, gpus: int, device: str, bottleneck: str) -> None:
    cluster = Cluster((Node(device, gpus),))
    memory = {device: (4 if gpus > 1 else 80) * GIB}  # little enough for no fewer than all of them
    plan = plan_cluster([demand], cluster, Roofline(), memory, PlanOptions(mode="alone"))
    assert set(bottlenecks(plan).values()) == {bottleneck}
