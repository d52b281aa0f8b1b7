"""Units as migrators see them: a memory manager, the unit scheduler and the engine played by the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from muxserve import spec
from muxserve.memory import server
from muxserve.memory.client import MemoryClient
from muxserve.migration.process import MACHINE
from muxserve.net import sockets
from muxserve.spec import Keys, Listen, UnitSpec
from muxserve.wire import (
    Message,
    MigratorHello,
    MoveStage,
    Moving,
    MovingIn,
    Reset,
    TakeOver,
    decode,
    encode,
)
from tests.memory.support import model, unit_spec
from tests.support.patience import PATIENCE, eventually
from tests.support.requests import ASKED, asking, without

M = TypeVar("M", bound=Message)

MODEL = "m"
LAYERS, HEADS, TOKENS = 2, 3, 16


class Unit:
    """One unit: real memory manager, real migrator; the rest is played."""

    def __init__(
        self,
        root: Path,
        name: str,
        context: zmq.Context[Any],
        *,
        ranks: int = 1,
        page_bytes: int = 256,
        blocks: int = 64,
        bandwidth: float = 0.0,
        listen: Listen | None = None,
        keys: Keys | None = None,
        machine: str = "",
        head_dim: int = 64,
    ) -> None:
        run_dir = root / name
        run_dir.mkdir(parents=True)
        pages = (blocks - 1) * LAYERS * HEADS + 1
        plain = unit_spec(run_dir, pages, [model(MODEL, LAYERS, HEADS, blocks, pages)])
        self.unit_spec: UnitSpec = msgspec.structs.replace(
            plain,
            unit=name,
            ranks=ranks,
            pools=[msgspec.structs.replace(plain.pools[0], page_bytes=page_bytes)],
            models=[msgspec.structs.replace(plain.models[0], head_dim=head_dim, block_tokens=TOKENS)],
            listen=listen,
            keys=keys,
            migration_bandwidth=bandwidth,
        )
        self.file = run_dir / "unit.json"
        spec.save(self.unit_spec, self.file)
        self._machine = machine
        self._context = context
        self.memory: subprocess.Popen[bytes] | None = None
        self.migrator: subprocess.Popen[bytes] | None = None
        self.log = run_dir / "migrator.log"
        self.heard: list[Message] = []
        self.start_memory()
        self.engine = MemoryClient(self.unit_spec.memory_socket, "engine", PATIENCE)
        self.start_scheduler("1")
        self.start_migrator()

    # ------------------------------------------------------------ processes

    def start_memory(self) -> None:
        self.memory = server.start(self.unit_spec)

    def restart(self, what: str) -> None:
        """Kill one of the processes and start it again, as the controller would."""
        if what == "scheduler":
            self.stop_scheduler()
            self.start_scheduler(self.epoch + "+")
            return
        self.kill(what)
        if what == "memory":
            self.close_memory_streams()
            self.start_memory()
            self.engine.close()
            self.engine = MemoryClient(self.unit_spec.memory_socket, "engine", PATIENCE)
        else:
            self.start_migrator()

    def start_migrator(self) -> None:
        environment = dict(os.environ)
        if self._machine:
            environment[MACHINE] = self._machine
        with self.log.open("ab") as log:
            self.migrator = subprocess.Popen(
                [sys.executable, "-m", "muxserve.migration.process", "--unit-spec", str(self.file)],
                stderr=log,
                env=environment,
            )

    def start_scheduler(self, epoch: str) -> None:
        self.epoch = epoch
        self.router = self._context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sockets.bind_local(self.router, self.unit_spec.unit_address)

    def stop_scheduler(self) -> None:
        self.router.close(linger=0)

    def kill(self, what: str) -> None:
        process = getattr(self, what)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        self.router.close(linger=0)
        for process in (self.migrator, self.memory):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(PATIENCE)
        self.engine.close()
        self.close_memory_streams()
        server.remove_segments(self.unit_spec)

    def close_memory_streams(self) -> None:
        assert self.memory is not None
        for stream in (self.memory.stdout, self.memory.stderr):
            if stream is not None:
                stream.close()

    # ------------------------------------------------------------ messages

    def send(self, message: Message) -> None:
        self.router.send_multipart((b"migrator", encode(message)))

    def next(self, *kinds: type[M], seconds: float = PATIENCE) -> M:
        """The next message of one of these kinds; hellos are answered, take-overs only if they are asked for."""
        end = time.monotonic() + seconds
        while True:
            for message in self.heard:
                if isinstance(message, kinds):
                    self.heard.remove(message)
                    return message
            left = end - time.monotonic()
            there = left > 0 and self.router.poll(left * 1000)
            assert there, (
                f"no {kinds} from the migrator of {self.unit_spec.unit}; heard {self.heard}; {self.log.read_text()}"
            )
            _, frame = self.router.recv_multipart()
            message = decode(frame)
            self.heard.append(message)
            if isinstance(message, MigratorHello):
                self.send(Reset(self.epoch))

    def until_moving_in(self, moves: dict[str, int]) -> None:
        """Wait until the migrator says so; what it said before is passed over."""
        while self.next(MovingIn).moves != moves:
            pass

    def up(self) -> None:
        """Wait for the migrator, and until it has taken in the answer."""
        self.next(MigratorHello)
        self.until_moving_in({})

    def until_bound(self, times: int) -> None:
        """Wait until the migrator has been bound to that many memory managers; it tells nobody but its log."""
        eventually(lambda: self.log.read_text().count(": bound to the memory manager") >= times, self.log.read_text)

    # ------------------------------------------------------------ pages

    def hand_offs(self) -> list[str]:
        """Keys that wait at the memory manager."""
        (entry,) = self.engine.stats()["models"]
        return list(entry["hand_off_keys"])

    def free_pages(self) -> int:
        return int(self.engine.stats()["pools"][0]["free_pages"])

    def eventually_free(self, pages: int, seconds: float = PATIENCE) -> None:
        """Until so many pages are free."""
        eventually(lambda: self.free_pages() == pages, lambda: f"{self.free_pages()} pages free, not {pages}", seconds)

    def fill(self, count: int, seed: int = 1) -> list[int]:
        """Blocks of the engine with noise in all their pages."""
        blocks = self.engine.step(MODEL, reserve=count).reserved
        assert blocks.size == count
        noise = np.random.default_rng(seed)
        for rank in range(self.unit_spec.ranks):
            view = self.engine.map(MODEL, rank)
            pages = view.page_table[blocks].reshape(-1)
            view.pool[pages] = noise.integers(0, 256, (pages.size, view.pool.shape[1]), dtype=np.uint8)
        return [int(block) for block in blocks]

    def content(self, blocks: list[int]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """By rank: uint8[blocks, pages of a block, page_bytes]."""
        ids = np.array(blocks, dtype=np.int64)
        views = [self.engine.map(MODEL, rank) for rank in range(self.unit_spec.ranks)]
        return [view.pool[view.page_table[ids].reshape(len(blocks), -1)].copy() for view in views]


def moving(tokens: int, **changes: Any) -> Moving:
    values: dict[str, Any] = {
        "request_id": "r",
        "attempt": 0,
        "gateway_epoch": "g",
        "model": MODEL,
        "waited": 0.5,
        "output_tokens": [1, 2],
        "computed_tokens": tokens,
    } | changes
    return Moving(request=asking(**without(values, *ASKED)), **values)


def stage(move: str, target: Unit | str, since: int, blocks: list[int], reserve: int = 0) -> MoveStage:
    address = target if isinstance(target, str) else target.unit_spec.migrator_address
    return MoveStage(move, MODEL, address, since, blocks, reserve)


def adopt(unit: Unit, take_over: TakeOver) -> list[int]:
    """What the decode engine does."""
    return [int(block) for block in unit.engine.adopt(MODEL, take_over.key)]
