"""Where memory decides which models are awake on GPUs, what is simulated is what is deployed."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.config import Fleet, FleetError, parse_fleet
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.planning.candidates.resident_units import NoUnitError
from muxserve.planning.demand.demands import cluster_of, demands_of, memory_of
from muxserve.planning.place.prediction import Simulated
from muxserve.planning.place.sleeping import as_deployed
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.gpus import pretended_gpus
from muxserve.planning.specs.residency import residency_of
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.simulator import mode_of
from muxserve.spec import ResidencySpec
from placement import Machine
from placement.memory import MemoryRules

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
MACHINE = Machine(cores=16, memory_bytes=256 << 30)
NAMES = ("arithmetic", "atlas", "frontdesk")
# Two of the three models have room at a time.
LIMIT = "memory: {limit: 8GiB}"


def declared(engines: tuple[str, ...], *more: str, limit: str = LIMIT) -> Fleet:
    models = [
        f"  - {{name: {name}, path: {MODELS / name}{'' if shape == 'auto' else f', engines: {shape}'}}}"
        for name, shape in zip(NAMES, engines, strict=False)
    ]
    head = ["cluster: {gpus: 1, gpu_type: H100}", limit, *more, "models:"]
    return parse_fleet("\n".join([*head, *models]), "fleet.yaml", Path())


def deployed(fleet: Fleet) -> tuple[list[ResolvedUnit], dict[str, ResidencySpec]]:
    plans = FleetPlanner(fleet, MACHINE, lambda: pretended_gpus(fleet)).at_start()
    return plans, residency_of(fleet, plans, MACHINE)


def simulated(fleet: Fleet) -> Simulated:
    cluster = cluster_of(fleet)
    assert cluster is not None
    demands = demands_of(fleet, Path(), gpus=memory_of(cluster).items())
    return as_deployed(fleet, demands, cluster, Surroundings(MemoryRules.served(fleet.cluster.gpu_memory)))


@pytest.mark.parametrize("policy", ["", "slack", "adbs", "free", "fcfs"])
@pytest.mark.parametrize(
    "engines",
    [
        ("auto", "auto", "auto"),
        ("split", "split", "split"),
        ("one", "one", "one"),
        ("one", "split", "auto"),
        ("auto",),
        ("split",),
    ],
    ids=["auto", "split", "one", "mixed", "alone", "alone and split"],
)
def test_engines_policy_shares_and_memory_are_those_of_the_units_that_are_started(
    engines: tuple[str, ...], policy: str
) -> None:
    fleet = declared(engines, *([f"policy: {policy}"] if policy else []))
    (plan,), specs = deployed(fleet)
    made = simulated(fleet)
    (unit,) = made.units(mode_of("muxserve"))
    assert unit.policy == plan.policy
    assert plan.gpu is not None
    for demand in plan.demands:
        model = next(each for each in unit.models if each.name == demand.name)
        share = plan.gpu.shares[demand.name]
        own = model.profile.engines
        assert own.both == demand.one_engine
        assert (own.prefill_share, own.decode_share) == (share.prefill, share.decode)
        step = plan.fleet.model(demand.name)
        assert (own.max_num_seqs, own.max_num_batched_tokens) == (step.max_num_seqs, step.max_num_batched_tokens)
    live, planned = specs["u0"], made.residency["u0"]
    assert planned.turns == live.turns
    assert planned.resting == live.resting
    assert {n: (c.bytes, c.seconds) for n, c in planned.models.items()} == {
        n: (c.bytes, c.seconds) for n, c in live.models.items()
    }
    assert abs(planned.rules.limit - live.rules.limit) <= 1
    # Page tables of the engines are not planned, and the pools are a little smaller for them.
    assert planned.rules.fixed == pytest.approx(live.rules.fixed, rel=0.02)


def test_one_engine_with_small_steps_and_no_shares_unless_the_file_says_otherwise() -> None:
    (plan,), _ = deployed(declared(("auto", "auto", "auto")))
    assert plan.policy == "free"
    assert [demand.one_engine for demand in plan.demands] == [True] * 3
    assert {(m.max_num_seqs, m.max_num_batched_tokens) for m in plan.fleet.models} == {(256, 2048)}
    assert plan.gpu is not None
    assert not plan.gpu.has_percentages
    (plan,), _ = deployed(declared(("auto", "auto", "split")))
    assert plan.policy == "slack"
    assert [demand.one_engine for demand in plan.demands] == [True, True, False]


@pytest.mark.parametrize("limit", ["4GiB", "60GiB", "79GiB"])
def test_the_limit_of_the_file_goes_before_the_usual_part_of_a_gpu(limit: str) -> None:
    fleet = declared(("auto",) * 3, limit=f"memory: {{limit: {limit}}}")
    _, specs = deployed(fleet)
    assert simulated(fleet).residency["u0"].rules.limit == specs["u0"].rules.limit == int(limit[:-3]) << 30


def test_more_than_a_gpu_has_is_no_limit() -> None:
    fleet = declared(("auto",) * 3, limit="memory: {limit: 81GiB}")
    words = r"81 GiB are more than a GPU has \(79.65 GiB\); it is of each GPU"
    with pytest.raises(FleetError, match=words):
        deployed(fleet)
    with pytest.raises(NoUnitError, match=words):
        simulated(fleet)
