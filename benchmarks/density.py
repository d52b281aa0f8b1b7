"""Many models whose weights do not fit into the memory together, under bursty groups: who meets the objective.

    python benchmarks/density.py [--models 24] [--seconds 60] [--limit 4GiB] [--pool 128MiB] [--tokens 16]
                                 [--seeds 0 1 2] [--add] [--trace FILE --speed 0.4] [--out FILE]

The same requests go to (proxy) one stock vLLM server per model under a proxy that swaps them, as many at a time as the
limit holds; (timer) a fleet whose models sleep after an idle time, `replicas: {min: 0}`; (memory) a fleet with
`memory: {limit: ...}`; (turns) the same, whose busy models stop for others, `turns: true`. In each phase of ten seconds
a few models are active, and the others silent. Each seed is another workload, and a run of its own. With `--trace` it
is that of Prism's 18 models (`benchmarks/paper/prism_trace.py`), so many times as fast, with prompts and answers cut to
what these models take. Checkpoints are made anew, and removed at the end. TTFT counts from when a request was sent,
with every wait; what has not ended when the grace after the last arrival is over has missed the objective.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "paper"))

import psutil
import yaml
from load import Call, Outcome, client, send
from prism_trace import MODELS, workload
from report import machine, percentiles, write_report
from servers import ROOT, end_cleanly, muxserve_fleet
from stock_vllm import StockSettings, stock_server
from swapping_proxy import SwappingProxy

from muxserve.cli.http import get_json
from muxserve.cluster.memory_use import memory_of
from muxserve.config.values import parse_size
from muxserve.workload import open_workload
from placement.format import format_size
from tests.support import tiny_checkpoint as checkpoints

# By system, what its `memory` section has besides the limit.
MEMORY: dict[str, dict[str, object]] = {
    "memory": {},
    "turns": {"turns": True},
}
SYSTEMS = (*MEMORY, "timer", "proxy")
PROMPT, LONGEST_PROMPT = 16, 64
KV_BYTES = 128 << 20
# A sample takes the kernel a hundredth of a second for each process with vLLM: of the machine that is measured it gets
# no more than this part of a core.
SAMPLE_SECONDS, SAMPLE_PART = 1.0, 0.1
# What one stock server takes besides its weights, as measured (benchmarks/startup.py).
STOCK_BYTES = 2_000 << 20


def bursty_groups(models: Sequence[str], seconds: float, rate: float, tokens: int, seed: int) -> list[Call]:
    """In each phase between 23 and 50 % of the models are active; `rate` is that of all together, answers have so many
    tokens."""
    text = f"bursty-groups:rate={rate},alpha=0,duration={seconds},prompt={PROMPT},output={tokens},seed={seed}"
    return [
        Call(request.model, PROMPT, tokens, seed=number, at=request.arrival, last_token=200)
        for number, request in enumerate(open_workload(text, models))
    ]


def published(trace: Path, models: Sequence[str], seconds: float, speed: float, tokens: int) -> list[Call]:
    """Prism's own trace, for as many of these models as it has."""
    names = dict(zip(MODELS, models, strict=False))
    return [
        Call(
            names[request.model],
            min(request.prompt_tokens, LONGEST_PROMPT),
            min(request.output_tokens, tokens),
            seed=number,
            at=request.arrival,
            last_token=200,
        )
        for number, request in enumerate(workload(trace, speed))
        if request.model in names and request.arrival <= seconds
    ]


class Meter:
    """The sum of PSS of process trees, over time."""

    def __init__(self, roots: Callable[[], Sequence[int]]) -> None:
        self._roots = roots
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began = time.monotonic()
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        took = 0.0
        while not self._over.wait(max(SAMPLE_SECONDS, took / SAMPLE_PART)):
            began = time.monotonic()
            pids: set[int] = set()
            for root in self._roots():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(root)
                    pids |= {root, *(child.pid for child in process.children(recursive=True))}
            self.samples.append((time.monotonic() - self._began, sum(memory_of(pid).pss for pid in pids)))
            took = time.monotonic() - began


async def offered(calls: Sequence[Call], one: Callable[[Call], Awaitable[Outcome]], grace: float) -> list[Outcome]:
    """Send every call at its time; those that have no end `grace` seconds after the last are given up."""
    start = time.perf_counter()

    async def at_its_time(call: Call) -> Outcome:
        await asyncio.sleep(max(0.0, start + call.at - time.perf_counter()))
        return await one(call)

    tasks = [asyncio.create_task(at_its_time(call)) for call in calls]
    await asyncio.wait(tasks, timeout=calls[-1].at + grace)
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        each if isinstance(each, Outcome) else Outcome(call, start + call.at, error="given up")
        for call, each in zip(calls, done, strict=True)
    ]


