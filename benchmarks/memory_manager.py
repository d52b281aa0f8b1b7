"""Allocate and free for 64 decoding sequences and for 8 prefills: our manager beside vLLM's in-process block pool.

    python benchmarks/memory_manager.py [--rounds 9] [--out benchmarks/results/memory_manager.json]

A model of 32 layers and 8 KV heads, blocks of 16 tokens: one block is 256 head pages. `decode` gives 64 blocks back and
takes 64, one for each sequence; `prefill` does so with 8 x 64 blocks, 8 prompts of 1,024 tokens. Side by side, in turns
within each round:

* `round trip`: our manager, another process, through the Python client: one message there and back.
* `... every ms`: the same with a millisecond of sleep before each, as an engine calls it: both processes have slept.
* `core from Python`, `core`: the same operation inside one process, through the binding and from C++.
* `vector`: a bare `std::vector` of free page ids, popped and pushed one by one: no owners, no quotas, no blocks.
* `BlockPool`, `allocate_slots`: vLLM's, in this process. They count blocks: no page tables, no quotas, no sharing.

Every sample is one operation. Percentiles are over the samples of all rounds; the median and p99 of each round are
listed too, with how much of the machine others were using meanwhile, because on a shared machine the rounds differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from report import machine, write_report

from muxserve.memory import _native, server
from muxserve.memory.client import MemoryClient
from muxserve.spec import ModelSpec, PoolSpec, UnitSpec

ROOT = Path(__file__).resolve().parent.parent
LAYERS, KV_HEADS, BLOCK_TOKENS = 32, 8, 16
PAGES_PER_BLOCK = LAYERS * KV_HEADS
SHAPES = {"decode": 64, "prefill": 8 * 1024 // BLOCK_TOKENS}
"""Blocks of one operation."""
TARGETS = {"round trip median us": 25.0, "round trip p99 us": 50.0, "core head pages per second": 1e9}

WARM_UP_S = 0.25

Samples = dict[str, list[float]]


def timed(action: Callable[[], None], count: int, pause_s: float = 0.0) -> list[float]:
    """Microseconds of each of `count` calls; `pause_s` is slept before each.

    Before, the action runs for `WARM_UP_S`: so long takes the kernel to put two busy processes on two cores.
    """
    times = []
    clock = time.perf_counter_ns
    warm = clock() + int(WARM_UP_S * 1e9)
    while clock() < warm:
        action()
    for _ in range(count):
        if pause_s:
            time.sleep(pause_s)
        begin = clock()
        action()
        times.append((clock() - begin) / 1e3)
    return times


# ------------------------------------------------------------ ours


def unit_spec(run_dir: str) -> UnitSpec:
    num_blocks = 4 * SHAPES["prefill"]
    model = ModelSpec(
        name="m",
        path="",
        pool="p",
        dtype="float16",
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=128,
        block_tokens=BLOCK_TOKENS,
        num_blocks=num_blocks,
        quota_pages=num_blocks * PAGES_PER_BLOCK,
        floor_pages=0,
        max_len=4096,
        rate=1.0,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        prefix_caching=False,
        threads=1,
        prefill_share=1.0,
        decode_share=1.0,
        max_concurrency=64,
        max_queue=64,
    )
    # The pages themselves are never touched here, so their size does not matter.
    return UnitSpec(
        run_dir=run_dir,
        unit="benchmark",
        policy="adbs",
        cores=2,
        pools=[PoolSpec("p", 64, num_blocks * PAGES_PER_BLOCK)],
        models=[model],
    )


class RoundTrip:
    """The manager in a process of its own."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.process = server.start(unit_spec(self.directory.name))
        self.client = MemoryClient(unit_spec(self.directory.name).memory_socket, "benchmark")
        self.view = self.client.map("m")

    def action(self, blocks: int) -> Callable[[], None]:
        held = self.client.step(self.view, reserve=blocks).reserved

        def swap() -> None:
            nonlocal held
            held = self.client.step(self.view, release=held, reserve=blocks).reserved

        return swap

    def check(self) -> None:
        assert self.view.counters.used_pages == sum(SHAPES.values()) * PAGES_PER_BLOCK, "the benchmark lost blocks"

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait()
        self.directory.cleanup()


