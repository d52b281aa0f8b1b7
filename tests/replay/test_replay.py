"""The replay against a server of its own process: pace, measurements, fallbacks, failures, interruption."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from muxserve.cli.app import app
from muxserve.metrics import RequestRecord
from muxserve.metrics.report import read_json
from muxserve.metrics.summary import summarise
from muxserve.replay.dialect import Dialect
from muxserve.replay.endpoint import Endpoint
from muxserve.replay.prompts import Prompts
from muxserve.replay.run import Replay
from muxserve.workload import TraceRequest, write_trace
from tests.replay.conftest import ROOT, Server
from tests.support.patience import PATIENCE, eventually

Serve = Callable[..., Server]


def trace(path: Path, models: list[str], count: int, gap: float, output: int = 8) -> Path:
    requests = (TraceRequest(round(i * gap, 6), models[i % len(models)], 10 + i, output) for i in range(count))
    write_trace(path, models, requests, duration=count * gap)
    return path


def command(server: Server, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", "--url", server.url, *map(str, arguments)])


def test_a_workload_arrives_as_it_is_and_is_measured(serve: Serve, tmp_path: Path) -> None:
    server = serve(0.004)
    path = trace(tmp_path / "t.jsonl", ["exact", "exact-2"], 60, 0.02)
    out, html, lines = (tmp_path / name for name in ("r.json", "r.html", "r.jsonl"))
    result = command(server, "-w", path, "-o", out, "--html", html, "--records", lines, "--slo-ttft-ms", 60_000)
    assert result.exit_code == 0, result.output
    asked = [body for name in ("exact", "exact-2") for body in server.seen(name) if len(body["prompt"]) != 32]
    assert sorted(len(body["prompt"]) for body in asked) == [n for n in range(10, 70) if n != 32]
    assert all(body["ignore_eos"] and body["max_tokens"] == 8 for body in asked)
    summary = read_json(out).runs["replay"]
    assert (summary.overall.requests, summary.overall.completed) == (60, 60)
    assert summary.overall.output_tokens == 480
    assert summary.overall.prompt_tokens == sum(range(10, 70))
    assert summary.overall.slo == {"ttft": 1.0, "all": 1.0}
    # No answer comes faster than the server sleeps.
    assert summary.overall.ttft is not None
    assert summary.overall.ttft.p50 >= 0.004
    assert summary.overall.tpot is not None
    assert summary.overall.tpot.mean >= 0.0035
    records = [msgspec.json.decode(line, type=RequestRecord) for line in lines.read_bytes().splitlines()]
    # The report is nothing but the shared definitions over the records.
    again = summarise(records)
    assert again.overall.latency == summary.overall.latency
    assert again.weighted_throughput == summary.weighted_throughput
    assert sorted(record.arrival for record in records) == [round(i * 0.02, 6) for i in range(60)]
    assert "TTFT p99" in result.output
    assert "exact-2" in result.output
    assert "newPlot" in html.read_text()


def test_the_loop_is_open(serve: Serve, tmp_path: Path) -> None:
    """Answers that take long do not slow the sending down."""
    server = serve(0.1)
    path = trace(tmp_path / "t.jsonl", ["exact"], 20, 0.01)
    result = command(server, "-w", f"{path}:speed=2", "--json")
    assert result.exit_code == 0
    times = [body["at"] for body in server.seen("exact")][1:]
    # Each takes at least 0.8 s; one after the other would be 16 s.
    assert times[-1] - times[0] < 8
    figures = json.loads(result.stdout)["runs"]["replay"]["overall"]
    assert figures["latency"]["p50"] >= 0.8
    assert figures["seconds"] < 16


def test_requests_can_be_held_back(serve: Serve, tmp_path: Path) -> None:
    server = serve(0.02)
    path = trace(tmp_path / "t.jsonl", ["exact"], 6, 0.001, output=4)
    result = command(server, "-w", path, "--max-in-flight", 1, "--json")
    assert result.exit_code == 0
    run = json.loads(result.stdout)["runs"]["replay"]
    # Six after the other, 80 ms each at least; the last waited for five.
    assert run["overall"]["latency"]["max"] >= 0.4
    assert run["extra"]["client"]["held_back"] == 5
    assert "waited" in result.stderr


@pytest.mark.parametrize(
    ("model", "path", "says"),
    [
        ("text", "/v1/completions", "prompts as text of about the wanted length"),
        ("chat", "/v1/chat/completions", "chat completions"),
    ],
)
def test_other_servers_are_asked_as_they_understand(
    serve: Serve, tmp_path: Path, model: str, path: str, says: str
) -> None:
    server = serve()
    result = command(server, "-w", trace(tmp_path / "t.jsonl", [model], 5, 0.01, output=6), "--json")
    assert result.exit_code == 0, result.output
    assert says in result.stderr
    asked = server.seen(model)[-5:]
    assert {body["path"] for body in asked} == {path}
    run = json.loads(result.stdout)["runs"]["replay"]
    if model == "text":
        assert sorted(len(body["prompt"].split()) for body in asked) == list(range(10, 15))
        assert run["extra"]["client"]["shorter_than_asked"] == 5
        assert "ended before the length asked for" in result.stderr
        assert run["overall"]["output_tokens"] == 15
    else:
        # The server counts two tokens a word and four more: the client aims at the tokens, not at the words.
        counted = run["overall"]["prompt_tokens"]
        assert counted == pytest.approx(sum(range(10, 15)), rel=0.3)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
async def test_a_last_piece_that_is_empty_is_no_token(serve: Serve, chat: bool, tokens: int) -> None:
    dialect = Dialect(ids=not chat, ignore_eos=True, chat=chat)
    async with Endpoint(serve().url) as endpoint:
        answer = await endpoint.send(dialect, dialect.body(Prompts(1), 1, "uncounted", 8, tokens))
    assert not answer.error
    assert answer.tokens == tokens
    assert answer.first is not None
    assert answer.last is not None
    assert answer.sent < answer.first <= answer.last


async def test_an_answer_that_ends_before_any_text_is_complete(serve: Serve) -> None:
    dialect = Dialect(ids=True, ignore_eos=True)
    async with Endpoint(serve().url) as endpoint:
        answer = await endpoint.send(dialect, dialect.body(Prompts(1), 1, "uncounted", 8, 0))
    assert not answer.error
    assert answer.tokens == 0
    assert answer.first == answer.last


def test_short_answers_are_told(serve: Serve, tmp_path: Path) -> None:
    result = command(serve(), "-w", trace(tmp_path / "t.jsonl", ["short"], 3, 0.01))
    assert result.exit_code == 0
    assert "3 answers were shorter than asked although" in result.stderr


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("refuse", "HTTP 429: too many requests"),
        ("break", "the connection broke in the middle of the answer"),
        ("mute", "the stream ended early"),
        ("garbage", "something that is not a completion"),
        ("error", "error in the stream: the engine died"),
        ("hang", "no complete answer within 4 s"),
    ],
)
def test_failures_are_counted_not_hidden(serve: Serve, tmp_path: Path, model: str, says: str) -> None:
    path = trace(tmp_path / "t.jsonl", ["exact", model], 6, 0.01)
    limit = 4 if model == "hang" else PATIENCE
    result = command(serve(), "-w", path, "--timeout", limit, "-o", tmp_path / "r.json")
    assert result.exit_code == 1
    summary = read_json(tmp_path / "r.json").runs["replay"]
    assert (summary.models["exact"].completed, summary.models[model].failed) == (3, 3)
    [(error, count)] = summary.errors.items()
    assert count == 3
    assert says in error
    assert "not completed" in result.output


def test_latencies_alone_give_attainment(serve: Serve, tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", ["exact"], 10, 0.05)
    # Slow, so that on a busy machine, too, none takes 32 times as long.
    result = command(serve(0.03), "-w", path, "--alone", "--json")
    assert result.exit_code == 0
    run = json.loads(result.stdout)["runs"]["replay"]
    assert run["slo_scales"][-1] == 32
    assert run["overall"]["attainment"]["latency"][-1] == 1.0
    assert run["extra"]["alone"]["exact"]["per_output_token"] >= 0.025


def test_generators_take_the_servers_models(serve: Serve) -> None:
    result = command(serve(), "-w", "poisson:rate=40,duration=1,lengths=4,models=exact+exact-2,seed=1", "--json")
    assert result.exit_code == 0
    assert set(json.loads(result.stdout)["runs"]["replay"]["models"]) == {"exact", "exact-2"}


def test_foreign_models_are_mapped_and_told(serve: Serve, tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", ["gpt-5", "exact"], 10, 0.01)
    result = command(serve(), "-w", path, "--models", "exact=3,exact-2=1")
    assert result.exit_code == 0
    assert "requests to gpt-5 go to exact, exact-2 by their rates" in result.stderr


def test_mistakes_send_nothing(serve: Serve, tmp_path: Path) -> None:
    server = serve(0.001, "sesame")
    good = trace(tmp_path / "t.jsonl", ["exact"], 2, 0.01)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(good.read_text() + "rubbish\n")
    for arguments, says in (
        (["-w", good], "wants an API key"),
        (["-w", good, "--api-key", "x"], "wants an API key"),
        (["-w", bad, "--api-key", "sesame"], "bad.jsonl, line 4: not a request"),
        (["-w", tmp_path / "no.jsonl", "--api-key", "sesame"], "no.jsonl: No such file"),
        (["-w", "poisson:rte=1", "--api-key", "sesame"], "did you mean rate"),
        (["-w", good, "--api-key", "sesame", "--models", "gpt"], "does not serve gpt; it serves exact"),
        (["-w", good, "--api-key", "sesame", "-o", tmp_path / "no" / "r.json"], "there is no directory"),
        (["-w", good, "--url", "http://127.0.0.1:9", "--api-key", "x"], "cannot connect"),
        (["-w", good, "--url", "nonsense"], "is not a URL"),
    ):
        result = command(server, *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert says in result.stderr
        assert "Traceback" not in result.output
    assert server.seen("exact") == []
    assert command(server, "-w", good, "--api-key", "sesame").exit_code == 0


@pytest.mark.parametrize("again", [False, True])
def test_an_interruption_reports_what_was_done(serve: Serve, tmp_path: Path, again: bool) -> None:
    server = serve(0.02)
    path = trace(tmp_path / "t.jsonl", ["hang" if again else "exact"], 2000, 0.01)
    out = tmp_path / "r.json"
    arguments = ["replay", "--url", server.url, "-w", str(path), "-o", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "muxserve.cli.app", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        model = "hang" if again else "exact"
        eventually(lambda: process.poll() is not None or len(server.seen(model)) >= 5, "five requests")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        for line in process.stderr:
            if "no new requests" in line:
                break
        if again:
            process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert process.returncode == 130
    figures = read_json(out).runs["replay"].overall
    assert 3 <= figures.requests < 2000
    if again:
        assert figures.unfinished == figures.requests
    else:
        assert figures.completed == figures.requests


@pytest.mark.parametrize("again", [(), ("--prompt-seed", 3)], ids=["new", "the same"])
def test_prompts_are_new_in_every_run_unless_they_are_to_be_the_same(
    serve: Serve, tmp_path: Path, again: tuple[object, ...]
) -> None:
    server = serve(0.0)
    path, out = trace(tmp_path / "t.jsonl", ["exact"], 3, 0.0), tmp_path / "r.json"
    sent, seeds = [], []
    for _ in range(2):
        before = len(server.seen("exact"))
        result = command(server, "-w", path, "-o", out, *again)
        assert result.exit_code == 0, result.output
        sent.append(sorted(body["prompt"] for body in server.seen("exact")[before:]))
        extra: Any = read_json(out).runs["replay"].extra
        seeds.append(extra["client"]["prompt_seed"])
    assert (sent[0] == sent[1], seeds[0] == seeds[1]) == (bool(again), bool(again))


async def test_stop_while_held_back(serve: Serve) -> None:
    server = serve()
    records: list[RequestRecord] = []
    async with Endpoint(server.url) as endpoint:
        prompts = Prompts(0)
        dialect = await endpoint.probe("hang", prompts)
        running = Replay(endpoint, {"hang": dialect}, prompts, records.append, max_in_flight=1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(running.run(TraceRequest(0.0, "hang", 4, 4) for _ in range(3)))
            while not running.counts.held:
                await asyncio.sleep(0)
            running.stop(now=True)
    assert [record.finish for record in records] == [None]
    assert running.counts.sent == 1
