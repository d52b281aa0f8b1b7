"""A real manager and clients that misbehave: an error to that client, never a crash, never a leak."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muxserve.memory import MemoryManagerError, _native
from muxserve.memory._native import ModelConfig
from muxserve.memory.client import MemoryClient
from muxserve.spec import UnitSpec
from tests.memory.raw import (
    BAD_MAGIC,
    BAD_VERSION,
    EXHAUSTED,
    HEADER,
    HELLO,
    INVALID,
    MAGIC,
    MALFORMED,
    NOT_GREETED,
    NOT_OWNER,
    OK,
    STATISTICS,
    STEP,
    TOO_LARGE,
    UNKNOWN_MODEL,
    UNKNOWN_OPERATION,
    VERSION,
    WRONG_GENERATION,
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

    def raw(self, *, greeted: bool = True) -> RawClient:
        self.raws.append(RawClient(self.socket_path))
        if greeted:
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


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_garbage_is_answered_and_the_connection_closed(abuse: Abuse) -> None:
    raw = abuse.raw(greeted=False)
    raw.socket.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert raw.receive()[0] == BAD_MAGIC
    assert raw.closed_by_the_manager()


def test_another_version_is_told_so(abuse: Abuse) -> None:
    raw = abuse.raw(greeted=False)
    raw.send(HELLO, version=9)
    status, _, payload = raw.receive()
    assert status == BAD_VERSION
    assert b"version 9" in payload
    assert raw.closed_by_the_manager()


@pytest.mark.parametrize("length", [(8 << 20) + 4, 0xFFFFFFFC, 5])
def test_oversized_messages_are_refused_before_they_are_read(abuse: Abuse, length: int) -> None:
    raw = abuse.raw()
    before = resident_bytes(abuse.process)
    raw.send(STEP, length=length)
    assert raw.receive()[0] == TOO_LARGE
    assert raw.closed_by_the_manager()
    assert resident_bytes(abuse.process) - before < 4 << 20


@pytest.mark.parametrize("cut", [1, HEADER.size - 1, HEADER.size, HEADER.size + 4])
def test_truncated_messages_release_what_was_held(abuse: Abuse, cut: int) -> None:
    raw = abuse.raw()
    assert raw.step(reserve=3) == OK
    message = HEADER.pack(MAGIC, VERSION, STEP, raw.generation, 2, 24, 0, 0) + struct.pack("<6I", 0, 0, 5, 0, 0, 0)
    raw.socket.sendall(message[:cut])
    assert abuse.owned() == 18
    raw.socket.close()
    eventually(lambda: abuse.owned() == 0, "what the truncating client held is released")


def test_payloads_that_do_not_parse_are_refused_and_the_connection_lives(abuse: Abuse) -> None:
    raw = abuse.raw()
    for payload in (b"", bytes(20), struct.pack("<6I", 0, 0, 1, 0xFFFFFFFF, 0, 0), struct.pack("<7I", *[0] * 7)):
        raw.send(STEP, payload)
        assert raw.receive()[0] == MALFORMED
    assert raw.step(reserve=1) == OK


def test_a_wrong_generation_is_refused(abuse: Abuse) -> None:
    raw = abuse.raw()
    for generation in (0, raw.generation ^ 1):
        assert raw.step(reserve=1, generation=generation) == WRONG_GENERATION
    assert abuse.owned() == 0
    assert raw.step(reserve=1) == OK


def test_nothing_without_hello(abuse: Abuse) -> None:
    raw = abuse.raw(greeted=False)
    assert raw.step(reserve=1) == NOT_GREETED
    raw.hello()
    assert raw.step(reserve=1) == OK


def test_unknown_operations_models_and_blocks_are_refused(abuse: Abuse) -> None:
    raw, other = abuse.raw(), abuse.raw()
    raw.send(99)
    assert raw.receive()[0] == UNKNOWN_OPERATION
    assert raw.step(reserve=1, model=7) == UNKNOWN_MODEL
    assert raw.step(reserve=3) == OK
    for release in ((1, 1), (1, 9), (-5,), (0,), (1 << 30,)):
        assert raw.step(*release) == NOT_OWNER
    assert other.step(1) == NOT_OWNER
    assert abuse.owned() == 18
    assert raw.step(1, 2, 3) == OK
    assert raw.step(1) == NOT_OWNER


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
                raw.step(reserve=1)
        raw.socket.close()
    eventually(lambda: abuse.owned() == 0, "every page is back")
    eventually(lambda: open_files(abuse.process) == files, "the manager has closed every connection")


def test_a_thousand_open_connections_do_not_keep_clients_out(abuse: Abuse) -> None:
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(1000)]
    try:
        for stranger in strangers:
            stranger.connect(abuse.socket_path)
        assert abuse.raw().step(reserve=1) == OK
        assert open_files(abuse.process) < 300
    finally:
        for stranger in strangers:
            stranger.close()


def test_the_sixty_fifth_client_is_refused(abuse: Abuse) -> None:
    others = [abuse.raw() for _ in range(_native.MAX_CLIENTS - 1)]
    with pytest.raises(MemoryManagerError, match="all 64 client slots are taken") as error:
        MemoryClient(abuse.socket_path, "one too many")
    assert error.value.code == "TOO_MANY_CLIENTS"
    others[7].socket.close()
    eventually(lambda: len(abuse.honest.stats()["clients"]) == 63, "a slot is free")
    assert abuse.raw().step(reserve=1) == OK


def test_random_bytes(abuse: Abuse) -> None:
    random_ = random.Random(1)
    for _ in range(300):
        raw = RawClient(abuse.socket_path)
        data = bytearray(random_.randbytes(random_.randrange(1, 400)))
        if random_.random() < 0.8:  # a good header, so that the rest is looked at
            length = (len(data) // 4) * 4
            data[:0] = HEADER.pack(MAGIC, VERSION, random_.randrange(14), 0, 1, length, 0, 0)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.socket.sendall(data)
        raw.socket.close()
    for _ in range(300):
        raw = abuse.raw()
        operation = random_.choice([2, 3, 4, 5, 6, 7, 9, 10])  # not the one that removes a model
        words = [random_.randrange(4) if random_.random() < 0.9 else random_.randrange(1 << 32) for _ in range(12)]
        payload = struct.pack("<12I", *words)
        raw.send(operation, payload[: 4 * random_.randrange(13)])
        raw.send(STATISTICS)
        _, _, text = raw.receive()
        if b'"pools"' not in text:  # the answer to the first one; a good post has none
            raw.receive()
        raw.socket.close()
    quotas = abuse.honest.stats()["models"]
    assert sum(entry["quota_pages"] for entry in quotas) <= PAGES
    abuse.honest.set_quotas({"a": 60, "b": 40})
    for name in ("a", "b"):
        abuse.honest.reset_cache(name)


@pytest.mark.parametrize("manager", [["--stall-s", "1"]], indirect=True)
def test_a_client_that_never_reads_is_dropped(abuse: Abuse) -> None:
    raw = abuse.raw()
    raw.step(reserve=2)
    request = HEADER.pack(MAGIC, VERSION, STATISTICS, raw.generation, 5, 0, 0, 0)

    def flood() -> None:
        for _ in range(1000):
            raw.socket.sendall(request * 1000)

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        flood()
    eventually(lambda: abuse.owned() == 0, "what it held is released")


NOT_NAMES = [b"", b"x" * 129, b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"a\nb", b"a\0b", b"\xe2\x80\xa8"]


def test_every_reader_can_decode_what_clients_have_named(abuse: Abuse) -> None:
    for name in NOT_NAMES:
        raw = abuse.raw(greeted=False)
        raw.send(HELLO, text(name) + struct.pack("<I", 1))
        assert raw.receive()[0] == INVALID, name
    raw = abuse.raw()
    assert raw.step(reserve=1) == OK
    for name in NOT_NAMES:
        assert raw.hand_off(name, 1) == INVALID, name
    assert raw.hand_off("café".encode(), 1) == OK
    assert stats_of(abuse.honest.stats(), "a")["hand_off_keys"] == ["café"]
    abuse.honest.drop("a", "café")


def test_a_refusal_is_short_and_can_be_decoded(abuse: Abuse) -> None:
    raw = abuse.raw()
    raw.send(10, text(b'{"' + b"\xff" * 50_000 + b'": 1}'))
    status, _, payload = raw.receive()
    assert status == INVALID
    assert len(payload) < 1100
    payload.decode()


def test_hand_offs_of_nothing_are_refused_and_cost_nothing(abuse: Abuse) -> None:
    raw = abuse.raw()
    before = resident_bytes(abuse.process)
    for number in range(20_000):
        assert raw.hand_off(str(number).encode()) == INVALID
    assert resident_bytes(abuse.process) - before < 4 << 20
    assert stats_of(abuse.honest.stats(), "a")["hand_off_keys"] == []


LIMITED = ["--max-hand-offs-per-client", "10", "--max-hand-offs-per-model", "15"]


@pytest.mark.parametrize("manager", [LIMITED], indirect=True)
def test_hand_offs_are_bounded_by_client_and_by_model(abuse: Abuse) -> None:
    first, second = abuse.raw(), abuse.raw()
    for raw, block in ((first, 1), (second, 2)):
        assert raw.step(reserve=1) == OK
        made = 0
        while (status := raw.hand_off(f"{block}/{made}".encode(), block)) == OK:
            made += 1
        assert status == EXHAUSTED
        assert made == (10 if raw is first else 5)
    for block, made in ((1, 10), (2, 5)):
        for number in range(made):
            abuse.honest.drop("a", f"{block}/{number}")


def test_tables_that_no_pool_can_fill_are_refused(abuse: Abuse) -> None:
    with pytest.raises(MemoryManagerError, match="can ever fill") as error:
        abuse.honest.add_model(ModelConfig("huge", "p", 256, 256, num_blocks=1 << 20, quota_pages=0))
    assert error.value.code == "INVALID"


def test_little_is_kept_for_a_client_that_reads_slowly(abuse: Abuse) -> None:
    raw = abuse.raw()
    before = resident_bytes(abuse.process)
    request = HEADER.pack(MAGIC, VERSION, STATISTICS, raw.generation, 5, 0, 0, 0)

    def flood() -> None:
        with contextlib.suppress(OSError):
            for _ in range(200):
                raw.socket.sendall(request * 1000)

    sender = threading.Thread(target=flood)
    sender.start()
    taken = 0
    for _ in range(300):
        taken += len(raw.socket.recv(1 << 16))
        abuse.honest.stats()
    raw.socket.shutdown(socket.SHUT_RDWR)
    sender.join()
    assert taken > 4 << 20
    assert resident_bytes(abuse.process) - before < 8 << 20


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
    assert abuse.raw().step(reserve=1) == OK
