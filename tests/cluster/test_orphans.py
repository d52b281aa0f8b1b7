"""Processes of a unit whose host was killed, found by the unit's directory."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muxserve.cluster.ray.orphans import end_orphans
from muxserve.gpu.environment import PIPE
from tests.support.patience import PATIENCE

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts what sleeps, and has these words in its command line and this in its environment."""
    started: list[subprocess.Popen[bytes]] = []

    def one(*words: object, sleeps: str = "600", **environment: str) -> subprocess.Popen[bytes]:
        program = ["sh", "-c", f"sleep {sleeps} & echo $!; wait", "x", *map(str, words)]
        process = subprocess.Popen(program, env={**os.environ, **environment}, process_group=0, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield one
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()


def child_of(process: subprocess.Popen[bytes]) -> int:
    """The pid of what it has started."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_what_was_started_for_the_unit_is_ended(tmp_path: Path, start: Start) -> None:
    unit = tmp_path / "0123-u0"
    engine = start("--unit-spec", unit / "unit.json")
    memory = start("--socket", unit / "memory.sock")
    server = start(**{PIPE: str(unit / "mps" / "pipe")})
    of_server = child_of(server)  # has its environment
    ended = end_orphans(unit, grace=0.2)
    assert {engine.pid, memory.pid, server.pid, of_server} <= {*ended}
    for process in (engine, memory):
        assert process.wait(PATIENCE) == -9
    # Killed, or at its end because the child that it waits for was.
    assert server.wait(PATIENCE) in (-9, 0)


def test_what_ends_by_itself_is_let_do_so(tmp_path: Path, start: Start) -> None:
    ending = start("--unit-spec", tmp_path / "unit.json", sleeps="0.2")
    assert end_orphans(tmp_path, grace=PATIENCE) == []
    assert ending.wait(PATIENCE) == 0


def test_others_are_left_alone(tmp_path: Path, start: Start) -> None:
    unit = tmp_path / "0123-u0"
    others = [
        start("--unit-spec", tmp_path / "0123-u01" / "unit.json"),
        start("-f", unit / "logs" / "engine.log"),  # somebody reads it
        start(**{PIPE: str(tmp_path / "0123-u1" / "mps" / "pipe")}),
    ]
    assert end_orphans(unit, grace=0.1) == []
    assert [process.poll() for process in others] == [None] * 3
