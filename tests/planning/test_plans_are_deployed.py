"""What a plan file is simulated as, `muxserve deploy --plan` serves; and what that would refuse, `plan` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.cli.simulate_places import places_of
from muxserve.config import FleetError, load_fleet
from muxserve.costs.roofline import Roofline
from muxserve.planning.demand.known_models import BUILT_IN
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.gpus import pretended_gpus
from muxserve.planning.specs.plan_file import load_plan, save_plan
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.simulator import SimUnit, mode_of
from muxserve.spec import ShapeName
from placement import Machine
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
MACHINE = Machine(cores=16, memory_bytes=512 << 30)
SLO = "slo: { ttft_ms: 1000, tpot_ms: 100 }"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **BUILT_IN["llama-3.1-8b"]}


def checkpoint(directory: Path, **more: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**LLAMA, **more}))
    return directory


def fleet_file(directory: Path, cluster: str, *models: str) -> Path:
    file = directory / "fleet.yaml"
    file.write_text("\n".join([f"cluster: {{ {cluster} }}", "models:", *(f"  - {{ {model} }}" for model in models)]))
    return file


def deployed(file: Path, plan: Path) -> list[ResolvedUnit]:
    fleet = load_fleet(file, serving=False)
    return FleetPlanner(fleet, MACHINE, lambda: pretended_gpus(fleet)).at_start(plan)


def simulated(file: Path, plan: Path) -> list[SimUnit]:
    places = places_of(file, None, None, None, plan, Roofline())
    return places.placed("muxserve").units(mode_of("muxserve"))


def planned(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.mark.parametrize("mps", ["auto", "off"])
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("policy", ["", "slack", "adbs", "free"])
def test_shares_and_policy_of_a_unit(tmp_path: Path, mps: str, gpus: int, policy: str) -> None:
    """The fleet file's shares go before the plan's. Without MPS ranks would not compute at the same time, so that one
    engine does."""
    file = fleet_file(
        tmp_path,
        f"gpus: {gpus}, gpu_type: H100, mps: {mps}",
        f"name: a, path: {MODELS / 'atlas'}, engines: split, sm: {{ prefill: 0.3, decode: 0.2 }}",
        f"name: b, path: {MODELS / 'frontdesk'}, engines: one, sm: {{ decode: 0.7 }}",
    )
    models = (PlacedModel("a", 1.0, 0.6, 0.4), PlacedModel("b", 1.0, 1.0, 1.0, "one"))
    unit = PlacedUnit("unit0", "H100-80GB", tuple(range(gpus)), models, 8 << 30, policy=policy)
    save_plan(Placement(Cluster((Node("H100-80GB", gpus),)), (unit,)), tmp_path / "plan.yaml")
    (live,), (made,) = deployed(file, tmp_path / "plan.yaml"), simulated(file, tmp_path / "plan.yaml")
    assert live.gpu is not None
    assert made.policy == live.policy == ("fcfs" if (mps, gpus) == ("off", 2) else policy or "slack")
    for model in made.models:
        own, share = model.profile.engines, live.gpu.shares[model.name]
        assert (own.prefill_share, own.decode_share) == (share.prefill, share.decode)
    assert (live.gpu.shares["a"].prefill, live.gpu.shares["a"].decode) == (0.3, 0.2)


@pytest.mark.parametrize(
    ("head", "more", "why"),
    [
        ("memory: auto\n", "", "memory: decides at run time who is awake, and a plan file beforehand"),
        ("", ", replicas: 2", "the plan has 1 replica of a, the fleet file 2"),
        ("", ", replicas: { min: 2, max: 3 }", "the plan has 1 replica of a, the fleet file 2 to 3"),
    ],
)
def test_a_plan_that_is_not_served_is_not_simulated(tmp_path: Path, head: str, more: str, why: str) -> None:
    file = fleet_file(tmp_path, "gpus: 1, gpu_type: H100", f"name: a, path: {MODELS / 'atlas'}{more}")
    file.write_text(head + file.read_text())
    unit = PlacedUnit("unit0", "H100-80GB", (0,), (PlacedModel("a", 1.0, 1.0, 1.0, "one"),), 8 << 30)
    save_plan(Placement(Cluster((Node("H100-80GB", 1),)), (unit,)), tmp_path / "plan.yaml")
    for ask in (deployed, simulated):
        with pytest.raises(FleetError, match=why):
            ask(file, tmp_path / "plan.yaml")


@pytest.mark.parametrize(("size", "kv"), [("1GiB", 1 << 30), ("auto", 8 << 30)])
@pytest.mark.parametrize("shape", ["one", "split"])
def test_a_unit_on_some_of_the_fleet_s_gpus_with_the_pool_of_the_file(
    tmp_path: Path, size: str, kv: int, shape: ShapeName
) -> None:
    """As `--objective gpus` plans it. One engine that is alone has all SMs, and nobody withholds a lease."""
    file = fleet_file(tmp_path, "gpus: 3, gpu_type: H100", f"name: a, path: {MODELS / 'atlas'}")
    file.write_text(f"kv_pool: {{ size: {size} }}\n{file.read_text()}")
    unit = PlacedUnit("unit0", "H100-80GB", (1,), (PlacedModel("a", 1.0, 0.6, 0.3, shape),), 8 << 30)
    save_plan(Placement(Cluster((Node("H100-80GB", 3),)), (unit,)), tmp_path / "plan.yaml")
    (live,), (made,) = deployed(file, tmp_path / "plan.yaml"), simulated(file, tmp_path / "plan.yaml")
    assert live.gpu is not None
    assert (live.gpu.ranks, made.policy) == (1, live.policy)
    if size != "auto":
        assert live.unit.kv_bytes == pytest.approx(kv, rel=0.001)
    assert sum(pool.pages * pool.page_bytes for pool in made.pools) == pytest.approx(kv, rel=0.001)
    own, share = made.models[0].profile.engines, live.gpu.shares["a"]
    assert (own.prefill_share, own.decode_share) == (share.prefill, share.decode)


def test_a_pool_that_a_plan_leaves_no_room_for_is_told(tmp_path: Path) -> None:
    file = fleet_file(tmp_path, "gpus: 1, gpu_type: H100", f"name: a, path: {checkpoint(tmp_path / 'llama')}, {SLO}")
    file.write_text(f"kv_pool: {{ size: 70GiB }}\n{file.read_text()}")
    assert "`muxserve deploy` refuses kv_pool.size: unit0 has " in planned(file, "--seconds", 0, "--simulate", 0)


def test_graphs_for_every_share_have_room(tmp_path: Path) -> None:
    """Engines that change their share between leases have CUDA graphs for each, of which deploy keeps the memory."""
    size = f"path: {checkpoint(tmp_path / 'llama')}, engines: split, rate: 2, {SLO}"
    cluster = "gpus: 1, gpu_type: H100, sm_sharing: green_contexts"
    file, plan = fleet_file(tmp_path, cluster, f"name: a, {size}", f"name: b, {size}"), tmp_path / "plan.yaml"
    planned(file, "--seconds", 0, "--simulate", 0, "-o", plan)
    (unit,) = load_plan(plan).units
    (live,) = deployed(file, plan)
    assert live.policy == "slack"
    # Page tables of the engines are not planned.
    assert live.unit.kv_bytes == pytest.approx(unit.kv_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("config", "keys", "why"),
    [
        ({}, "dtype: float32", "FlashAttention has no float32"),
        ({}, "engine_args: { kv_cache_dtype: fp8 }", "engines on GPUs has 16-bit pages only"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "rate: 2", "is served on CPU only"),
    ],
)
def test_what_deploy_refuses_is_said(tmp_path: Path, config: dict[str, object], keys: str, why: str) -> None:
    size = f"path: {checkpoint(tmp_path / 'llama', **config)}, {SLO}, {keys}"
    file = fleet_file(tmp_path, "gpus: 1, gpu_type: H100", f"name: a, {size}")
    err = planned(file, "--seconds", 0, "--simulate", 0)
    assert "`muxserve deploy` refuses a on GPUs: " in err
    assert why in err


def test_nothing_is_said_of_what_can_be_served(tmp_path: Path) -> None:
    file = fleet_file(tmp_path, "gpus: 1, gpu_type: H100", f"name: a, path: {checkpoint(tmp_path / 'llama')}, {SLO}")
    assert "refuses" not in planned(file, "--seconds", 0, "--simulate", 0)