def core_from_python() -> dict[str, Callable[[], None]]:
    manager = _native.Manager(server.manager_config(unit_spec("/")))
    client = manager.connect("benchmark")
    none = np.empty(0, dtype=np.int32)

    def action(blocks: int) -> Callable[[], None]:
        held = manager.step(client, 0, none, none, b"", (), blocks, False)[0]

        def swap() -> None:
            nonlocal held
            held = manager.step(client, 0, held, none, b"", (), blocks, False)[0]

        return swap

    return {shape: action(blocks) for shape, blocks in SHAPES.items()}


def build() -> Path:
    """The C++ benchmark, built beside the extension."""
    directory = ROOT / "build" / "cpp-benchmark"
    configure = ["cmake", "-S", str(ROOT), "-B", str(directory), "-G", "Ninja", "--log-level=ERROR"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", "-DMUXSERVE_BUILD_PYTHON=OFF", "-DMUXSERVE_BUILD_BENCHMARKS=ON"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", str(directory), "--quiet", "-j2", "allocator_benchmark"], check=True)
    return directory / "allocator_benchmark"


def in_cpp(binary: Path, blocks: int, count: int) -> Samples:
    out = subprocess.run([str(binary), str(blocks), str(count)], check=True, capture_output=True, text=True).stdout
    return {name: [ns / 1e3 for ns in times] for name, times in json.loads(out).items()}


# ------------------------------------------------------------ vLLM


def vllm_block_pool() -> dict[str, Callable[[], None]]:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(4 * SHAPES["prefill"], enable_caching=False, hash_block_size=BLOCK_TOKENS)

    def action(blocks: int) -> Callable[[], None]:
        return lambda: pool.free_blocks(pool.get_new_blocks(blocks))

    return {shape: action(blocks) for shape, blocks in SHAPES.items()}


def vllm_allocate_slots() -> dict[str, Callable[[], None]]:
    import torch
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS, head_size=128, dtype=torch.float16)
    groups = [KVCacheGroupSpec([f"layer.{i}" for i in range(LAYERS)], spec)]
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=4 * SHAPES["prefill"], kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=4096,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        enable_caching=False,
    )

    def action(name: str, sequences: int, tokens: int) -> Callable[[], None]:
        params = SamplingParams(max_tokens=1)
        requests = [Request(f"{name}-{i}", list(range(tokens)), params, None) for i in range(sequences)]

        def swap() -> None:
            for request in requests:
                assert manager.allocate_slots(request, tokens) is not None
            for request in requests:
                manager.free(request)

        return swap

    return {"decode": action("decode", 64, 1), "prefill": action("prefill", 8, 1024)}


# ------------------------------------------------------------ all together


def summary(times: list[float], rounds: list[list[float]], blocks: int) -> dict[str, Any]:
    median, p90, p99 = (float(v) for v in np.percentile(times, [50, 90, 99]))
    return {
        "median_us": round(median, 2),
        "p90_us": round(p90, 2),
        "p99_us": round(p99, 2),
        "head_pages_per_second": round(blocks * PAGES_PER_BLOCK / median * 1e6),
        "samples": len(times),
        "median_us_by_round": [round(float(np.median(r)), 2) for r in rounds],
        "p99_us_by_round": [round(float(np.percentile(r, 99)), 2) for r in rounds],
    }


