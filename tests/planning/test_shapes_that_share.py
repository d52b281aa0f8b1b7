"""Models of one engine share GPUs with others, of one engine or of two, and with enough memory for what they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.config import load_fleet, parse_fleet
from muxserve.costs.roofline import Roofline
from muxserve.gpu.nvml import Gpu, GpuMachine
from muxserve.planning.candidates.ways import MIXED, WAYS, ways_of
from muxserve.planning.demand.demands import cluster_of
from muxserve.planning.planner import PlannedFleet, Planner, options_of
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.plan_file import save_plan
from muxserve.planning.specs.unit_specs import planned_unit
from muxserve.spec.unit import SHARE_STEPS
from placement import Machine
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.engines import ShareRules

ROOT = Path(__file__).resolve().parent.parent.parent

MODEL = "architecture: llama-2-7b, rate: 1, slo: {{ ttft_ms: 1000, tpot_ms: 80 }}{more}"


def planned(tmp_path: Path, *engines: str, gpus: int = 1, robust: bool = False, keys: str = "") -> PlannedFleet:
    """A plan for 7B models with these `engines`; empty: the file says nothing."""
    models = [
        f"  - {{ name: m{number}, {MODEL.format(more=f', engines: {shape}' if shape else '')} }}\n"
        for number, shape in enumerate(engines)
    ]
    file = tmp_path / "fleet.yaml"
    file.write_text(f"cluster: {{ gpus: {gpus}, gpu_type: A100-80GB{keys} }}\nmodels:\n{''.join(models)}")
    fleet = load_fleet(file, serving=False)
    cluster = cluster_of(fleet)
    assert cluster is not None
    planner = Planner(file, fleet, Roofline(), options_of(fleet, "muxserve"), simulate=20.0, robust=robust)
    return planner.on_gpus(cluster)


def shapes(found: PlannedFleet) -> list[dict[str, str]]:
    return [{each.model: each.shape for each in unit.models} for unit in found.plan.placement.units]


@pytest.mark.parametrize("engines", [("one", "one"), ("one", "split"), ("split", "one", "one")])
def test_what_the_file_says_of_engines_holds_in_a_shared_unit(tmp_path: Path, engines: tuple[str, ...]) -> None:
    found = planned(tmp_path, *engines)
    assert not found.plan.missing
    assert shapes(found) == [{f"m{number}": shape for number, shape in enumerate(engines)}]
    assert found.simulated is not None
    assert found.simulated.summary.overall.slo["all"] > 0.99


def test_without_mps_no_engine_has_a_share_of_the_sms(tmp_path: Path) -> None:
    found = planned(tmp_path, "split", "split", keys=", mps: off")
    shares = [
        share
        for rival in found.rivals
        for unit in rival.plan.placement.units
        for model in unit.models
        for share in (model.prefill_share, model.decode_share)
    ]
    assert set(shares) == {1.0}
    ways = {way for rival in found.rivals for way in (rival.way, *rival.alike)}
    assert "turns" in ways
    assert not {"shared", "shares per lease"} & ways


def test_models_of_which_the_file_says_nothing_are_tried_with_one_engine_on_shared_gpus(tmp_path: Path) -> None:
    found = planned(tmp_path, "", "")
    assert not found.plan.missing
    tried = {way for each in found.rivals for way in (each.way, *each.alike)}
    assert {"free", "one each", "shared"} & tried
    (free,) = [each for each in found.rivals if each.is_way("free")]
    (unit,) = free.plan.placement.units
    assert [each.shape for each in unit.models] == ["one", "one"]
    assert unit.policy == "free"
    # With one GPU nothing is simpler than that.
    assert free.is_way("even")


def test_one_engine_leaves_more_memory_than_two(tmp_path: Path) -> None:
    one, two = planned(tmp_path, "one", "one"), planned(tmp_path, "split", "split")
    own = [found.plan.estimates[0].models[0].memory.own for found in (one, two)]
    # A context and graphs of 500 MiB each, and activations.
    assert own[1] - own[0] >= 1000 << 20
    assert one.plan.placement.units[0].kv_bytes - two.plan.placement.units[0].kv_bytes == 2 * (own[1] - own[0])


def test_a_model_that_has_a_gpu_to_itself_waits_for_nobody(tmp_path: Path) -> None:
    found = planned(tmp_path, "one", "one", gpus=2)
    alone = [unit for unit in found.plan.placement.units if len(unit.models) == 1]
    assert all(unit.policy == "free" for unit in alone)


def test_the_fleets_own_way_comes_first_and_layouts_only_where_they_may_help(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models:\n  - {{ name: a, {MODEL.format(more='')}, engines: split }}\n")
    fleet = load_fleet(file, serving=False)
    ways = list(ways_of(fleet, short=False, elastic=True))
    assert ways[:2] == ["shares per lease", "shared"]
    assert all(WAYS[way].layout is None for way in ways)
    # Without green contexts there are percentages, which are for who asks for them.
    assert set(ways_of(fleet, short=True, elastic=False)) == set(WAYS) - {"shares per lease", "shared", MIXED}
    percent = fleet.model_copy(update={"cluster": fleet.cluster.model_copy(update={"sm_sharing": "mps"})})
    assert set(ways_of(percent, short=True, elastic=False)) == set(WAYS) - {"shares per lease", MIXED}


@pytest.mark.parametrize(
    ("cluster", "rules"),
    [
        ("gpus: 1", ShareRules(1, SHARE_STEPS)),
        ("gpus: 1, sm_sharing: green_contexts", ShareRules(None, SHARE_STEPS)),
        ("gpus: 1, sm_sharing: mps", ShareRules(None, None)),
    ],
)
def test_engines_share_gpus_in_plans_as_they_do_where_these_work(
    tmp_path: Path, cluster: str, rules: ShareRules
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"cluster: {{ {cluster}, gpu_type: A100-80GB }}\nmodels:\n  - {{ name: a, {MODEL.format(more='')} }}\n"
    )
    assert options_of(load_fleet(file, serving=False), "muxserve").sharing == rules


def test_a_plan_of_models_of_one_engine_that_share_a_gpu_is_what_is_deployed(tmp_path: Path) -> None:
    text = "cluster: { gpus: 1 }\nmodels:\n" + "".join(
        f"  - {{ name: {name}, path: models/{name}, rate: 4 }}\n" for name in ("arithmetic", "atlas")
    )
    declared = parse_fleet(text, "fleet.yaml", ROOT / "configs", {})
    gpu = Gpu(0, "GPU-0", "NVIDIA H200", 143771 << 20, 500 << 20)
    placed = tuple(PlacedModel(name, 4.0, 1.0, 1.0, "one") for name in ("arithmetic", "atlas"))
    unit = PlacedUnit("unit0", "H200-141GB", (0,), placed, 1 << 30, policy="free")
    save_plan(Placement(Cluster((Node("H200-141GB", 1),)), (unit,)), tmp_path / "plan.yaml")
    (made,) = FleetPlanner(declared, Machine(4, 16 << 30, 4 << 30), lambda: GpuMachine((gpu,))).at_start(
        tmp_path / "plan.yaml"
    )
    spec = planned_unit(made, "/run").unit_spec
    assert spec.policy == "free"
    assert {model.name: model.shape for model in spec.models} == {"arithmetic": "one", "atlas": "one"}