def above(samples: Sequence[tuple[float, int]], limit: int) -> float:
    """Seconds above the limit: a sample stands for the time since the one before it."""
    before = [0.0, *(at for at, _ in samples)]
    return sum(at - last for (at, pss), last in zip(samples, before, strict=False) if pss > limit)


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one system: means, or the worst of what must not happen."""
    timed = [run["ttft_seconds"] for run in runs if run["ttft_seconds"]]
    found: dict[str, Any] = {
        "attainment": round(statistics.mean(run["attainment"] for run in runs), 4),
        "ttft_seconds": {key: round(statistics.mean(each[key] for each in timed), 3) for key in timed[0]}
        if timed
        else None,
        "pss_gib_max": max(run["pss_gib_max"] for run in runs),
    }
    for key in ("requests", "given_up", "failed", "seconds_above_limit", "wakes", "evictions", "loads"):
        if key in runs[0]:
            found[key] = round(sum(run[key] for run in runs), 1)
    wakes = [seconds for run in runs for seconds in run.get("wake_seconds", ())]
    if wakes:
        found["wake_seconds"] = percentiles(wakes)
    return found


def document(runs: dict[str, list[dict[str, Any]]], parameters: dict[str, Any]) -> dict[str, Any]:
    """The report of what has been run so far."""
    systems = {system: together(each) for system, each in runs.items()}
    return {"machine": machine(), "parameters": parameters, "systems": systems, "runs": runs}


def figures(outcomes: Sequence[Outcome], slo: float, meter: Meter, limit: int) -> dict[str, Any]:
    """What the clients saw, and the memory."""
    answered = [each for each in outcomes if each.ok]
    ttft = [each.ttft for each in answered]
    return {
        "requests": len(outcomes),
        "attainment": round(sum(value <= slo for value in ttft) / len(outcomes), 4),
        "ttft_seconds": percentiles(ttft) if ttft else None,
        # From the first token to the last.
        "after_first_seconds": percentiles([each.last - each.first for each in answered]) if answered else None,
        "given_up": sum(each.error == "given up" for each in outcomes),
        "failed": sum(not each.ok and each.error != "given up" for each in outcomes),
        "errors": sorted({each.error for each in outcomes if each.error})[:3],
        "pss_gib_max": round(max((pss for _, pss in meter.samples), default=0) / 2**30, 3),
        "seconds_above_limit": round(above(meter.samples, limit), 1),
        "pss_gib": [[round(at, 1), round(pss / 2**30, 3)] for at, pss in meter.samples],
    }


def fleet_file(
    folder: Path,
    name: str,
    paths: dict[str, Path],
    limit: int | None,
    idle: float,
    slo: float,
    pool: int = KV_BYTES,
    **memory: object,
) -> Path:
    """A fleet of these checkpoints; with `limit` memory decides, else the idle time. `memory`: more of that section of
    the fleet file."""
    models: list[dict[str, Any]] = []
    for model, path in paths.items():
        each: dict[str, Any] = {
            "name": model,
            "path": str(path),
            "dtype": "float32",
            "max_len": 256,
            "limits": {"max_wait": "none"},
            "slo": {"ttft_ms": 1000 * slo},
        }
        if limit is None:
            each["replicas"] = {"min": 0, "start": 0, "max": 1, "idle": idle}
        models.append(each)
    declared: dict[str, Any] = {"kv_pool": {"size": pool}, "models": models}
    if limit is not None:
        declared["memory"] = {"limit": limit, **memory}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(declared, sort_keys=False))
    return file


def served(file: Path, calls: Sequence[Call], grace: float) -> tuple[list[Outcome], Meter, dict[str, Any]]:
    """All calls go to a fleet."""

    async def play(url: str) -> list[Outcome]:
        async with client() as session:
            return await offered(calls, lambda call: send(session, url, call), grace)

    with muxserve_fleet(file) as server, Meter(lambda: [server.pid]) as meter:
        outcomes = asyncio.run(play(server.url))
        memory = get_json(server.url, "/fleet")[1]["memory"]
    if not memory:
        return outcomes, meter, {}
    models = memory["models"].values()
    return (
        outcomes,
        meter,
        {
            "wakes": sum(each["wakes"] for each in models),
            "evictions": sum(each["evictions"] for each in models),
            "wake_seconds": sorted(each["last_wake_seconds"] for each in models if each["wakes"]),
            "sleep_seconds": memory["sleep_seconds"],
            "fixed_gib": round(memory["fixed_bytes"] / 2**30, 3),
            "needs_gib": [round(each["needs_bytes"] / 2**30, 3) for each in models],
        },
    )


def swapped(
    paths: dict[str, Path], slots: int, calls: Sequence[Call], grace: float
) -> tuple[list[Outcome], Meter, dict[str, Any]]:
    """Each call waits for its model's stock server; the wait counts."""
    settings = StockSettings(kv_bytes=KV_BYTES, max_len=256)
    proxy = SwappingProxy(lambda model: stock_server(paths[model], model, settings), slots)

    async def play() -> list[Outcome]:
        async with client() as session:

            async def one(call: Call) -> Outcome:
                sent = time.perf_counter()
                async with proxy.turn(call.model) as url:
                    outcome = await send(session, url, call)
                outcome.sent = sent
                return outcome

            try:
                return await offered(calls, one, grace)
            finally:
                await proxy.close()

    with Meter(lambda: [server.pid for server in proxy.servers]) as meter:
        outcomes = asyncio.run(play())
    loads = [round(seconds, 1) for seconds in proxy.loads]
    return outcomes, meter, {"slots": slots, "loads": len(loads), "load_seconds": loads}