class Elsewhere:
    """How many cores other processes used since the last look."""

    def __init__(self, pids: list[int]) -> None:
        self.processes = [psutil.Process(), *map(psutil.Process, pids)]
        self.last = self.now()

    def now(self) -> tuple[float, float]:
        """Wall time, and processor seconds of everybody but this benchmark."""
        machine_times = psutil.cpu_times()
        busy = sum(machine_times) - machine_times.idle - machine_times.iowait - machine_times.guest
        for process in self.processes:
            times = process.cpu_times()
            busy -= times.user + times.system + times.children_user + times.children_system
        return time.monotonic(), busy

    def cores(self) -> float:
        before, self.last = self.last, self.now()
        return round((self.last[1] - before[1]) / (self.last[0] - before[0]), 2)


def run(rounds: int, counts: dict[str, int]) -> tuple[dict[str, dict[str, list[list[float]]]], list[float]]:
    """Samples in microseconds by shape, contender and round; and cores used by others in each round."""
    binary = build()
    round_trip = RoundTrip()
    contenders = {
        "round trip": {shape: round_trip.action(blocks) for shape, blocks in SHAPES.items()},
        "core from Python": core_from_python(),
        "BlockPool": vllm_block_pool(),
        "allocate_slots": vllm_allocate_slots(),
    }
    samples: dict[str, dict[str, list[list[float]]]] = {shape: {} for shape in SHAPES}
    gc.collect()
    gc.freeze()
    elsewhere = Elsewhere([round_trip.process.pid])
    others = []
    try:
        for _ in range(rounds):
            for shape, blocks in SHAPES.items():
                mine = samples[shape]
                for name, actions in contenders.items():
                    mine.setdefault(name, []).append(timed(actions[shape], counts[shape]))
                paused = timed(contenders["round trip"][shape], counts[shape] // 8, 0.001)
                mine.setdefault("... every ms", []).append(paused)
                for name, times in in_cpp(binary, blocks, counts[shape]).items():
                    mine.setdefault(name, []).append(times)
            others.append(elsewhere.cores())
        round_trip.check()
    finally:
        round_trip.close()
    return samples, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--decodes", type=int, default=4000, help="samples of each contender in each round")
    parser.add_argument("--prefills", type=int, default=800, help="samples of each contender in each round")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory_manager.json")
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "targets": TARGETS}
    samples, others = run(args.rounds, {"decode": args.decodes, "prefill": args.prefills})
    report["cores_used_by_others_by_round"] = others
    print("cores used by others, by round:", *others)
    for shape, contenders in samples.items():
        print(f"\n{shape}: {SHAPES[shape]} blocks = {SHAPES[shape] * PAGES_PER_BLOCK} head pages, freed and allocated")
        print(f"{'':18s} {'median':>9s} {'p90':>9s} {'p99':>9s} us   {'best round':>17s}   {'head pages/s':>12s}")
        report[shape] = {}
        for name, by_round in contenders.items():
            figures = summary([t for times in by_round for t in times], by_round, SHAPES[shape])
            report[shape][name] = figures
            best = f"{min(figures['median_us_by_round']):.1f} / {min(figures['p99_us_by_round']):.1f}"
            print(
                f"{name:18s} {figures['median_us']:9.1f} {figures['p90_us']:9.1f} {figures['p99_us']:9.1f}"
                f"      {best:>17s}   {figures['head_pages_per_second']:12.2e}"
            )
    trip, core = report["decode"]["round trip"], report["decode"]["core"]
    report["met"] = {
        "round trip median us": trip["median_us"] < TARGETS["round trip median us"],
        "round trip p99 us": trip["p99_us"] < TARGETS["round trip p99 us"],
        "round trip p99 us, median round": float(np.median(trip["p99_us_by_round"])) < TARGETS["round trip p99 us"],
        "core head pages per second": core["head_pages_per_second"] >= TARGETS["core head pages per second"],
    }
    print("\nmet: " + ", ".join(f"{name}: {'yes' if met else 'no'}" for name, met in report["met"].items()))
    write_report(args.out, report)


if __name__ == "__main__":
    main()
