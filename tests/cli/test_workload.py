"""`muxserve workload`: what it writes, shows and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from muxserve.cli.app import app
from muxserve.workload import read_trace
from tests.workload import files


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["workload", *map(str, arguments)])


def test_generate(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl.gz"
    result = run("generate", "poisson:rate=20,alpha=1,duration=30,lengths=16,seed=4", "--models", "x,y", "-o", out)
    assert result.exit_code == 0, result.output
    trace = read_trace(out)
    assert f"{len(trace.requests)} requests over 30 s" in result.output
    assert (trace.header.seed, trace.header.duration, trace.header.models) == (4, 30.0, ["x", "y"])
    # 400 and 200 expected.
    counts = [sum(request.model == name for request in trace.requests) for name in "xy"]
    assert 300 < counts[0] < 500
    assert 130 < counts[1] < 270


def test_generate_for_a_fleet(tmp_path: Path, fleet_file: Path) -> None:
    result = run("generate", "poisson:duration=50,lengths=4", "--fleet", fleet_file, "-o", tmp_path / "t.jsonl")
    assert result.exit_code == 0, result.output
    models = [request.model for request in read_trace(tmp_path / "t.jsonl").requests]
    # The fleet asks for 1 and 3 requests per second.
    assert models.count("two") == pytest.approx(150, abs=50)
    assert models.count("one") == pytest.approx(50, abs=30)


def test_convert(tmp_path: Path) -> None:
    source = files.write(tmp_path / "b.csv", files.BURSTGPT + "rubbish\n")
    out = tmp_path / "t.jsonl"
    result = run("convert", f"{source}:map=GPT-4=a+*=b,speed=2", "-o", out, "--models", "a=3,b=1")
    assert result.exit_code == 2
    assert "b.csv, line 6: 1 fields instead of 6" in result.stderr
    assert list(tmp_path.iterdir()) == [source]
    result = run("convert", f"{source}:map=GPT-4=a+*=b,speed=2,skip_bad=true", "-o", out, "--models", "a=3,b=1")
    assert result.exit_code == 0, result.output
    trace = read_trace(out)
    assert [(r.arrival, r.model) for r in trace.requests] == [(0.0, "b"), (20.0, "b"), (56.5, "a")]
    assert trace.header.models == ["a", "b"]
    assert "left out 1 malformed" in result.stderr
    assert "left out 1: no output" in result.stderr


def test_what_was_there_survives_a_failure(tmp_path: Path) -> None:
    source = files.write(tmp_path / "b.csv", files.BURSTGPT + "rubbish\n")
    out = files.write(tmp_path / "t.jsonl", files.OURS)
    assert run("convert", source, "-o", out).exit_code == 2
    assert out.read_text() == files.OURS
    result = run("convert", out, "-o", out)
    assert result.exit_code == 2
    assert "would be overwritten" in result.stderr


def test_describe(tmp_path: Path) -> None:
    path = files.write(tmp_path / "b.csv", files.BURSTGPT)
    result = run("describe", path)
    assert result.exit_code == 0
    assert "ChatGPT" in result.output
    assert "burstgpt" in result.output
    figures = json.loads(run("describe", path, "--json").stdout)
    assert figures["overall"]["requests"] == 3
    assert figures["models"]["GPT-4"]["prompt"]["mean"] == 417
    empty = files.write(tmp_path / "t.jsonl", '{"muxserve_trace":1,"models":["a"]}\n')
    assert run("describe", empty).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "b.csv"], "use `convert` for files"),
        (["generate", "poisson:rate=1"], "name the models"),
        (["generate", "poisson:rate=1", "--models", "a,a"], "none twice"),
        (["generate", "poisson:rate=1", "--models", "a=1,b"], "every model needs a positive rate"),
        (["generate", "poisson:rate=1", "--models", "a", "--fleet", "f.yaml"], "exclude each other"),
        (["generate", "poisson:rate=1", "--fleet", "no.yaml"], "no.yaml"),
        (["convert", "no.csv"], "no.csv: No such file"),
        (["convert", "b.csv:speed=0"], "speed must be a positive number"),
        (["convert", "b.csv", "-o", "no/such/t.jsonl"], "No such file"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    files.write(tmp_path / "b.csv", files.BURSTGPT)
    out = [] if "-o" in arguments else ["-o", "t.jsonl"]
    result = run(*arguments, *out)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "t.jsonl").exists()
