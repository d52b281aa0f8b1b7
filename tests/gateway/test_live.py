"""The live page without a browser: its files, who may see them, and the stream of frames behind it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from muxserve.config import parse_fleet
from muxserve.gateway.http.errors import Message, RequestError
from muxserve.gateway.status import ui
from muxserve.gateway.status.live import LiveView, UnitHistory
from muxserve.gateway.status.measure import Measures, RequestOutcome
from muxserve.gateway.status.ui import LivePage
from muxserve.metrics.colours import COLOURS
from muxserve.metrics.live import JOBS_WINDOW_SECONDS, LATENCY_WINDOW_SECONDS, LiveFrame
from muxserve.wire import ComputedJob, MovedRequest, TimelineReply
from tests.gateway.playing import play
from tests.gateway.rig import Running
from tests.gateway.test_measure import ended
from tests.gateway.unit_specs import model
from tests.support.patience import PATIENCE

# ------------------------------------------------------------ what is kept of a unit


def job(number: int, start: float, end: float) -> ComputedJob:
    return ComputedJob(number, model="m", phase="decode", share=0.5, start=start, end=end, steps=1, tokens=4)


def test_times_of_a_unit_become_those_of_everybody() -> None:
    history = UnitHistory("u0")
    history.take(TimelineReply("e1", 50.0, [job(1, 49.0, 49.5)], [MovedRequest(49.2, "m", "u1", 0.02)]), 1000.0)
    (jobs, moves) = history.after(0)
    assert [(each.unit, each.key, each.start, each.end) for each in jobs] == [("u0", "e1.1", 999.0, 999.5)]
    assert [(each.unit, each.at, each.destination) for each in moves] == [("u0", pytest.approx(999.2), "u1")]
    assert history.since == 50.0
    # However long answers are on their way, jobs that follow one another do so here.
    history.take(TimelineReply("e1", 51.0, [job(2, 49.5, 50.5)], []), 1001.2)
    assert history.after(1)[0][0].start == 999.5


def test_a_unit_scheduler_that_was_started_anew_counts_anew() -> None:
    history = UnitHistory("u0")
    history.take(TimelineReply("e1", 50.0, [job(1, 49.0, 49.5)], []), 1000.0)
    history.restarted()
    assert history.since == 0.0
    history.take(TimelineReply("e2", 7.0, [job(1, 6.0, 6.5)], []), 1002.0)
    assert [(each.key, each.start) for each in history.after(0)[0]] == [("e1.1", 999.0), ("e2.1", 1001.0)]


def test_each_is_told_what_is_new() -> None:
    history = UnitHistory("u0")
    history.take(TimelineReply("e1", 50.0, [job(1, 49.0, 49.5), job(2, 49.5, 50.0)], []), 1000.0)
    history.take(TimelineReply("e1", 51.0, [job(2, 49.5, 50.5), job(3, 50.5, 51.0)], []), 1001.0)
    assert [each.key for each in history.after(1)[0]] == ["e1.2", "e1.3"]  # one went on
    assert [each.key for each in history.after(0)[0]] == ["e1.1", "e1.2", "e1.3"]
    assert history.after(2) == ([], [])


def test_what_is_too_old_is_forgotten() -> None:
    history = UnitHistory("u0")
    history.take(TimelineReply("e1", 50.0, [job(1, 49.0, 49.5)], [MovedRequest(49.2, "m", "u1", 0.02)]), 1000.0)
    at = 50.0 + JOBS_WINDOW_SECONDS
    history.take(TimelineReply("e1", at, [job(2, at - 1, at)], []), 1000.0 + JOBS_WINDOW_SECONDS)
    assert [each.key for each in history.after(0)[0]] == ["e1.2"]
    assert not history.after(0)[1]


def test_recent_latencies() -> None:
    measures = Measures([model("m", slo_ttft_ms=300.0)], CollectorRegistry())
    measures.ended(ended(10.25, 11.25, 6), RequestOutcome.COMPLETED, 11.25)
    measures.ended(ended(10.5, 10.5, 1), RequestOutcome.COMPLETED, 30.0)
    measures.ended(ended(10.25, 11.25, 6), RequestOutcome.CANCELLED, 30.0)
    recent = measures.recent("m", 31.0)
    assert (recent.ttft, recent.tpot) == ([0.25, 0.5], [pytest.approx(0.2)])
    assert (recent.judged, recent.met) == (2, 1)
    assert measures.recent("m", 12.0 + LATENCY_WINDOW_SECONDS).ttft == [0.5]
    measures.remove("m")
    assert not measures.recent("m", 31.0).ttft


# ------------------------------------------------------------ the stream


class Frames:
    """Stands for `LiveView`: frames without a fleet."""

    def __init__(self) -> None:
        self.draining = False
        self.made = 0

    async def frame(self, seen: dict[str, int]) -> LiveFrame:
        self.made += 1
        return LiveFrame(float(self.made), status="ok", gateways=1, models=[], units=[], jobs=[], moves=[])


class Client:
    """One that opened the stream."""

    def __init__(self, page: LivePage, method: str = "GET") -> None:
        self.sent: list[Message] = []
        self.came = asyncio.Event()
        self.left = asyncio.Event()
        scope = {"type": "http", "method": method, "path": ui.EVENTS, "headers": []}
        self.served = asyncio.ensure_future(page.events(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.came.set()

    async def has(self, messages: int) -> None:
        while len(self.sent) < messages:
            self.came.clear()
            await asyncio.wait_for(self.came.wait(), PATIENCE)


def page_of(frames: Frames) -> LivePage:
    return LivePage(cast(LiveView, frames), Path())


async def test_frames_come_until_the_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "FRAME_SECONDS", 0.001)
    frames = Frames()
    client = Client(page_of(frames))
    await client.has(4)
    client.left.set()
    await asyncio.wait_for(client.served, PATIENCE)
    made = frames.made
    assert client.sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream") in client.sent[0]["headers"]
    bodies = [message["body"] for message in client.sent[1:]]
    assert msgspec.json.decode(bodies[0].removeprefix(b"data: "), type=LiveFrame).time == 1.0
    assert bodies[-1] == b""
    assert len(bodies) == made + 1


async def test_the_stream_ends_when_the_gateway_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "FRAME_SECONDS", 0.001)
    frames = Frames()
    client = Client(page_of(frames))
    await client.has(2)
    frames.draining = True
    await asyncio.wait_for(client.served, PATIENCE)


async def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "MOST_STREAMS", 1)
    page = page_of(Frames())
    first, second = Client(page), Client(page)
    await first.has(2)
    with pytest.raises(RequestError, match="1 live pages are open already"):
        await asyncio.wait_for(second.served, PATIENCE)
    first.left.set()
    await asyncio.wait_for(first.served, PATIENCE)
    third = Client(page)
    await third.has(2)
    third.left.set()
    await asyncio.wait_for(third.served, PATIENCE)


# ------------------------------------------------------------ a real gateway


def frame_with(url: str, what: str, **headers: str) -> dict[str, Any]:
    """The first that has that; a unit that answers late is in a later one."""
    with httpx.stream("GET", f"{url}/ui/events", headers=headers, timeout=PATIENCE) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        for line in answer.iter_lines():
            frame: dict[str, Any] = json.loads(line.removeprefix("data: ") or "{}")
            if frame.get(what):
                return frame
    raise AssertionError(f"the stream ended without {what}")


def test_the_page_is_served(http: httpx.Client) -> None:
    page = http.get("/ui")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    files = [path.relative_to(ui.FILES) for path in ui.FILES.rglob("*") if path.suffix in (".js", ".css", ".svg")]
    assert Path("vendor/htm-preact.js") in files
    for file in files:
        answer = http.get(f"/ui/{file}")
        assert (answer.status_code, answer.content) == (200, (ui.FILES / file).read_bytes())
    assert http.get("/ui/nothing.js").status_code == 404
    assert http.post("/ui").status_code == 405
    assert http.post("/ui/events").status_code == 405


def test_a_browser_is_sent_to_the_page(http: httpx.Client, guarded: Running) -> None:
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    sent = http.get("/", headers=browser)
    assert (sent.status_code, sent.headers["location"]) == (307, "ui")
    assert http.get("/", headers=browser, follow_redirects=True).text == http.get("/ui").text
    assert httpx.get(guarded.url, headers=browser, timeout=PATIENCE).status_code == 307  # the page asks for the key
    assert http.get("/", headers={"accept": "*/*"}).status_code == 404
    assert http.post("/", headers=browser).status_code == 405


def test_a_frame_of_a_real_gateway(gateway: Running, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "beta", "prompt": play("hello")})
    assert answer.status_code == 200
    frame = frame_with(gateway.url, "jobs")
    alpha, beta = frame["models"]
    assert (alpha["name"], beta["name"], beta["status"]) == ("alpha", "beta", "up")
    assert beta["requests"] >= 1
    assert beta["ttft"]["p50"] > 0
    assert beta["slo_ttft"] == 60.0
    (unit,) = frame["units"]
    assert unit["pools"][0]["models"][0]["used"] == 12
    # As the fake unit has them.
    assert [each[2:5] for each in frame["jobs"]] == [["alpha", "prefill", 0.5], ["beta", "decode", 0.25]]
    assert frame["time"] - frame["jobs"][-1][6] >= 0


def test_a_page_of_a_fleet_with_keys(guarded: Running) -> None:
    assert httpx.get(f"{guarded.url}/ui", timeout=PATIENCE).status_code == 200  # without anything of the fleet
    assert httpx.get(f"{guarded.url}/ui/app.js", timeout=PATIENCE).status_code == 200
    assert httpx.get(f"{guarded.url}/ui/events", timeout=PATIENCE).status_code == 401
    assert frame_with(guarded.url, "models", Authorization="Bearer first-key")["models"][0]["name"] == "alpha"


def test_off(tmp_path: Path) -> None:
    text = "gateway: {{ ui: {} }}\nkv_pool: {{ size: 1GiB }}\nmodels: [{{ name: m, hub: a/b }}]\n"
    assert parse_fleet(text.format("on"), "fleet.yaml", tmp_path).gateway.ui
    assert not parse_fleet(text.format("off"), "fleet.yaml", tmp_path).gateway.ui


def test_models_have_the_colours_of_reports() -> None:
    text = (ui.FILES / "colours.js").read_text()
    assert tuple(re.findall(r"#[0-9a-f]{6}", text.partition("[")[2].partition("]")[0])) == COLOURS


# ------------------------------------------------------------ the library in it

LIBRARY = "htm@3.1.1", "package/preact/standalone.module.js"


def test_the_library_is_the_one_that_was_published(tmp_path: Path) -> None:
    vendored = (ui.FILES / "vendor/htm-preact.js").read_bytes()
    assert sha256(vendored).hexdigest() == "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm to compare it with")
    try:
        packed = subprocess.run(
            [npm, "pack", "--silent", "--fetch-retries=0", "--fetch-timeout=10000", LIBRARY[0]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm reaches no registry")
    if packed.returncode:
        pytest.skip(f"npm reaches no registry: {packed.stderr[-200:]}")
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        member = archive.extractfile(LIBRARY[1])
        assert member is not None
        assert member.read() == vendored


async def test_the_page_shows_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway-0.log").write_text("one\ntwo\n")
    page = LivePage(cast(LiveView, Frames()), tmp_path)

    async def ask(query: bytes) -> Any:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError("it has no body")

        await page.logs({"type": "http", "method": "GET", "path": ui.LOGS, "query_string": query}, receive, send)
        return json.loads(sent[1]["body"])

    assert await ask(b"") == {"parts": ["gateway-0"], "part": "", "lines": []}
    assert (await ask(b"part=gateway-0"))["lines"] == ["one", "two"]
    for wrong in (b"part=gateway", b"part=../logs/gateway-0", b"part=%2Fetc%2Fpasswd"):
        with pytest.raises(RequestError, match="there is no log"):
            await ask(wrong)