@contextlib.contextmanager
def made(count: int, layers: int) -> Iterator[dict[str, Path]]:
    """Checkpoints in a directory of their own, removed at the end."""
    before = checkpoints.CACHE
    checkpoints.CACHE = Path(tempfile.mkdtemp(prefix="density-"))
    try:
        paths = {
            f"model-{n:02d}": checkpoints.tiny_checkpoint(layers=layers, heads=16, kv_heads=4, seed=n, max_len=256)
            for n in range(count)
        }
        os.sync()  # the disks do not write them beside what is measured
        yield paths
    finally:
        shutil.rmtree(checkpoints.CACHE)
        checkpoints.CACHE = before


def main() -> None:
    """Run the three and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--layers", type=int, default=8, help="layers of each model, of 35 MB each")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--grace", type=float, default=20.0, help="seconds to wait after the last arrival")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second of all models together")
    parser.add_argument("--trace", type=Path, help="Prism's real_trace.pkl")
    parser.add_argument("--speed", type=float, default=0.4, help="how many times as fast as it was")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer, at most 240")
    parser.add_argument("--slo", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds, of the fleet with idle timers")
    parser.add_argument("--limit", type=parse_size, default=4 << 30)
    parser.add_argument("--pool", type=parse_size, default=KV_BYTES, help="most bytes that pages take")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["memory", "timer", "proxy"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/density.json")
    parser.add_argument("--add", action="store_true", help="keep the runs that are in the file")
    args = parser.parse_args()
    end_cleanly()
    runs: dict[str, list[dict[str, Any]]] = json.loads(args.out.read_text())["runs"] if args.add else {}
    parameters = {
        key: getattr(args, key) for key in ("models", "seconds", "rate", "tokens", "slo", "idle", "limit", "pool")
    }
    if args.trace is not None:
        parameters |= {"trace": args.trace.name, "speed": args.speed}
    with made(args.models, args.layers) as paths, tempfile.TemporaryDirectory(prefix="density-") as name:
        folder = Path(name)
        weights = (next(iter(paths.values())) / "model.safetensors").stat().st_size
        for seed, system in itertools.product(args.seeds, args.systems):
            if args.trace is not None:
                calls = published(args.trace, list(paths), args.seconds, args.speed, args.tokens)
            else:
                calls = bursty_groups(list(paths), args.seconds, args.rate, args.tokens, seed)
            if system == "proxy":
                slots = max(1, args.limit // (STOCK_BYTES + weights))
                outcomes, meter, extra = swapped(paths, slots, calls, args.grace)
            else:
                limit = None if system == "timer" else args.limit
                file = fleet_file(
                    folder, system, paths, limit, args.idle, args.slo, args.pool, **MEMORY.get(system, {})
                )
                outcomes, meter, extra = served(file, calls, args.grace)
            runs.setdefault(system, []).append(
                {"seed": seed, **figures(outcomes, args.slo, meter, args.limit), **extra}
            )
            shown = {key: value for key, value in runs[system][-1].items() if key != "pss_gib"}
            print(f"{system}: {shown}", flush=True)
            write_report(args.out, document(runs, {**parameters, "weights_bytes": weights}))
    print(f"{args.models} models of {format_size(weights)}, limit {format_size(args.limit)}")
    for system, each in runs.items():
        print(f"{system}: {together(each)}")


if __name__ == "__main__":
    main()
