"""`muxserve plan --workload`: what models that sleep would bring."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.workload.trace import TraceRequest, write_trace

ROOT = Path(__file__).resolve().parents[2]
# Ten models, four of which have room on a GPU with something for their caches; a few are active at a time.
FLEET = """\
cluster: { gpus: 1, gpu_type: H100-80GB }
models:
""" + "".join(
    f"  - {{ name: m{n}, architecture: llama-3.1-8b, rate: 0.1, slo: {{ ttft_ms: 5000, tpot_ms: 200 }} }}\n"
    for n in range(10)
)
WORKLOAD = "bursty-groups:rate=1,duration=60,phase=20,lengths=64,seed=1"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return file


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def sizes(told: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {each["gpus"]: each for each in told["sleeping"]["sizes"]}


@pytest.mark.slow
def test_fewer_gpus_are_enough_for_models_that_sleep(fleet: Path) -> None:
    asked = (fleet, "--workload", WORKLOAD.replace("rate=1", "rate=3"), "--seconds", 60, "--simulate", 5, "--json")
    code, out, err = run(*asked, "--sweep", "gpus=1..4:1")
    assert code == 0, err
    told = json.loads(out)
    found = sizes(told)
    assert list(found) == [1, 2, 3, 4]
    for each in found.values():
        awake, asleep = each["all_awake"], each["with_memory"]
        assert awake["requests"] == asleep["requests"] > 30
        assert asleep["wakes"] >= asleep["sleeps"]
        # Whoever has no place is not served, and counts.
        assert bool(awake["without_place"]) == (awake["slo"] < 0.95)
    # Where the fewest have room they take turns.
    assert found[1]["with_memory"]["turns"] > 0
    assert 0 < len(found[1]["all_awake"]["without_place"]) < 10
    needed = told["sleeping"]["gpus_needed"]
    assert needed["with_memory"] < needed["all_awake"] <= 4
    # A plan for one number of GPUs has the same figure.
    alone = json.loads(run(*asked, "--gpus", 1)[1])
    assert sizes(alone)[1]["with_memory"] == found[1]["with_memory"]


def test_a_table_says_it_for_people(fleet: Path) -> None:
    limits = ("--seconds", 60, "--simulate", 5)
    _, out, err = run(fleet, "--workload", f"{WORKLOAD},max_output=32", "--sweep", "gpus=1..2:1", *limits)
    words = " ".join(out.split())
    assert "GPUs for 95% of these requests within their objectives: " in words, err
    assert "with memory: as `muxserve deploy` serves the fleet with `memory:` in its file" in words
    assert re.search(r"^1 +with memory: +0 +\d+ +\d+ +\d+ ", out, re.MULTILINE)


def test_where_models_cannot_sleep_the_reason_is_told(fleet: Path) -> None:
    with fleet.open("a") as file:
        file.write("  - { name: large, architecture: llama-3.1-70b, rate: 0.1 }\n")
    limits = ("--seconds", 60, "--simulate", 5)
    told = json.loads(run(fleet, "--workload", WORKLOAD, "--gpus", 1, "--json", *limits)[1])
    (found,) = told["sleeping"]["sizes"]
    assert "large needs" in found["with_memory"]["why_not"]
    assert told["sleeping"]["gpus_needed"]["with_memory"] is None


def test_traces_are_workloads_too(fleet: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, ["m0", "m1"], [TraceRequest(n / 4, f"m{n % 2}", 50, 20) for n in range(40)])
    told = json.loads(run(fleet, "--workload", trace, "--gpus", 1, "--seconds", 60, "--simulate", 5, "--json")[1])
    assert sizes(told)[1]["with_memory"]["requests"] == 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workload", "nonsense:rate=1"), "nonsense"),
        (("--workload", WORKLOAD, "--mode", "spatial"), "--workload does not go with --mode"),
        (("--workload", "poisson:rate=1,duration=5,max_prompt=0"), "max_prompt"),
        (("--workload", "poisson:rate=0.001,duration=1,lengths=64"), "has no requests"),
        (("--workload", "/nowhere/trace.jsonl"), "/nowhere/trace.jsonl cannot be read: No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(fleet: Path, options: tuple[str, ...], words: str) -> None:
    code, _, err = run(fleet, *options)
    assert code == 2
    assert words in " ".join(err.split())


@pytest.mark.parametrize(
    ("own", "options", "compared"),
    [
        ("{}", ("--nodes", "1x1:H100-80GB"), True),
        ("{}", ("--sweep", "gpus=1..1", "--gpu-type", "H100-80GB"), True),
        ("{ gpu_ids: [0], gpu_type: H100-80GB }", (), True),
        # The workload is that of the file's rates, and not of any other scale.
        ("{ gpus: 1, gpu_type: H100-80GB }", ("--sweep", "scale=1..2"), False),
    ],
)
def test_a_fleet_with_memory_is_compared_wherever_its_gpus_are_named(
    tmp_path: Path, own: str, options: tuple[str, ...], compared: bool
) -> None:
    file = tmp_path / "fleet.yaml"
    models = "".join(f"  - {{ name: m{n}, architecture: llama-3.1-8b, rate: 0.1 }}\n" for n in range(2))
    file.write_text(f"cluster: {own}\nmemory: auto\nmodels:\n{models}")
    code, out, err = run(file, *options, "--simulate", 1, "--json")
    assert code == 0, err
    assert ("sleeping" in json.loads(out)) == compared


def test_models_of_two_types_have_the_room_of_each_other_s_pool(tmp_path: Path) -> None:
    """With nobody to wake, too: their pools share one room, which is divided by what waits."""
    file = tmp_path / "fleet.yaml"
    model = "rate: 1, keep: always, engines: split"
    models = [f"  - {{ name: {each}, architecture: {each}, {model} }}" for each in ("llama-3.1-8b", "llama-2-7b")]
    file.write_text("\n".join(["cluster: { gpus: 1, gpu_type: H100-80GB }", "memory: auto", "models:", *models]))
    load = ("--workload", "bursty-groups:duration=120,max_prompt=2000,max_output=2000")
    result = CliRunner().invoke(app, ["simulate", str(file), *load, "--json"])
    assert result.exit_code == 0, result.output
    overall = json.loads(result.stdout)["runs"]["muxserve"]["overall"]
    assert overall["completed"] == overall["requests"] > 50


def test_where_no_model_sleeps_on_a_cpu_nothing_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    model = f"path: {ROOT / 'configs/models/atlas'}, keep: always"
    file.write_text(f"memory: {{limit: 1600MiB}}\nkv_pool: {{size: 64MiB}}\nmodels:\n  - {{name: a, {model}}}\n")
    code, out, err = run(file, "--simulate", 2, "--json")
    assert code == 0, err
    assert "residency" not in json.loads(out)


def test_on_a_cpu_it_needs_a_limit_of_memory_and_takes_the_place_of_bursty_groups(tmp_path: Path) -> None:
    models = [f"  - {{name: m{n}, path: {ROOT / 'configs/models/atlas'}, dtype: float32}}" for n in range(6)]
    file = tmp_path / "fleet.yaml"
    workload = ("--workload", "poisson:rate=6,duration=5,lengths=16,seed=2", "--simulate", 2)
    file.write_text("\n".join(["kv_pool: {size: 64MiB}", "models:", *models]))
    code, _, err = run(file, *workload)
    assert code == 2
    assert "--workload is for models that sleep: give the fleet `memory:`" in " ".join(err.split())
    file.write_text("\n".join(["memory: {limit: 1600MiB}", "kv_pool: {size: 64MiB}", "models:", *models]))
    code, out, err = run(file, *workload, "--json")
    assert code == 0, err
    told = json.loads(out)["residency"]
    assert told["workload"].startswith("poisson")
    assert told["all_awake"]["requests"] == told["with_residency"]["requests"]
