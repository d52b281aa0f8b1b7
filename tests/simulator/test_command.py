"""`muxserve simulate`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from muxserve.cli.app import app
from muxserve.cli.simulate_places import Places
from muxserve.planning.place import window
from muxserve.planning.specs import unit_specs
from muxserve.planning.specs.plan_file import save_plan
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.scaling import ScalingRules
from muxserve.simulator import MODES
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement

ROOT = Path(__file__).resolve().parents[2]
FLEET = """
cluster: { gpus: 4, gpu_type: A100-80GB }
models:
  - name: chat
    architecture: llama-2-7b
    rate: 4
    slo: { ttft_ms: 1000, tpot_ms: 100 }
  - name: code
    architecture: llama-2-13b
    rate: 1
"""
LOAD = "poisson:rate=5,duration=10,seed=1"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return file


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of that fleet. Without one the command makes the one that `muxserve plan` makes, which takes nearly all of
    its time: `tests/planning/test_simulate_places.py` is about that."""
    directory = tmp_path_factory.mktemp("planned")
    file, plan = directory / "fleet.yaml", directory / "plan.yaml"
    file.write_text(FLEET)
    made = CliRunner().invoke(app, ["plan", str(file), "--seconds", "0", "--simulate", "0", "-o", str(plan)])
    assert made.exit_code == 0, made.output
    return plan


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.mark.slow
def test_modes_side_by_side(fleet: Path, planned: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    given = ("--mode", "muxserve,spatial", "--plan", planned)
    result = run(
        fleet,
        "--workload",
        f"{LOAD},max_prompt=900,max_output=200",
        *given,
        "--json",
        "--html",
        page,
        "--timeline",
        trace,
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["runs"]) == ["muxserve", "spatial"]
    for summary in report["runs"].values():
        assert summary["overall"]["completed"] == summary["overall"]["requests"] > 20
        assert set(summary["models"]) == {"chat", "code"}
        assert summary["extra"]["devices"] <= 4
        assert summary["extra"]["busy_device_seconds"] <= summary["extra"]["device_seconds"]
        assert summary["overall"]["attainment"]["latency"][-1] == 1.0
    assert "KV pages in use: spatial" in page.read_text()
    for mode in ("muxserve", "spatial"):
        assert json.loads((tmp_path / f"trace-{mode}.json").read_text())["traceEvents"]


def test_where_memory_decides_models_are_woken_and_put_to_sleep(tmp_path: Path) -> None:
    limit = 1600 << 20
    paths = [ROOT / "configs/models" / name for name in ("arithmetic", "atlas", "frontdesk") * 2]
    models = [f"  - {{name: m{n}, path: {path}, dtype: float32}}" for n, path in enumerate(paths)]
    file = tmp_path / "fleet.yaml"
    file.write_text("\n".join([f"memory: {{limit: {limit}}}", "kv_pool: {size: 32MiB}", "models:", *models]))
    load = "bursty-groups:rate=2,duration=30,prompt=32,output=8"
    result = run(file, "--workload", load, "--mode", "muxserve,spatial", "--json")
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)["runs"]
    for summary in runs.values():
        assert summary["overall"]["completed"] == summary["overall"]["requests"] > 20
    (unit,), (awake,) = (each["extra"]["units"] for each in runs.values())
    assert "residency" not in awake
    assert unit["residency"]["wakes"] >= unit["residency"]["sleeps"] > 0
    assert unit["residency"]["waited"] > 0
    assert unit["residency"]["peak_bytes"] < limit
    shown = run(file, "--workload", load)
    assert f"{unit['residency']['wakes']} wakes" in shown.stdout


@pytest.mark.slow
def test_the_report_says_which_models_have_one_engine(fleet: Path, tmp_path: Path) -> None:
    models = (PlacedModel("chat", 4, 0.5, 0.5, shape="one"), PlacedModel("code", 1, 0.5, 0.5))
    unit = PlacedUnit("u0", "A100-80GB", (0,), models, 16 << 30)
    save_plan(Placement(Cluster((Node("A100-80GB", 4),)), (unit,)), tmp_path / "plan.yaml")
    result = run(fleet, "--workload", LOAD, "--plan", tmp_path / "plan.yaml")
    assert result.exit_code == 0, result.output
    assert "- chat has one engine of both phases\n" in result.stdout
    assert "prefill and decode apart" not in result.stdout


def test_help_names_every_mode() -> None:
    result = run("--help")
    words = result.output.replace("\n", " ")
    assert [mode for mode in MODES if mode not in words] == []


