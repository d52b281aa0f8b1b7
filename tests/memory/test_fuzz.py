"""Clients that send anything to a real manager, beside one that must be served all the time.

By seed: `MUXSERVE_FUZZ_SEED=n` runs that one again, `MUXSERVE_FUZZ_SECONDS=n` runs new ones for so long.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator

from muxserve.memory.client import MemoryClient
from muxserve.spec import UnitSpec
from tests.memory.conftest import Start
from tests.memory.raw import (
    ADD_MODEL,
    ADOPT,
    DROP,
    HAND_OFF,
    HEADER,
    HELLO,
    MAGIC,
    POST,
    STATISTICS,
    STEP,
    VERSION,
    text,
)
from tests.memory.support import assert_balanced
from tests.support.patience import eventually

ROUNDS = 1500
OPTIONS = ["--stall-s", "1", "--max-hand-offs-per-client", "5"]


def seeds() -> Iterator[int]:
    if only := os.environ.get("MUXSERVE_FUZZ_SEED"):
        yield int(only)
        return
    yield 1
    if seconds := os.environ.get("MUXSERVE_FUZZ_SECONDS"):
        end, seed = time.monotonic() + float(seconds), time.time_ns() % 10**9
        while time.monotonic() < end:
            seed += 1
            yield seed


class BadClient:
    """One connection: some good frames, some wrong ones, some halves, read slowly or not at all. Waits for nothing."""

    def __init__(self, path: str, generation: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.generation = generation
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.socket.setblocking(False)
        self.reads = self.random.choice([0, 64, 1 << 16])
        self.unsent = self.frame(HELLO, text(b"fuzzer") + struct.pack("<I", 1)) if self.random.random() < 0.9 else b""

    def act(self) -> bool:
        """False when one of the two has had enough."""
        try:
            if self.reads and not self.socket.recv(self.reads):
                return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        if len(self.unsent) < 1 << 18:
            self.unsent += b"".join(self.any_frame() for _ in range(self.random.choice([0, 1, 1, 3, 100])))
        size = self.random.choice([len(self.unsent), self.random.randrange(1, 100)])
        try:
            self.unsent = self.unsent[self.socket.send(self.unsent[:size]) :] if self.unsent else b""
        except BlockingIOError:
            pass
        except OSError:
            return False
        return self.random.random() > 0.01

    def frame(self, operation: int, payload: bytes, length: int | None = None) -> bytes:
        generation = 0 if operation == HELLO else self.generation
        size = len(payload) if length is None else length
        return HEADER.pack(MAGIC, VERSION, operation, generation, 1, size, 0, 0) + payload

    def any_model(self) -> bytes:
        """Never one that the manager takes: its name is empty or its quota more than the pool's."""
        pick = self.random
        name = text(pick.choice([b"", b"fuzzed"]))
        numbers = struct.pack("<5q", *(pick.choice([1, 3, -1, 2**40, 2**63 - 1]) for _ in range(3)), 2**30, 0)
        layers = pick.choice([0, 1, 700, 2**32 - 1])
        payload = name + text(b"p") + numbers + struct.pack("<I", layers) + bytes(8 * min(layers, 1500))
        return payload[: 4 * pick.randrange(len(payload) // 4)] if pick.random() < 0.3 else payload

    def any_frame(self) -> bytes:
        pick = self.random
        if pick.random() < 0.004:
            return pick.randbytes(pick.randrange(1, 200))
        blocks = [pick.randrange(1, 15) for _ in range(pick.randrange(3))]
        ids = struct.pack(f"<{len(blocks)}i", *blocks)
        key = text(pick.choice([b"k%d" % pick.randrange(9), b"\xff", b"", b"k" * 200]))
        model = pick.choice([0, 0, 1, 7])
        count = len(blocks) if pick.random() < 0.95 else pick.getrandbits(32)
        operation, payload = pick.choice(
            [
                (STEP, struct.pack("<6I", model, 1, pick.choice([0, 1, 4, 2**32 - 1]), count, 0, 0) + ids),
                (POST, struct.pack("<6I", model, 0, 0, count, 0, 0) + ids),
                (HAND_OFF, struct.pack("<IqII", model, 10**9, count, 0) + key + ids),
                (ADOPT, struct.pack("<I", model) + key),
                (DROP, struct.pack("<I", model) + key),
                (STATISTICS, b""),
                (ADD_MODEL, self.any_model()),
                (pick.randrange(99), pick.randbytes(4 * pick.randrange(20))),
            ]
        )
        if operation in (7, 11):  # quotas and models are the bystander's, too
            operation = 99
        announced = len(payload) if pick.random() < 0.995 else 4 * pick.getrandbits(22)
        return self.frame(operation, payload, announced)


def play(start: Start, of: UnitSpec, seed: int) -> None:
    process = start(of, OPTIONS)
    pick = random.Random(seed)
    bystander = MemoryClient(of.memory_socket, "bystander", timeout_s=60)
    clients: list[BadClient | None] = [None] * 12
    longest = 0.0
    for number in range(ROUNDS):
        at = pick.randrange(len(clients))
        client = clients[at] or BadClient(of.memory_socket, bystander.generation, seed * ROUNDS + number)
        clients[at] = client if client.act() else None
        if clients[at] is None:
            client.socket.close()
        if number % 5 == 0:
            begin = time.monotonic()
            held = bystander.step("b", reserve=1, partial=True).reserved
            longest = max(longest, time.monotonic() - begin)
            bystander.post("b", release=held)
        if number % 100 == 0:
            assert_balanced(bystander)
    for client in clients:
        if client is not None:
            client.socket.close()
    eventually(lambda: len(bystander.stats()["clients"]) == 1, "the manager has noticed every end")
    eventually(lambda: all(not pool["handed_pages"] for pool in bystander.stats()["pools"]), "hand-offs expire")
    assert_balanced(bystander)
    assert all(pool["owned_pages"] == 0 for pool in bystander.stats()["pools"])
    assert longest < 30, f"the bystander waited {longest:.1f} s for an answer"
    bystander.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_bad_clients_harm_nobody(start: Start, small: UnitSpec) -> None:
    for seed in seeds():
        try:
            play(start, small, seed)
        except BaseException as error:
            error.add_note(f"to run this again: MUXSERVE_FUZZ_SEED={seed}")
            raise
