"""`muxserve top` on recorded frames: printed, in a terminal, and when there is nothing to show."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from io import StringIO

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.cli.top import TopScreen
from muxserve.metrics.live import LiveFrame, LiveJob, LiveModel, LiveMove, LivePool, LiveUnit, PoolPart, Spread
from tests.cli.conftest import Endpoint
from tests.support.patience import PATIENCE


def recorded(at: float = 1000.0, tokens: int = 5000) -> LiveFrame:
    """Two models that are up and one that sleeps, on a unit each of the former is on."""
    chat = LiveModel(
        **{"name": "chat-with-a-rather-long-name", "status": "up", "reason": "", "shape": "split"},
        **{
            "replicas": ["u0"],
            "bounds": (1, None),
            "running": 3,
            "waiting": 1,
            "queued": 2,
            "prefilling": 1,
            "decoding": 2,
        },
        **{"tokens": tokens, "requests": 40, "ttft": Spread(0.0591, 0.226), "tpot": Spread(0.0051, 0.033)},
        **{"slo_ttft": 0.3, "slo_tpot": 0.03, "met": 0.875},
    )
    code = msgspec.structs.replace(chat, name="code", ttft=None, tpot=None, met=None, requests=0, tokens=0)
    away = msgspec.structs.replace(code, name="away", status="asleep", replicas=[], running=0, waiting=0, queued=0)
    pool = LivePool("pool0", 2047, 719, 32768, [PoolPart(chat.name, 163, 900, 1092), PoolPart("code", 0, 265, 546)])
    unit = LiveUnit(
        "u0",
        status="up",
        policy="adbs",
        remote=False,
        serves=[chat.name, "code"],
        draining=["code"],
        share_used=0.75,
        pools=[pool],
    )
    jobs = [
        LiveJob(
            "u0",
            key="e.1",
            model=chat.name,
            phase="prefill",
            share=0.5,
            start=at - 20.0,
            end=at - 19.0,
            steps=4,
            tokens=900,
        ),
        LiveJob(
            "u0", key="e.2", model=chat.name, phase="decode", share=1.0, start=at - 15.0, end=at, steps=400, tokens=1600
        ),
    ]
    moves = [LiveMove("u0", at - 3.0, chat.name, "u1", 0.02)]
    return LiveFrame(at, status="ok", gateways=1, models=[chat, code, away], units=[unit], jobs=jobs, moves=moves)


def drawn(screen: TopScreen, width: int, height: int | None = None) -> str:
    console = Console(file=StringIO(), width=width, height=height or 200, color_system=None)
    console.print(screen.fitted(console) if height else screen.draw(), end="")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture
def screen() -> TopScreen:
    screen = TopScreen("http://fleet")
    screen.take(recorded())
    return screen


@pytest.mark.parametrize("width", [80, 100, 160])
def test_what_there_is(screen: TopScreen, width: int) -> None:
    text = drawn(screen, width)
    assert max(map(len, text.splitlines())) <= width
    for figure in ("59 ms", "226 ms", "300 ms", "5.1 ms", "33 ms", "30 ms", "87.5% of 40", "163 / 1,092", "asleep"):
        assert figure in text
    said = "u0 up adbs, 75% of its compute leased, requests that moved away in 30 s: 1 draining: code"
    assert said in " ".join(text.split())
    assert "1,328 of 2,047 pages" in text


def test_jobs_are_drawn_where_they_were(screen: TopScreen) -> None:
    lines = [
        line
        for line in drawn(screen, 26 + 30).splitlines()
        if "prefill ▄" in line or " decode " in line or "prefill  " in line
    ]
    prefill, decode = (line[26:] for line in lines)
    # A column is a second: 10 to 11 at half of the unit, the last 15 at all of it.
    assert prefill == " " * 10 + "▄" + " " * 19
    assert decode == " " * 15 + "█" * 15


def test_the_rate_is_of_the_last_frames(screen: TopScreen) -> None:
    assert " 0 tokens/s" in drawn(screen, 160)
    screen.take(recorded(1001.0, 5250))
    assert "250 tokens/s" in drawn(screen, 160)
    screen.take(recorded(1002.0, 10))  # the unit scheduler was started anew
    screen.take(recorded(1003.0, 110))
    assert "100 tokens/s" in drawn(screen, 160)


def test_old_jobs_go(screen: TopScreen) -> None:
    screen.take(msgspec.structs.replace(recorded(1040.0), jobs=[], moves=[]))
    text = drawn(screen, 100)
    assert "s ago" not in text
    assert "moved away" not in text


def test_a_low_terminal_has_the_first_lines(screen: TopScreen) -> None:
    lines = drawn(screen, 160, 8).splitlines()
    assert len(lines) == 8
    assert re.fullmatch(r"… \d+ more lines; a taller terminal shows them", lines[-1])


# ------------------------------------------------------------ the command


def stream(*frames: LiveFrame) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(frame) + b"\n\n" for frame in frames)


def test_once(endpoint: Endpoint) -> None:
    endpoint.answers["/ui/events"] = 200, stream(recorded(), recorded(1001.0, 5250))
    result = CliRunner().invoke(app, ["top", "--url", endpoint.url, "--api-key", "k", "--once"])
    assert result.exit_code == 0, result.output
    assert "250 tokens/s" in result.stdout
    assert endpoint.seen == [("/ui/events", "Bearer k")]


def test_as_json(endpoint: Endpoint) -> None:
    frames = recorded(), recorded(1001.0, 5250)
    endpoint.answers["/ui/events"] = 200, stream(*frames)
    one = CliRunner().invoke(app, ["top", "--url", endpoint.url, "--json", "--once"])
    assert (one.exit_code, one.stdout) == (0, msgspec.json.encode(frames[0]).decode() + "\n")
    all_of_them = CliRunner().invoke(app, ["top", "--url", endpoint.url, "--json"])
    assert [msgspec.json.decode(line, type=LiveFrame) for line in all_of_them.stdout.splitlines()] == [*frames]
    # A script must not take a broken connection for an end that was asked for.
    assert all_of_them.exit_code == 2
    assert "has ended the connection" in all_of_them.stderr


@pytest.mark.parametrize(
    ("status", "words"),
    [(404, "`gateway.ui` is off there"), (401, "give an admin's key with --api-key"), (503, "busy")],
)
def test_nothing_to_show(endpoint: Endpoint, status: int, words: str) -> None:
    endpoint.answers["/ui/events"] = status, {"error": {"message": "busy"}}
    result = CliRunner().invoke(app, ["top", "--url", endpoint.url])
    assert result.exit_code == 2
    assert words in result.stderr


def test_nobody_there() -> None:
    result = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "no answer from http://127.0.0.1:9" in result.stderr


@pytest.mark.parametrize("columns", [80, 100])
def test_in_a_terminal_until_ctrl_c(endpoint: Endpoint, columns: int) -> None:
    endpoint.answers["/ui/events"] = 200, stream(recorded(), recorded(1001.0, 5250))
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "muxserve.cli.app", "top", "--url", endpoint.url]
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=subprocess.PIPE, env={**environment, "TERM": "xterm"}
    ) as process:
        os.close(inside)
        seen = b""
        while b"trying again" not in seen:  # after the stream's end
            seen += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
    assert "250 tokens/s" in text
    assert "87.5% of 40" in text