def test_the_report_is_the_same_every_time(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the plan that it makes: of one device and few short requests, since plans are tried by simulating them."""
    monkeypatch.setattr(window, "_REQUESTS", 300)
    short = "\n    workload: { prompt_tokens: 200, output_tokens: 20 }\n    rate"
    fleet.write_text(FLEET.replace("gpus: 4", "gpus: 1").replace("\n    rate", short))
    given = (fleet, "--workload", f"{LOAD},max_output=100", "--seconds", "0", "--json")
    first = run(*given)
    assert first.exit_code == 0, first.output
    assert first.stdout == run(*given).stdout


def test_a_plan_file_is_followed(fleet: Path, planned: Path) -> None:
    result = run(fleet, "--workload", f"{LOAD},max_output=50", "--plan", planned)
    assert result.exit_code == 0, result.output
    assert "weighted requests/s" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mode", "magic"), "there is no mode 'magic'"),
        (("--mode", ","), "at least one is needed"),
        (("--gpu-type", "Z9", "--gpus", "2"), "Z9"),
        (("--plan", "/nowhere/plan.yaml"), "/nowhere/plan.yaml"),
        (("-o", "/nowhere/report.json"), "no directory /nowhere"),
        (("--costs", "/nowhere/profile.json"), "/nowhere/profile.json"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(Places, "placed", lambda *_: pytest.fail("mistakes are told before anything is placed"))
    result = run(fleet, "--workload", LOAD, *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_modes_are_compared_where_not_all_models_have_a_place(tmp_path: Path) -> None:
    models = [f"  - {{ name: m{n}, architecture: llama-3.1-8b, rate: 0.1 }}" for n in range(8)]
    file = tmp_path / "fleet.yaml"
    file.write_text("\n".join(["cluster: { gpus: 1, gpu_type: H100-80GB }", "models:", *models]))
    given = (file, "--workload", "bursty-groups:rate=1,duration=40,phase=10,lengths=64,seed=1", "--seconds", "0")
    result = run(*given, "--mode", "muxserve,temporal", "--json")
    assert result.exit_code == 1, result.output  # some were not answered
    for summary in json.loads(result.stdout)["runs"].values():
        assert summary["overall"]["failed"] > 0
        assert all("no unit serves" in error for error in summary["errors"])
    assert "muxserve placement has no place for" in " ".join(result.stderr.split())
    # With one mode there is nothing to compare.
    refused = run(*given, "--mode", "muxserve")
    assert refused.exit_code == 2
    assert "not every model has a place with muxserve placement" in " ".join(refused.output.split())


def test_requests_that_cannot_be_served_fail_the_command(fleet: Path, planned: Path) -> None:
    result = run(fleet, "--workload", "poisson:rate=5,duration=5,seed=1,prompt=100..8000,output=10", "--plan", planned)
    assert result.exit_code == 1, result.output
    assert "longer than the 4096 tokens of" in result.output


REPLICAS = """
cluster: { gpus: 3, gpu_type: A10 }
models:
  - name: chat
    architecture: llama-2-7b
    rate: 0.2
    replicas: { min: 1, max: 3 }
"""


def test_replicas_come_under_load_and_requests_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_specs, "ScalingRules", partial(ScalingRules, low=400, high=2000, hold=1.0))
    monkeypatch.setattr(unit_specs, "MigrationRules", partial(MigrationRules, 200, 400))
    file = tmp_path / "fleet.yaml"
    file.write_text(REPLICAS)
    load = ("--workload", "poisson:rate=4,duration=40,seed=1,max_prompt=400,max_output=400")
    plan, unit = tmp_path / "plan.yaml", PlacedUnit("u0", "A10", (0,), (PlacedModel("chat", 0.2, 0.6, 0.4),), 4 << 30)
    save_plan(Placement(Cluster((Node("A10", 3),)), (unit,)), plan)
    result = run(file, *load, "--priorities", "high=0.2", "--plan", plan, "--json")
    assert result.exit_code == 0, result.output
    extra = json.loads(result.stdout)["runs"]["muxserve"]["extra"]
    (together,) = extra["replicas"]
    assert together["model"] == "chat"
    assert together["peak"] == 3
    assert 1.0 < together["average"] <= 3.0
    assert together["moved"] > 0
    assert 0.0 < together["downtime"] < 1.0
    assert extra["devices"] == 3
    # Those that came later were not there from the beginning.
    assert extra["device_seconds"] < 3 * max(unit["pages"]["seconds"][-1] + 1 for unit in extra["units"])
    words = " ".join(run(file, *load, "--plan", plan).stdout.split())
    assert "chat: up to 3 replicas" in words
    for parts in ("high=nan", "high=inf", "high=-0.1", "high=0.6,normal=0.6"):
        wrong = run(file, *load, "--plan", plan, "--priorities", parts)
        assert wrong.exit_code == 2
        assert "--priorities: give parts of at least 0 that are at most 1 together" in wrong.stderr
    wrong = run(file, *load, "--priorities", "urgent=0.1")
    assert wrong.exit_code == 2
    assert "there is no priority level 'urgent'" in " ".join(wrong.output.split())
