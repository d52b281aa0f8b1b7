"""Fleets on GPUs whose models need not all be awake, as `simulate --mode prism` has them."""

from __future__ import annotations

import pytest

from muxserve.costs import ModelArchitecture
from muxserve.costs.calibration import host_bandwidth
from muxserve.planning.elastic import GROWTH_PART, NoUnitError, elastic_placement, residency_on
from placement.cluster import Cluster, Node
from placement.demand import Demand
from placement.memory import MemoryRules

RULES = MemoryRules()


def demand(name: str, layers: int, hidden: int = 4096) -> Demand:
    architecture = ModelArchitecture(
        name="LlamaForCausalLM",
        layers=layers,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=hidden,
        intermediate=14336,
        vocab=128256,
        max_len=4096,
        default_max_len=4096,
        dtype="bfloat16",
    )
    return Demand(name, architecture, rate=1.0, max_num_seqs=64, slo_ttft=2.0)


SMALL, LARGE = [demand(f"small{n}", 32) for n in range(6)], demand("large", 160)


def cluster(gpus: int) -> Cluster:
    return Cluster((Node("H100-80GB", gpus),))


def test_units_may_have_every_model_that_is_split_as_they_are() -> None:
    made = elastic_placement([*SMALL, LARGE], cluster(6), RULES)
    assert [len(unit.devices) for unit in made.units] == [2, 1, 1, 1, 1]
    assert [each.model for each in made.units[0].models] == ["large"]
    assert all([each.model for each in unit.models] == [each.name for each in SMALL] for unit in made.units[1:])
    assert sorted(number for unit in made.units for number in unit.devices) == list(range(6))


def test_too_few_gpus_and_too_large_models_are_refused() -> None:
    with pytest.raises(NoUnitError, match="takes 3 GPUs, and there are 2"):
        elastic_placement([*SMALL, LARGE], cluster(2), RULES)
    with pytest.raises(NoUnitError, match="huge is too large for 2 GPUs of a machine"):
        elastic_placement([demand("huge", 400)], cluster(2), RULES)
    two = Cluster((Node("H100-80GB", 1), Node("A100-80GB", 1)))
    with pytest.raises(NoUnitError, match="GPUs of one type"):
        elastic_placement(SMALL, two, RULES)


def test_a_wake_copies_the_weights_over_the_links_of_all_gpus() -> None:
    (unit,) = elastic_placement([LARGE], cluster(2), RULES).units
    residency = residency_on(unit, [LARGE], RULES, wake_seconds=0.5)
    costs = residency.models["large"]
    half = LARGE.architecture.weight_bytes("bfloat16") / 2
    assert costs.seconds == pytest.approx(0.5 + half / host_bandwidth("H100-80GB"))
    assert costs.bytes > half
    assert costs.ttft == 2.0
    assert residency.elastic
    assert residency.rules.fixed == int(GROWTH_PART * unit.kv_bytes)
    assert host_bandwidth("A100-80GB") == host_bandwidth("H100-80GB") / 2
