"""A real manager and clients that misbehave: what its process leaks, and which limits its command line sets.

What is refused, and what bad frames, names and counts do, the C++ tests show: dispatcher, limits, server and fuzz.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muxserve.memory.client import MemoryClient
from muxserve.spec import UnitSpec
from tests.memory.raw import (
    ADD_MODEL,
    EXHAUSTED,
    HEADER,
    HELLO,
    INVALID,
    MAGIC,
    OK,
    STATISTICS,
    VERSION,
    RawClient,
    text,
)
from tests.memory.support import PAGES, assert_balanced, stats_of
from tests.support.patience import eventually


class Abuse:
    """A manager with one honest client, and raw connections to it."""

    def __init__(self, process: subprocess.Popen[bytes], socket_path: str) -> None:
        self.process = process
        self.socket_path = socket_path
        self.honest = MemoryClient(socket_path, "honest", timeout_s=60)
        self.raws: list[RawClient] = []

    def raw(self) -> RawClient:
        self.raws.append(RawClient(self.socket_path))
        self.raws[-1].hello()
        return self.raws[-1]

    def owned(self) -> int:
        return int(stats_of(self.honest.stats(), "p")["owned_pages"])

    def end(self) -> None:
        """The manager must be alive, have every page and serve the honest client."""
        for raw in self.raws:
            raw.socket.close()
        assert self.process.poll() is None
        eventually(lambda: len(self.honest.stats()["clients"]) == 1, "the raw clients have left")
        assert stats_of(self.honest.stats(), "p")["free_pages"] == PAGES - 1
        assert len(self.honest.step("a", reserve=10).reserved) == 10
        assert_balanced(self.honest)
        self.honest.close()


@pytest.fixture
def abuse(manager: subprocess.Popen[bytes], small: UnitSpec) -> Iterator[Abuse]:
    it = Abuse(manager, small.memory_socket)
    yield it
    it.end()


def open_files(process: subprocess.Popen[bytes]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_thousand_connections_opened_and_dropped_leak_nothing(abuse: Abuse) -> None:
    files = open_files(abuse.process)
    for round_ in range(2):
        for _ in range(500):
            socket_ = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            socket_.connect(abuse.socket_path)
            if round_ == 1:
                socket_.sendall(b"half a he")
            socket_.close()
    eventually(lambda: open_files(abuse.process) == files, "the manager has closed every connection")


def test_a_thousand_clients_that_hold_pages_and_vanish_leak_nothing(abuse: Abuse) -> None:
    files = open_files(abuse.process)
    for _ in range(1000):
        raw = RawClient(abuse.socket_path)
        with contextlib.suppress(EOFError):  # refused while earlier ones are still being closed
            raw.send(HELLO, struct.pack("<I4sI", 3, b"raw", os.getpid()))
            status, raw.generation, _ = raw.receive()
            if status == OK:
                raw.reserve(1)
        raw.socket.close()
    eventually(lambda: abuse.owned() == 0, "every page is back")
    eventually(lambda: open_files(abuse.process) == files, "the manager has closed every connection")


@pytest.mark.parametrize("manager", [["--stall-s", "1"]], indirect=True)
def test_a_client_that_never_reads_is_dropped(abuse: Abuse) -> None:
    raw = abuse.raw()
    raw.reserve(2)
    request = HEADER.pack(MAGIC, VERSION, STATISTICS, raw.generation, 5, 0, 0, 0)

    def flood() -> None:
        for _ in range(1000):
            raw.socket.sendall(request * 1000)

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        flood()
    eventually(lambda: abuse.owned() == 0, "what it held is released")


def test_a_refusal_is_short_and_can_be_decoded(abuse: Abuse) -> None:
    raw = abuse.raw()
    raw.send(ADD_MODEL, text(b'{"' + b"\xff" * 50_000 + b'": 1}'))
    status, _, payload = raw.receive()
    assert status == INVALID
    assert len(payload) < 1100
    payload.decode()


LIMITED = ["--max-hand-offs-per-client", "10", "--max-hand-offs-per-model", "15"]


@pytest.mark.parametrize("manager", [LIMITED], indirect=True)
def test_hand_offs_are_bounded_by_client_and_by_model(abuse: Abuse) -> None:
    first, second = abuse.raw(), abuse.raw()
    for raw, block in ((first, 1), (second, 2)):
        assert raw.reserve(1) == OK
        made = 0
        while (status := raw.hand_off(f"{block}/{made}".encode(), block)) == OK:
            made += 1
        assert status == EXHAUSTED
        assert made == (10 if raw is first else 5)
    for block, made in ((1, 10), (2, 5)):
        for number in range(made):
            abuse.honest.drop("a", f"{block}/{number}")


def test_it_serves_on_when_descriptors_have_run_out(abuse: Abuse) -> None:
    limits = resource.prlimit(abuse.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(abuse.process.pid, resource.RLIMIT_NOFILE, (open_files(abuse.process), limits[1]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(abuse.socket_path)
        before = cpu_seconds(abuse.process)
        for _ in range(10):
            abuse.honest.stats()
            time.sleep(0.05)  # what it does meanwhile is what is measured
        assert cpu_seconds(abuse.process) - before < 0.25, "it tries to take the connection all the time"
    resource.prlimit(abuse.process.pid, resource.RLIMIT_NOFILE, limits)
    assert abuse.raw().reserve(1) == OK
