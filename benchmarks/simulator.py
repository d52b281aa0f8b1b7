"""How fast the simulator is: engine steps per second on one core, and 20,000 requests on 32 GPUs.

    python benchmarks/simulator.py [--requests 20000] [--profile] [--out FILE]

The fleet is 15 models (LLaMA 7B to 65B shapes) on 32 A100-80GB in ten units of one to eight GPUs, costs from the
roofline, rates by a power law (alpha 0.9), Poisson arrivals, log-normal lengths with the means of ShareGPT as MuxServe
reports them (161 prompt and 338 output tokens). Every mode runs the same workload. Nothing is cached between runs and
nothing is trained. `predicted` was written down before the first run. Times are this process's own processor time; the
wall's are beside them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import hashlib
import io
import math
import pstats
import random
import time
from pathlib import Path

from report import machine, write_report

from muxserve.costs import ModelArchitecture
from muxserve.costs.roofline import Roofline
from muxserve.simulator import FleetResult, SimUnit, mode_of, simulate, units_of
from muxserve.workload.trace import TraceRequest
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand

GIB = 1 << 30
DEVICE = "A100-80GB"
TARGETS = {"steps_per_second": 100_000, "seconds_of_20000_requests": 15.0}
PREDICTED = {
    "muxserve": {"steps_per_second": 80_000, "seconds_of_20000_requests": 9.0},
    "spatial": {"steps_per_second": 500_000, "seconds_of_20000_requests": 2.0},
    "temporal": {"steps_per_second": 100_000, "seconds_of_20000_requests": 7.0},
    "one replica": {"steps_per_second": 200_000},
}

#          layers heads hidden intermediate
LLAMA = {
    "7b": (32, 32, 4096, 11008),
    "13b": (40, 40, 5120, 13824),
    "30b": (60, 52, 6656, 17920),
    "65b": (80, 64, 8192, 22016),
}


def architecture(size: str) -> ModelArchitecture:
    """A LLaMA."""
    layers, heads, hidden, intermediate = LLAMA[size]
    return ModelArchitecture(
        name=f"llama-{size}",
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        hidden=hidden,
        intermediate=intermediate,
        vocab=32000,
        max_len=2048,
        default_max_len=2048,
        dtype="float16",
    )


def fleet() -> tuple[dict[str, Demand], list[tuple[str, int, float]]]:
    """The models, and (size, GPUs, GiB of KV per GPU) of each unit with the models in it."""
    counts = {"7b": 8, "13b": 4, "30b": 2, "65b": 1}
    models = {
        f"{size}-{number}": Demand(f"{size}-{number}", architecture(size), "float16")
        for size, count in counts.items()
        for number in range(count)
    }
    return models, [("7b", 1, 30.0)] * 4 + [("13b", 2, 35.0)] * 2 + [("30b", 4, 45.0)] * 2 + [("65b", 8, 50.0)] * 2


def rates(names: list[str], total: float) -> dict[str, float]:
    """Power law, alpha 0.9: small models are the popular ones."""
    weights = [(index + 1) ** -0.9 for index in range(len(names))]
    return {name: total * weight / sum(weights) for name, weight in zip(names, weights, strict=True)}


def colocated(models: dict[str, Demand], layout: list[tuple[str, int, float]], rate: dict[str, float]) -> Placement:
    """Two 7B or 13B per unit, one 30B, two replicas of the 65B."""
    waiting = {size: [name for name in models if name.startswith(f"{size}-")] for size in LLAMA}
    units, device = [], 0
    for index, (size, gpus, kv) in enumerate(layout):
        names = waiting[size] if size == "65b" else [waiting[size].pop(0) for _ in range(2 if gpus < 4 else 1)]
        replicas = 2 if size == "65b" else 1
        placed = tuple(PlacedModel(name, rate[name] / replicas, 0.6, 0.4) for name in names)
        devices = tuple(range(device, device + gpus))
        units.append(PlacedUnit(f"unit{index}", DEVICE, devices, placed, int(kv * GIB)))
        device += gpus
    return Placement(Cluster((Node(DEVICE, 8),) * 4), tuple(units))


def apart(models: dict[str, Demand], rate: dict[str, float]) -> Placement:
    """Every model alone: 8 x 1, 4 x 2, 2 x 4, 1 x 8 GPUs."""
    gpus, kv = {"7b": 1, "13b": 2, "30b": 4, "65b": 8}, {"7b": 50.0, "13b": 50.0, "30b": 50.0, "65b": 50.0}
    units, device = [], 0
    for name in models:
        size = name.split("-")[0]
        devices = tuple(range(device, device + gpus[size]))
        placed = (PlacedModel(name, rate[name], 1.0, 1.0),)
        units.append(PlacedUnit(f"unit-{name}", DEVICE, devices, placed, int(kv[size] * GIB)))
        device += gpus[size]
    return Placement(Cluster((Node(DEVICE, 8),) * 4), tuple(units))


def load(rate: dict[str, float], count: int, seed: int = 1) -> list[TraceRequest]:
    """Poisson arrivals; log-normal lengths of means 161 and 338."""
    chance = random.Random(seed)
    names, total, now = list(rate), sum(rate.values()), 0.0
    requests = []

    def length(mean: float, sigma: float, most: int) -> int:
        return min(most, max(1, round(chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    for _ in range(count):
        now += chance.expovariate(total)
        model = chance.choices(names, [rate[name] for name in names])[0]
        requests.append(TraceRequest(now, model, length(161, 1.0, 900), length(338, 0.7, 1000)))
    return requests


def digest(result: FleetResult) -> str:
    """A digest of all that came of the requests and engines, to the last bit."""
    told: list[object] = [
        tuple(getattr(record, name) for name in record.__struct_fields__) for record in result.records
    ]
    for unit in result.units:
        told += [(each.jobs, each.tokens, each.busy_seconds) for each in unit.engines] + [unit.pages, unit.busy_seconds]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def measure(units: list[SimUnit], requests: list[TraceRequest], profile: bool) -> dict[str, object]:
    """One run."""
    latency = Roofline()
    gc.collect()
    profiler = cProfile.Profile() if profile else None
    wall, own = time.perf_counter(), time.process_time()
    if profiler:
        profiler.enable()
    result = simulate(units, requests, latency)
    if profiler:
        profiler.disable()
    own, wall = time.process_time() - own, time.perf_counter() - wall
    if profiler:
        out = io.StringIO()
        pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(32)
        print(out.getvalue())
    decode = sum(e.jobs for u in result.units for e in u.engines if e.phase != "prefill")
    return {
        "cpu_seconds": round(own, 3),
        "wall_seconds": round(wall, 3),
        "engine_steps": result.jobs,
        "decode_steps": decode,
        "steps_per_second": round(result.jobs / own),
        "requests_per_second": round(len(requests) / own),
        "turns": sum(u.turns for u in result.units),
        "looks": sum(u.looks for u in result.units),
        "simulated_seconds": round(result.seconds, 1),
        "completed": sum(record.ok for record in result.records),
        "preemptions": sum(record.preemptions for record in result.records),
        "digest": digest(result),
        "mean_batch": round(sum(r.output_tokens for r in result.records) / max(1, decode), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 40.0], help="requests per second of the fleet")
    parser.add_argument("--modes", default="muxserve,spatial,temporal")
    parser.add_argument("--profile", action="store_true", help="print where the time goes (and take longer)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    models, layout = fleet()
    runs: dict[str, object] = {}
    for total in args.rates:
        rate = rates(list(models), total)
        requests = load(rate, args.requests)
        for name in args.modes.split(","):
            mode = mode_of(name)
            placement = apart(models, rate) if mode.placement == "spatial" else colocated(models, layout, rate)
            figures = measure(units_of(placement, models, mode), requests, args.profile)
            runs[f"{name} at {total:g} requests/s"] = figures
            print(f"{name} at {total:g} requests/s: {figures}", flush=True)
    # What other simulators report: one model on one GPU.
    name = next(iter(models))
    where = Placement(
        Cluster((Node(DEVICE, 1),)),
        (PlacedUnit("unit0", DEVICE, (0,), (PlacedModel(name, 3.0, 0.6, 0.4),), 50 * GIB),),
    )
    figures = measure(units_of(where, models, mode_of("muxserve")), load({name: 3.0}, args.requests), args.profile)
    runs["one replica at 3 requests/s"] = figures
    print(f"one replica at 3 requests/s: {figures}", flush=True)
    if args.out:
        report = {"requests": args.requests, "gpus": 32, "targets": TARGETS, "predicted": PREDICTED, "runs": runs}
        write_report(args.out, {"machine": machine(), **report})


if __name__ == "__main__":
    main()
