from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from muxserve.memory import server
from muxserve.memory.client import MemoryClient
from muxserve.spec import UnitSpec
from tests.memory.support import unit_spec
from tests.support import segments


class Start(Protocol):
    def __call__(self, of: UnitSpec, options: Sequence[str] = ()) -> subprocess.Popen[bytes]: ...


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts managers and stops them at the end of the test."""
    running: list[tuple[UnitSpec, subprocess.Popen[bytes]]] = []

    def run(of: UnitSpec, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        process = server.start(of, options=options)
        running.append((of, process))
        return process

    yield run
    for of, process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, process.stderr.read() if process.stderr else ""
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        server.remove_segments(of)


@pytest.fixture
def small(tmp_path: Path) -> UnitSpec:
    return unit_spec(tmp_path)


@pytest.fixture
def manager(start: Start, small: UnitSpec, request: pytest.FixtureRequest) -> subprocess.Popen[bytes]:
    """With the limits that a test may give by indirect parametrization."""
    return start(small, getattr(request, "param", ()))


@pytest.fixture
def connect(manager: subprocess.Popen[bytes], small: UnitSpec) -> Iterator[Callable[[str], MemoryClient]]:
    """Makes clients of the manager."""
    clients: list[MemoryClient] = []

    def make(name: str = "test") -> MemoryClient:
        clients.append(MemoryClient(small.memory_socket, name, timeout_s=60))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(autouse=True)
def no_segments_left(tmp_path: Path) -> Iterator[None]:
    """Managers that a test kills, and those that refuse to start, leave what the end of a fleet removes."""
    yield
    segments.remove(segments.left([str(tmp_path)]))
