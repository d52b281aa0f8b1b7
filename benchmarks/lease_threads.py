"""Whether each lease could name the threads of an engine on CPU, and what two threads bring.

    python benchmarks/lease_threads.py [--rounds 5] [--out benchmarks/results/lease_threads.json]

Real vLLM engines of the quickstart's `atlas` in float32, each in a process of its own, take steps one after another:
prefills of one prompt of 150 tokens, and decode steps of four sequences. `narrow` has begun with one thread, `wide`
with two. Around them is one of these:

* `alone`: nothing.
* `front`: a process that computes for half a millisecond and sleeps for 1.5, as gateways, unit schedulers and clients
  do together while a fleet is busy.
* `neighbour`: a further engine that decodes with one thread, without a pause.
* `both`: these together, which is a busy fleet.

Each figure is a median step over that of `narrow` with one thread, in turns in the same round: least, median and most
of the rounds. `wide` is the engine with two threads, for its whole life. `widened` is `narrow` while it is told to use
two threads, and `narrowed` is `wide` while it is told to use one, as leases would tell them. `neighbour` is the
neighbour's step beside `wide` over that beside `narrow`.

Predicted before it was measured: alone `wide` takes 0.6 of the time of a prefill and 0.85 of a decode step (the
committed profile of the quickstart, of another machine, says so), and twice as long beside a neighbour, since each
thread waits for the other at the end of every kernel; `widened` is as `wide`, and `narrowed` as `narrow`. Found to be
wrong with a first version of this benchmark: an engine that has begun with one thread cannot be widened, since vLLM's
kernels keep the most threads with which they were prepared for a size.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from report import machine, write_report
from servers import ROOT, end_cleanly

MODEL = ROOT / "configs/models/atlas"
PROMPT, SEQUENCES = 150, 4
STEPS = 60
PREFILL, DECODE = "prefill", "decode"
SURROUNDINGS = {"alone": (False, False), "front": (True, False), "neighbour": (False, True), "both": (True, True)}


class StockEngine:
    """A vLLM engine of this process, which takes one step at a time."""

    def __init__(self, threads: int) -> None:
        from tests.engine.stock import SETTINGS

        os.environ.update(SETTINGS | {"OMP_NUM_THREADS": str(threads)})
        import torch

        # vLLM puts another function in its place, which does nothing.
        self._set_threads = torch.set_num_threads
        from vllm import LLM

        from muxserve.vllm.args import frontend_args
        from tests.engine.harness import deployed_model

        model = deployed_model("model", MODEL, max_num_batched_tokens=1024, engine_args={})
        args = frontend_args(model)
        del args["served_model_name"]
        args["enable_prefix_caching"] = False
        self._engine = LLM(**args, kv_cache_memory_bytes=64 << 20).llm_engine
        self._names = itertools.count()

    def add(self, tokens: int, output: int) -> None:
        """A request."""
        from vllm import SamplingParams

        number = next(self._names)
        prompt = {"prompt_token_ids": [3 + (7 * number + 13 * i) % 200 for i in range(tokens)]}
        self._engine.add_request(str(number), prompt, SamplingParams(max_tokens=output, ignore_eos=True))

    def step(self, threads: int) -> float:
        """Seconds of a step with so many threads."""
        self._set_threads(threads)
        began = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began

    def timed(self, kind: str, threads: int) -> list[float]:
        """Seconds of each of some steps with so many threads."""
        if kind == DECODE:
            for _ in range(SEQUENCES):
                self.add(16, STEPS + 8)
            for _ in range(4):
                self.step(threads)
        seconds = []
        for _ in range(STEPS):
            if kind == PREFILL:
                self.add(PROMPT, 1)
            seconds.append(self.step(threads))
        while self._engine.has_unfinished_requests():
            self.step(threads)
        return seconds


def engine(pipe: Connection, threads: int) -> None:
    """A process with an engine that begins with so many threads: answers each (kind, threads) with its median step."""
    made = StockEngine(threads)
    for kind in (PREFILL, DECODE):
        made.timed(kind, threads)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        pipe.send(statistics.median(made.timed(*asked)))


def neighbour(pipe: Connection) -> None:
    """A process whose engine decodes with one thread while it is wanted; then it tells its median step."""
    made = StockEngine(1)
    pipe.send(None)
    while pipe.recv():
        seconds = []
        while not pipe.poll():
            seconds += made.timed(DECODE, 1)
        pipe.recv()
        pipe.send(statistics.median(seconds))


def front_end(pipe: Connection) -> None:
    """A process that computes a little, over and over, while it is wanted."""
    pipe.send(None)
    while pipe.recv():
        while not pipe.poll():
            until = time.thread_time() + 0.0005
            while time.thread_time() < until:
                pass
            time.sleep(0.0015)
        pipe.recv()


class Helper:
    """One of these processes."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """It has started."""
        self.pipe.recv()

    def end(self) -> None:
        """Ask it to end."""
        self.pipe.send(None)
        self._process.join(30)


def rounded(ratios: list[float]) -> list[float]:
    """Least, median, most."""
    return [round(each, 3) for each in (min(ratios), statistics.median(ratios), max(ratios))]


def measure(rounds: int) -> dict[str, Any]:
    """All ratios, by surroundings and kind of step."""
    narrow, wide, other, front = Helper(engine, 1), Helper(engine, 2), Helper(neighbour), Helper(front_end)
    for each in (narrow, wide, other, front):
        each.ready()
    found: dict[str, Any] = {}

    def run(engine: Helper, kind: str, threads: int, around: list[Helper]) -> tuple[float, float]:
        """Median step of the engine, and of the neighbour where there is one."""
        for helper in around:
            helper.pipe.send(True)
        engine.pipe.send((kind, threads))
        seconds, beside = engine.pipe.recv(), 0.0
        for helper in around:
            helper.pipe.send(True)
            if helper is other:
                beside = helper.pipe.recv()
        return seconds, beside

    for name, (with_front, with_other) in SURROUNDINGS.items():
        around = [helper for helper, wanted in ((front, with_front), (other, with_other)) if wanted]
        for kind in (PREFILL, DECODE):
            ratios: dict[str, list[float]] = {"wide": [], "widened": [], "narrowed": [], "neighbour": []}
            milliseconds = []
            for _ in range(rounds):
                base, beside_narrow = run(narrow, kind, 1, around)
                two, beside_wide = run(wide, kind, 2, around)
                milliseconds.append(1e3 * base)
                ratios["wide"].append(two / base)
                ratios["widened"].append(run(narrow, kind, 2, around)[0] / base)
                ratios["narrowed"].append(run(wide, kind, 1, around)[0] / base)
                if beside_narrow:
                    ratios["neighbour"].append(beside_wide / beside_narrow)
            row = {key: rounded(values) for key, values in ratios.items() if values}
            found.setdefault(name, {})[kind] = {"narrow_ms": round(statistics.median(milliseconds), 2), **row}
            print(name, kind, found[name][kind], flush=True)
    for each in (narrow, wide, other, front):
        each.end()
    return found


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Threads per lease on CPU.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/lease_threads.json")
    options = parser.parse_args()
    end_cleanly()
    if len(os.sched_getaffinity(0)) < 2:
        print("two cores are needed", file=sys.stderr)
        return 1
    report = {"machine": machine(), "rounds": options.rounds, "steps": STEPS}
    write_report(options.out, {**report, "steps_over_narrow": measure(options.rounds)})
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
