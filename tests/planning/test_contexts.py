"""What no engine could serve is refused before anything is planned or simulated: requests longer than a context."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from muxserve.cli.app import app
from muxserve.config import load_fleet
from muxserve.costs.devices import device
from muxserve.planning.demand.demands import check_lengths, contexts_of, demands_of
from muxserve.planning.demand.known_models import BUILT_IN
from muxserve.workload import Context, TraceRequest, write_trace

GPUS = [("A100-80GB", device("A100-80GB").memory_bytes)]
LOAD = "even:rate=1,duration=4"


def write(path: Path, *models: str) -> Path:
    file = path / "fleet.yaml"
    file.write_text("\n".join(("cluster: { gpus: 1, gpu_type: a100 }", "models:", *models)) + "\n")
    return file


def model(more: str = "", name: str = "m", like: str = "llama-3.1-8b") -> str:
    return f"  - {{ name: {name}, architecture: {like}, rate: 1{more} }}"


def run(command: str, file: Path, *arguments: str) -> Result:
    given = ["--seconds", "0", *arguments]
    return CliRunner().invoke(app, [command, str(file), *given])


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        (", workload: { prompt_tokens: 140000 }", "prompt_tokens", "prompts of 140,000 tokens"),
        (", workload: { prompt_tokens: 131072 }", "prompt_tokens", "at most 131,071 do"),
        (", workload: { output_tokens: 131072 }", "output_tokens", "answers of 131,072 tokens"),
        (", workload: { prompt_tokens: 130000, output_tokens: 20000 }", "output_tokens", "at most 1,072 do"),
        (", max_len: 1000, workload: { prompt_tokens: 900, output_tokens: 200 }", "output_tokens", "max_len gives"),
    ],
)
def test_a_declared_workload_that_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, more: str, key: str, words: str
) -> None:
    file = write(tmp_path, model(name="fits"), model(more))
    for command in ("plan", "simulate"):
        result = run(command, file, *(["--workload", LOAD] if command == "simulate" else []))
        assert result.exit_code == 2, result.output
        assert f"{file}:4: models[1].workload.{key}: " in result.output
        assert words in result.output


def test_what_is_not_declared_is_made_to_fit(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **BUILT_IN["llama-2-7b"], "max_position_embeddings": 400}
    (tmp_path / "short.json").write_text(json.dumps(config))
    file = write(
        tmp_path,
        model(name="none", like="short.json"),
        model(", workload: { prompt_tokens: 300 }", "prompts", "short.json"),
        model(", workload: { output_tokens: 300 }", "answers", "short.json"),
        model(", max_len: 100", "limited"),
    )
    fleet = load_fleet(file, serving=False)
    demands = demands_of(fleet, tmp_path, gpus=GPUS)
    check_lengths(fleet, demands)
    assert [(each.prompt_tokens, each.output_tokens) for each in demands] == [
        (200, 200),
        (300, 100),
        (100, 300),
        (50, 50),
    ]
    assert contexts_of(demands)["limited"] == Context(100)


@pytest.mark.parametrize("lengths", ["prompt=140000,output=1", "prompt=131000,output=100"])
def test_a_generated_workload_of_which_nothing_fits_is_refused(tmp_path: Path, lengths: str) -> None:
    result = run("simulate", write(tmp_path, model()), "--workload", f"{LOAD},{lengths}")
    assert result.exit_code == 2, result.output
    assert "no request to m fits into its context of 131,072 tokens" in result.output
    assert "request 1" in result.output


def test_single_requests_that_do_not_fit_are_refused_as_live(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [TraceRequest(0.0, "m", 140_000, 4), TraceRequest(1.0, "m", 100, 4)]
    write_trace(trace, ["m"], requests)
    result = run("simulate", write(tmp_path, model()), "--workload", str(trace), "--json")
    assert result.exit_code == 1, result.output
    (summary,) = json.loads(result.stdout)["runs"].values()
    assert summary["overall"]["failed"] == 1
    assert summary["errors"] == {"longer than the 131072 tokens of m": 1}
    result = run("simulate", write(tmp_path, model()), "--workload", f"{trace}:limit=1")
    assert result.exit_code == 2
    assert "trace.jsonl" in result.output


def test_requests_for_vectors_need_room_for_their_prompts_only() -> None:
    assert Context(100, generates=False).holds(TraceRequest(0.0, "m", 100, 500))
    assert not Context(100, generates=False).holds(TraceRequest(0.0, "m", 101, 1))
    assert not Context(100).holds(TraceRequest(0.0, "m", 100, 1))
