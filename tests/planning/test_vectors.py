"""Models that answer with vectors generate nothing: in plans and simulations they prefill, and have no TPOT."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import load_fleet
from muxserve.planning.specs.plan_file import load_plan

ROOT = Path(__file__).resolve().parents[2]
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
KINDS = {
    "encoder": "architecture: bert.json",
    "causal": f"path: {ROOT}/configs/models/atlas, engine_args: {{ runner: pooling }}",
}


def fleet(path: Path, kind: str, more: str = "") -> Path:
    (path / "bert.json").write_text(json.dumps(BERT))
    file = path / "fleet.yaml"
    file.write_text(
        "cluster: { gpus: 2, gpu_type: a100 }\nmodels:\n"
        f"  - {{ name: vectors, {KINDS[kind]}, rate: 4{more}, workload: {{ prompt_tokens: 100 }} }}\n"
        "  - { name: text, architecture: llama-2-7b, rate: 1, workload: { prompt_tokens: 100, output_tokens: 20 } }\n"
    )
    return file


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--seconds", "0", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["muxserve", "spatial", "temporal"])
def test_a_simulation_gives_them_no_tokens_and_no_time_per_token(tmp_path: Path, kind: str, mode: str) -> None:
    load = "poisson:rate=5,duration=20,prompt=100,output=64"
    data = run("simulate", fleet(tmp_path, kind), "--workload", load, "--mode", mode)
    (summary,) = data["runs"].values()
    vectors, text = summary["models"]["vectors"], summary["models"]["text"]
    assert vectors["completed"] == vectors["requests"] > 10
    assert vectors["output_tokens"] == 0
    assert vectors["output_tokens_per_second"] == 0.0
    assert vectors["tpot"] is None
    assert vectors["latency_per_token"] is None
    assert vectors["ttft"] == vectors["latency"]
    assert vectors["attainment"].keys() == {"latency"}
    assert text["output_tokens"] == 64 * text["completed"]
    phases = [(e["model"], e["phase"]) for unit in summary["extra"]["units"] for e in unit["engines"] if e["steps"]]
    assert ("vectors", "decode") not in phases


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_gives_them_no_time_per_token_and_no_engine_of_both_phases(tmp_path: Path, kind: str) -> None:
    file, out = fleet(tmp_path, kind, ", slo: { ttft_ms: 500 }"), tmp_path / "plan.yaml"
    data = run("plan", file, "--simulate", "60", "--no-robust", "-o", out)
    models = {model["model"]: model for unit in data["units"] for model in unit["models"]}
    assert models["vectors"]["tpot"] is None
    assert models["vectors"]["simulated"]["tpot_mean"] is None
    assert models["vectors"]["simulated"]["ttft_mean"] > 0
    assert models["text"]["tpot"] > 0
    units = load_plan(out, load_fleet(file, serving=False)).units
    assert {model.shape for unit in units for model in unit.models if model.model == "vectors"} == {"split"}
    shown = CliRunner().invoke(app, ["plan", str(file), "--simulate", "0", "--seconds", "0"]).stdout
    (row,) = (line for line in shown.splitlines() if " vectors " in line)
    assert " - " in row


def test_a_plan_of_nothing_else_shows_what_it_serves(tmp_path: Path) -> None:
    file = fleet(tmp_path, "encoder")
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    data = run("plan", file, "--no-robust")
    assert data["simulated"]["throughput"] == pytest.approx(4.0, rel=0.2)
