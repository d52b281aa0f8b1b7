"""Asynchronous scheduling on CPU: the same model with steps in turn and with the next step scheduled ahead, and stock.

    python benchmarks/async_scheduling.py [--rounds 5] [--out benchmarks/results/async_scheduling.json]

`turn` and `ahead` are two models of one fleet with one checkpoint, of which `ahead` has `async_scheduling`; `stock`
is a stock vLLM server. It has no asynchronous variant: vLLM 0.32 switches that off on CPU, whatever is asked. Two
checkpoints: `atlas`, whose step is short, and a random Llama of 8 layers of 1,024 in bfloat16, whose step is long. One
system computes at a time, in turns, one thread each. Each ratio is of tokens per second in the same turn: least, median
and most. `cpu_ms_per_token` is of the whole fleet or server.

The *profile* is of one more decode engine on that fleet's pool, with steps in turn, in a process of its own: which part
of a step goes by outside the executor (scheduling, taking tokens in, sending them), while no model computes, and which
in the runner but outside the model. The first part is the most that can be hidden.

Predicted before it was measured: of `atlas` a seventh of a step goes by outside the executor with one request, and a
fifth with sixteen. Nearly all of that is Python, and so is much of an eager engine's runner: both wait for one lock of
the interpreter. So `ahead` gains less than 5 % of tokens per second with `atlas`, if anything, and takes more CPU time;
with the large model no more than its smaller share, 1 to 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from load import Call, closed_loop, summary
from quantised import random_llama
from report import machine, write_report
from servers import ROOT, Server, ServerError, end_cleanly, muxserve_fleet
from stock_vllm import StockSettings, stock_server

PROMPT, OUTPUT = 32, 96
CONCURRENCIES = (1, 16)
LAYERS = 8
# Stock's processes look for messages without a pause for so long after the last one.
SETTLE_SECONDS = 1.1
PROFILED_STEPS = 200


def fleet_of(checkpoint: Path, dtype: str, path: Path) -> Path:
    """A fleet file with that checkpoint as `turn` and as `ahead`."""
    models = [
        {
            "name": name,
            "path": str(checkpoint),
            "dtype": dtype,
            "threads": 1,
            "max_len": 1024,
            "limits": {"max_wait": "none"},
            "engine_args": {"async_scheduling": name == "ahead"},
        }
        for name in ("turn", "ahead")
    ]
    path.write_text(yaml.safe_dump({"kv_pool": {"size": "128MiB"}, "models": models}))
    return path


def measured(server: Server, model: str, concurrency: int, seed: int) -> tuple[float, float, int]:
    """Output tokens per second, CPU milliseconds per output token, requests that failed."""
    time.sleep(SETTLE_SECONDS)
    calls = [Call(model, PROMPT, OUTPUT, seed=seed + i) for i in range(max(2, concurrency))]
    before = server.cpu_seconds()
    figures = summary(asyncio.run(closed_loop(server.url, calls, concurrency)))
    cpu = (server.cpu_seconds() - before) * 1e3 / (len(calls) * OUTPUT)
    return float(str(figures.get("output_tokens_per_second", 0.0))), cpu, int(str(figures["failed"]))


def compare(systems: dict[str, tuple[Server, str]], rounds: int) -> tuple[dict[str, dict[str, object]], int]:
    """Figures of each system at each concurrency, and how many requests failed."""
    report: dict[str, dict[str, object]] = {name: {} for name in systems}
    failed = 0
    for server, model in systems.values():
        asyncio.run(closed_loop(server.url, [Call(model, PROMPT, 16, seed=-1 - i) for i in range(32)], 16))
    for concurrency in CONCURRENCIES:
        speeds: dict[str, list[float]] = {name: [] for name in systems}
        costs: dict[str, list[float]] = {name: [] for name in systems}
        for turn in range(rounds):
            for name in list(systems) if turn % 2 == 0 else list(systems)[::-1]:
                speed, cpu, wrong = measured(*systems[name], concurrency, 1000 * (concurrency * rounds + turn))
                speeds[name].append(speed)
                costs[name].append(cpu)
                failed += wrong
        for name in systems:
            ratios = [mine / other for mine, other in zip(speeds[name], speeds["turn"], strict=True) if other]
            report[name][f"concurrency {concurrency}"] = {
                "output_tokens_per_second": round(statistics.median(speeds[name]), 1),
                "cpu_ms_per_token": round(statistics.median(costs[name]), 3),
                "to turn": [round(each, 3) for each in (min(ratios), statistics.median(ratios), max(ratios))],
            }
    return report, failed


@dataclass
class Receiver:
    """A request, as far as `TokenSender` must know it."""

    request_id: str
    reply_to: str
    attempt: int = 1
    gateway_epoch: str = "profile"
    emitted: int = 0


class Stopwatch:
    """Seconds that calls take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def on(self, owner: Any, method: str, name: str) -> None:
        """Count calls of `owner.method` under `name`."""
        call: Callable[..., Any] = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, method, counted)


