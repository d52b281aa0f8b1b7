"""An option that changes nothing is an error of the offline commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.planning.specs.plan_file import save_plan
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement

ROOT = Path(__file__).resolve().parents[2]
LOAD = "even:rate=1,duration=3,prompt=8,output=4"
GPUS = "cluster: { gpus: 1, gpu_type: a100 }\n"
MODEL = "models:\n  - { name: m, architecture: llama-2-7b, rate: 1 }\n"
CPU = f"kv_pool: {{ size: 64MiB }}\nmodels:\n  - {{ name: m, path: {ROOT}/configs/models/atlas, rate: 1 }}\n"


@pytest.fixture
def on_gpus(tmp_path: Path) -> Path:
    (tmp_path / "gpus.yaml").write_text(GPUS + MODEL)
    return tmp_path / "gpus.yaml"


@pytest.fixture
def on_cpu(tmp_path: Path) -> Path:
    (tmp_path / "cpu.yaml").write_text(CPU)
    return tmp_path / "cpu.yaml"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    unit = PlacedUnit("unit0", "A100-80GB", (0,), (PlacedModel("m", 1.0, 1.0, 1.0),), 8 << 30)
    save_plan(Placement(Cluster((Node("A100-80GB", 1),)), (unit,)), tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_an_option_that_never_was_is_unknown() -> None:
    assert "No such option: --max-prompts" in refused("simulate", "--max-prompts", 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sweep", "gpus=1..2", "--gpus", "2"], "--gpus has no effect with --sweep"),
        (["--sweep", "gpus=1..2", "--no-robust"], "--robust has no effect with --sweep"),
        (["--mode", "spatial", "--robust"], "--robust has no effect where no other way to serve is compared"),
        (["--simulate", "0", "--no-robust"], "--robust has no effect if nothing is simulated"),
        (["--nodes", "1x1:a100", "--gpu-type", "h100"], "--gpu-type has no effect"),
    ],
)
def test_options_of_plan(on_gpus: Path, arguments: list[str], says: str) -> None:
    assert says in refused("plan", on_gpus, "--seconds", "0", *arguments)


@pytest.mark.parametrize(("option", "value"), [("--seconds", ["3"]), ("--no-robust", [])])
def test_options_of_plan_on_a_cpu(on_cpu: Path, option: str, value: list[str]) -> None:
    assert "has no effect on a CPU" in refused("plan", on_cpu, option, *value)


def test_options_of_simulate(on_gpus: Path, on_cpu: Path, plan: Path) -> None:
    load = ["--workload", LOAD]
    assert "--plan has no effect on modes" in refused("simulate", on_gpus, *load, "--plan", plan, "--mode", "spatial")
    assert "--seconds has no effect with --plan" in refused("simulate", on_gpus, *load, "--plan", plan, "--seconds", 1)
    assert "--seconds has no effect on a CPU" in refused("simulate", on_cpu, *load, "--seconds", 1)


def test_where_they_have_an_effect_they_are_taken(on_gpus: Path, plan: Path) -> None:
    for arguments in (
        ["plan", on_gpus, "--seconds", 0, "--simulate", 5, "--no-robust"],
        ["simulate", on_gpus, "--workload", f"{LOAD},max_prompt=4", "--plan", plan, "--seed", 3],
        ["simulate", on_gpus, "--workload", LOAD, "--plan", plan, "--mode", "muxserve,spatial", "--seconds", 0],
    ):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
