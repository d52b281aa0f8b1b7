"""How fast pages move: between two pools, into a buffer and out of it, and through two migrators.

    python benchmarks/page_copies.py [--quick]

A request of 8,192 tokens of a model with 28 layers, 8 KV heads of 128 and bfloat16 is copied (939 MB), in pools of
shared memory of this machine. The bound is what one thread's memcpy of the same bytes takes. Every figure is the median
over the repetitions, of GB/s (10^9 bytes); the first round touches memory for the first time, and stands by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import machine, write_report
from muxserve import spec
from muxserve.memory import server
from muxserve.memory.client import MemoryClient
from muxserve.migration.chunks import SEND_BYTES
from muxserve.migration.pages import HostPages
from muxserve.migration.process import MACHINE
from muxserve.net import sockets
from muxserve.spec import Listen, ModelSpec, PoolSpec, UnitSpec
from muxserve.wire import Message, MigratorHello, MoveAbort, MoveFailed, MoveStage, MoveStaged, Reset, decode, encode

MODEL = "m"
LAYERS, HEADS, HEAD_DIM, ITEM = 28, 8, 128, 2
RESULT = Path(__file__).parent / "results" / "page_copies.json"


def unit_spec(root: Path, name: str, tokens: int, block_tokens: int, **changes: Any) -> UnitSpec:
    """A unit whose pool has room for `tokens` and a few more."""
    run_dir = root / name
    run_dir.mkdir()
    blocks = tokens // block_tokens + 8
    pages = (blocks - 1) * LAYERS * HEADS + 1
    model = ModelSpec(
        name=MODEL,
        path="",
        pool="p",
        dtype="bfloat16",
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        block_tokens=block_tokens,
        num_blocks=blocks,
        quota_pages=pages,
        floor_pages=0,
        max_len=tokens,
        rate=1.0,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prefix_caching=True,
        threads=1,
        prefill_share=0.5,
        decode_share=0.5,
        max_concurrency=8,
        max_queue=8,
    )
    page_bytes = 2 * block_tokens * HEAD_DIM * ITEM
    return UnitSpec(str(run_dir), name, "adbs", 1, [PoolSpec("p", page_bytes, pages)], [model], **changes)


class Unit:
    """A memory manager and, if asked for, a migrator; this process plays the unit scheduler."""

    def __init__(self, of: UnitSpec, machine_id: str = "") -> None:
        self.unit_spec = of
        self.memory = server.start(of)
        self.client = MemoryClient(of.memory_socket, "benchmark", 60.0)
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        sockets.bind_local(self.router, of.unit_address)
        self.migrator: subprocess.Popen[bytes] | None = None
        self.machine_id = machine_id

    def start_migrator(self) -> None:
        file = Path(self.unit_spec.run_dir) / "unit.json"
        spec.save(self.unit_spec, file)
        environment = {**os.environ, **({MACHINE: self.machine_id} if self.machine_id else {})}
        command = [sys.executable, "-m", "muxserve.migration.process", "--unit-spec", str(file), "--die-with-parent"]
        self.migrator = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        self.next(MigratorHello)
        self.send(Reset("1"))

    def send(self, message: Message) -> None:
        self.router.send_multipart((b"migrator", encode(message)))

    def next(self, *kinds: type[Message]) -> Any:
        while True:
            assert self.router.poll(60_000), f"no {kinds}"
            message = decode(self.router.recv_multipart()[1])
            assert not isinstance(message, MoveFailed), message
            if isinstance(message, kinds):
                return message

    def fill(self, count: int) -> list[int]:
        blocks = self.client.step(MODEL, reserve=count).reserved
        view = self.client.map(MODEL)
        view.pool[view.page_table[blocks].reshape(-1)] = 7
        return [int(block) for block in blocks]

    def close(self) -> None:
        for process in (self.migrator, self.memory):
            if process is not None:
                process.terminate()
                process.wait(30)
        for stream in (self.memory.stdout, self.memory.stderr):
            if stream is not None:
                stream.close()
        self.router.close(linger=0)
        self.context.term()
        server.remove_segments(self.unit_spec)


def rates(size: int, repetitions: int, copy: Callable[[], object]) -> dict[str, float]:
    """GB/s of the first time and the median of the others."""
    seconds = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - began)
    return {"first": round(size / seconds[0] / 1e9, 2), "then": round(size / statistics.median(seconds[1:]) / 1e9, 2)}


def in_process(tokens: int, block_tokens: int, repetitions: int) -> dict[str, Any]:
    """One thread, in this process."""
    with tempfile.TemporaryDirectory(prefix="mx") as root:
        units = [Unit(unit_spec(Path(root), name, tokens, block_tokens)) for name in ("a", "b")]
        try:
            a, b = (HostPages(unit.client.map(MODEL)) for unit in units)
            ours = units[0].fill(tokens // block_tokens)
            theirs = units[1].client.step(MODEL, reserve=len(ours)).reserved.tolist()
            # As a unit that has served for a while hands them out: in no order.
            np.random.default_rng(1).shuffle(ours)
            size = len(ours) * LAYERS * HEADS * a.pool.shape[1]
            plain = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
            result: dict[str, Any] = {"page_bytes": int(a.pool.shape[1]), "bytes": size}
            result["memcpy"] = rates(size, repetitions, lambda: np.copyto(plain[1], plain[0]))
            result["pool_to_pool"] = rates(size, repetitions, lambda: a.copy_to(ours, b, theirs))
            # In the pieces in which they are sent.
            per_block = size // len(ours)
            count = max(1, SEND_BYTES // per_block)
            pieces = [slice(at, at + count) for at in range(0, len(ours), count)]
            result["gather"] = rates(size, repetitions, lambda: [a.gather(ours[piece]) for piece in pieces])
            data = [plain[0][piece.start * per_block : piece.stop * per_block] for piece in pieces]
            together = list(zip(data, pieces, strict=True))
            result["scatter"] = rates(size, repetitions, lambda: [b.scatter(d, theirs[p]) for d, p in together])
            return result
        finally:
            for unit in units:
                unit.close()


def through_migrators(tokens: int, block_tokens: int, repetitions: int, way: str) -> dict[str, Any]:
    """From the unit scheduler's order to its answer: one stage of all blocks, between two processes."""
    with tempfile.TemporaryDirectory(prefix="mx") as root:
        changes: dict[str, Any] = {}
        listen = None
        if way == "tcp":
            listen = Listen("127.0.0.1", sockets.free_port("127.0.0.1"), sockets.free_port("127.0.0.1"))
            changes["keys"] = sockets.new_keys()
        a = Unit(unit_spec(Path(root), "a", tokens, block_tokens, **changes))
        b = Unit(
            unit_spec(Path(root), "b", tokens, block_tokens, **changes, listen=listen),
            "" if way == "shared" else "elsewhere",
        )
        try:
            a.start_migrator()
            b.start_migrator()
            address = f"tcp://127.0.0.1:{listen.migrator_port}" if listen else b.unit_spec.migrator_address
            blocks = a.fill(tokens // block_tokens)
            size = len(blocks) * LAYERS * HEADS * a.unit_spec.pools[0].page_bytes
            seconds = []
            for number in range(repetitions + 1):
                began = time.perf_counter()
                a.send(MoveStage(f"a:1:{number}", MODEL, address, 0, blocks, len(blocks)))
                a.next(MoveStaged)
                seconds.append(time.perf_counter() - began)
                free = b.client.map(MODEL).counters
                a.send(MoveAbort(f"a:1:{number}"))
                while free.used_pages:
                    time.sleep(0.001)
            # A last stage of one block (1.8 MB): what is waited for.
            a.send(MoveStage("a:2:1", MODEL, address, 0, blocks[:1], len(blocks)))
            a.next(MoveStaged)
            fixed = []
            for number in range(1, 101):
                began = time.perf_counter()
                a.send(MoveStage("a:2:1", MODEL, address, number % 8, blocks[number % 8 : number % 8 + 1], 0))
                a.next(MoveStaged)
                fixed.append(time.perf_counter() - began)
            return {
                "first": round(size / seconds[0] / 1e9, 2),
                "then": round(size / statistics.median(seconds[1:]) / 1e9, 2),
                "one_block_ms": round(statistics.median(fixed) * 1e3, 3),
            }
        finally:
            a.close()
            b.close()


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the size, three repetitions; to no file")
    options = parser.parse_args()
    tokens, repetitions = (1024, 3) if options.quick else (8192, 7)
    report: dict[str, Any] = {"machine": machine(), "in_process": []}
    for block_tokens in (16, 32, 64):
        report["in_process"].append(in_process(tokens, block_tokens, repetitions))
        print(report["in_process"][-1])
    report["through_migrators"] = {}
    for way in ("shared", "unix", "tcp"):
        report["through_migrators"][way] = through_migrators(tokens, 16, repetitions, way)
        print(way, report["through_migrators"][way])
    if not options.quick:
        write_report(RESULT, report)


if __name__ == "__main__":
    main()