def profile(unit_file: Path) -> dict[str, dict[str, float]]:
    """Milliseconds of a decode step, and what parts of it are, at each concurrency. This process becomes an engine."""
    from muxserve.vllm.args import config_of, engine_args, environment

    os.environ.update(environment())
    import zmq
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCore

    from muxserve.engine.binding import Binding, bind
    from muxserve.engine.cpu.ahead import ThreadedExecutor
    from muxserve.engine.outputs import TokenSender
    from muxserve.memory.client import MemoryClient
    from muxserve.net.sockets import bind_local
    from muxserve.spec import load

    unit_spec = load(unit_file)
    client = MemoryClient(unit_spec.memory_socket, "profile")
    bind(Binding(unit_spec.model("turn"), "decode", client, client.map("turn")))
    core = EngineCore(config_of(engine_args(unit_spec, "turn", "decode")), ThreadedExecutor, log_stats=True)
    watch = Stopwatch()
    watch.on(core.model_executor, "execute_model", "executor")
    watch.on(core.model_executor, "sample_tokens", "executor")
    watch.on(core.model_executor.driver_worker.worker.model_runner, "_model_forward", "model")
    context = zmq.Context()
    tokens, gateway = TokenSender(context, "turn", 1), context.socket(zmq.PULL)
    reply_to = f"ipc://{unit_file.parent}/profile"
    bind_local(gateway, reply_to)
    found = {}
    for concurrency in CONCURRENCIES:
        names = [f"{concurrency}-{i}" for i in range(concurrency)]
        there = {name: Receiver(name, reply_to) for name in names}
        for index, name in enumerate(names):
            params = SamplingParams(temperature=0.0, max_tokens=PROFILED_STEPS + 50, ignore_eos=True)
            prompt = [10 + index + i for i in range(PROMPT)]
            request = EngineCoreRequest(name, prompt, None, params, None, time.time(), None, None, None)
            core.add_request(*core.preprocess_add_request(request))

        def step(there: dict[str, Receiver] = there) -> None:
            with client.writing():
                outputs, _ = core.step()
            for batch in outputs.values():
                tokens.send(batch, there)
            core.scheduler.pool.end_step()

        for _ in range(20):
            step()
        watch.seconds.clear()
        began = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        whole = time.perf_counter() - began
        core.abort_requests(names)
        core.scheduler.pool.end_step()
        outside, runner = whole - watch.seconds["executor"], watch.seconds["executor"] - watch.seconds["model"]
        found[f"concurrency {concurrency}"] = {
            "step_ms": round(whole * 1e3 / PROFILED_STEPS, 3),
            "outside_executor": round(outside / whole, 3),
            "runner_outside_model": round(runner / whole, 3),
            "most_gain": round(whole / (whole - outside), 3),
        }
    client.close()
    context.destroy(linger=0)
    return found


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare synchronous with asynchronous scheduling on CPU.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", type=Path, metavar="UNIT", help="print the profile on a unit's pool, and end")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/async_scheduling.json")
    return parser.parse_args()


def main() -> int:
    """Run everything; exit code 1 if a server does not come up or a request fails."""
    options = parse()
    if options.profile:
        print(json.dumps(profile(options.profile)))
        return 0
    end_cleanly()
    report: dict = {"machine": machine(), "rounds": options.rounds, "prompt": PROMPT, "output": OUTPUT}
    failed = 0
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        # Where the fleet keeps what its processes are told.
        os.environ["XDG_RUNTIME_DIR"] = folder
        large = Path(folder) / "large"
        random_llama(large, LAYERS)
        for name, path, dtype in (("atlas", ROOT / "configs/models/atlas", "float32"), ("large", large, "bfloat16")):
            found: dict = {}
            settings = StockSettings(dtype=dtype, max_len=1024, kv_bytes=64 << 20)
            with contextlib.ExitStack() as stack:
                try:
                    fleet = stack.enter_context(muxserve_fleet(fleet_of(path, dtype, Path(folder) / f"{name}.yaml")))
                    (unit,) = Path(folder).rglob("unit.json")
                    command = [sys.executable, __file__, "--profile", str(unit)]
                    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    found["profile"] = json.loads(told.stdout.splitlines()[-1])
                    print(name, "profile", found["profile"], flush=True)
                    stock = stack.enter_context(stock_server(path, "stock", settings))
                except ServerError as error:
                    print(error, file=sys.stderr)
                    return 1
                systems = {"turn": (fleet, "turn"), "ahead": (fleet, "ahead"), "stock": (stock, "stock")}
                found["systems"], wrong = compare(systems, options.rounds)
                failed += wrong
            report[name] = found
            for system, figures in found["systems"].items():
                print(f"{name:6s} {system:6s} {figures}", flush=True)
    write_report(options.out, report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
