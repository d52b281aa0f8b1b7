"""The load generator and the figures it derives, against a scripted endpoint: a benchmark must not flatter anyone."""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The benchmark modules, which import each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {name: importlib.import_module(name) for name in ("load", "report", "servers", "serving_cpu")}


class Endpoint:
    """Answers `/v1/completions` as vLLM does, or misbehaves as the model's name says."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.active = self.most_active = 0
        self.together: asyncio.Barrier | None = None

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            if self.together:
                await self.together.wait()
            return await self.answer(request, body)
        finally:
            self.active -= 1

    async def answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        tokens = body["max_tokens"]
        if body["model"] == "refused":
            return web.json_response({"error": {"message": "no"}}, status=429)
        usage = {"completion_tokens": tokens - (body["model"] == "short")}
        if not body["stream"]:
            return web.json_response({"choices": [{"text": "x"}], "usage": usage})
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for _ in range(tokens):
            await response.write(b"data: " + json.dumps({"choices": [{"text": "x"}], "usage": None}).encode() + b"\n\n")
            await asyncio.sleep(0)
            if body["model"] == "broken":
                return response
        if body["model"] == "error":
            await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return response


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[tuple[Endpoint, str]]:
    fake = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield fake, f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def test_closed_loop_keeps_its_concurrency_and_counts_tokens(bench, endpoint) -> None:
    fake, url = endpoint
    load = bench["load"]
    # Answers come only to three requests at once.
    fake.together = asyncio.Barrier(3)
    calls = [load.Call("good", 5 + i, 4, seed=i, stream=i % 2 == 0) for i in range(12)]
    outcomes = await load.closed_loop(url, calls, 3)
    assert all(outcome.ok for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert fake.most_active == 3
    assert sorted(len(body["prompt"]) for body in fake.bodies) == list(range(5, 17))
    assert all(outcome.sent <= outcome.first <= outcome.last for outcome in outcomes)
    figures = load.summary(outcomes)
    assert figures["failed"] == 0
    # 12 answers of 4 tokens over the same time.
    assert figures["output_tokens_per_second"] == pytest.approx(4 * figures["requests_per_second"], rel=0.01)


async def test_open_loop_sends_in_order_of_time_whatever_fails(bench, endpoint) -> None:
    fake, url = endpoint
    load = bench["load"]
    calls = [
        load.Call(model, 3, 4, seed=i, at=i / 100)
        for i, model in enumerate(["good", "refused", "broken", "short", "error", "good"])
    ]
    outcomes = await load.open_loop(dict.fromkeys({call.model for call in calls}, url), calls)
    # Each has a connection of its own, so that the server may read them in another order.
    assert sorted(body["model"] for body in fake.bodies) == sorted(call.model for call in calls)
    assert [outcome.call for outcome in outcomes] == calls
    sent = [outcome.sent for outcome in outcomes]
    assert sent == sorted(sent)
    assert [outcome.ok for outcome in outcomes] == [True, False, False, False, False, True]
    says = [outcome.error for outcome in outcomes]
    for error, words in zip(
        says[1:5], ("HTTP 429", "ended early", "3 tokens instead of 4", "engine died"), strict=True
    ):
        assert words in error
    figures = load.summary(outcomes)
    assert (figures["requests"], figures["failed"], len(figures["errors"])) == (6, 4, 4)


async def test_no_server_is_a_failed_request(bench) -> None:
    load = bench["load"]
    url = f"http://127.0.0.1:{bench['servers'].free_port()}"
    [outcome] = await load.closed_loop(url, [load.Call("m", 3, 4)], 1)
    assert "Connect" in outcome.error
    assert load.summary([outcome]) == {"requests": 1, "failed": 1, "errors": [outcome.error]}


def outcome_of(load: ModuleType, prompt: int, tokens: int, ttft: float, tpot: float, error: str = "") -> object:
    call = load.Call("m", prompt, tokens)
    return load.Outcome(call, 10.0, 10.0 + ttft, 10.0 + ttft + tpot * (tokens - 1), tokens, error)


def test_fit_and_attainment(bench) -> None:
    load, serving = bench["load"], bench["serving_cpu"]
    alone = serving.fit_alone([outcome_of(load, p, 11, 0.01 + 0.001 * p, 0.005) for p in (10, 50, 200)])
    assert (alone.base, alone.per_prompt, alone.per_output) == pytest.approx((0.01, 0.001, 0.005))
    # Alone: TTFT 0.11 s, end to end 0.16 s.
    fast = outcome_of(load, 100, 11, 0.11, 0.005)
    late_start = outcome_of(load, 100, 11, 0.6, 0.005)  # TTFT 5.5 x, end to end 4.06 x
    slow = outcome_of(load, 100, 11, 0.11, 0.1)  # TPOT 20 x, end to end 6.9 x
    failed = outcome_of(load, 100, 11, 0.11, 0.005, error="HTTP 500")
    shares = serving.attainment([fast, late_start, slow, failed], {"m": alone})
    assert shares["e2e"] == {"2": 0.25, "4": 0.25, "8": 0.75, "16": 0.75, "32": 0.75}
    assert shares["ttft_and_tpot"] == {"2": 0.25, "4": 0.25, "8": 0.5, "16": 0.5, "32": 0.75}
    with pytest.raises(bench["servers"].ServerError, match="HTTP 500"):
        serving.fit_alone([failed])


def test_percentiles(bench) -> None:
    report = bench["report"]
    assert report.percentiles([1.0, 2.0, 3.0, 4.0, 5.0]) == {"mean": 3.0, "p50": 3.0, "p90": 4.6, "p99": 4.96}
    assert report.percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="at least one"):
        report.percentile([], 0.5)


def test_fleet_with(bench, tmp_path: Path) -> None:
    source = tmp_path / "a" / "fleet.yaml"
    source.parent.mkdir()
    source.write_text(
        "policy: adbs\ngateway: {port: 1, host: h}\nmodels:\n- {name: x, path: m/x, rate: 1}\n- {name: y, path: m/y}\n"
    )
    made = bench["servers"].fleet_with(
        source, tmp_path / "new.yaml", models=["y"], rates={"y": 2.5}, policy="fcfs", gateway={"port": 2}
    )
    assert yaml.safe_load(made.read_text()) == {
        "policy": "fcfs",
        "gateway": {"port": 2, "host": "h"},
        "models": [{"name": "y", "path": str(tmp_path / "a" / "m" / "y"), "limits": {"max_wait": "none"}, "rate": 2.5}],
    }


SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
TERMINATED = """
import os, signal, sys
from servers import end_cleanly, free_port, server

class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10000):
            pass

end_cleanly()
port = free_port()
with server([sys.executable, "-c", sys.argv[1], str(port)], port) as running:
    print(running.pid, flush=True)
    swallows = Swallows()
    del swallows
    while True:
        pass
"""


def test_no_server_outlives_a_terminated_benchmark(bench) -> None:
    command = [sys.executable, "-c", TERMINATED, SERVE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=BENCHMARKS, check=False)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert not psutil.pid_exists(int(ended.stdout))


def test_a_server_that_ends_is_reported_with_its_log(bench) -> None:
    servers = bench["servers"]
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(servers.ServerError, match=r"code 3:\nno such model"), servers.server(command, 1):
        pass
