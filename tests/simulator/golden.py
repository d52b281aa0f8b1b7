"""What the simulator says of a set of scenarios that covers everything that it knows: modes, arrangements, replicas,
tight and ample KV caches.

    python -m tests.simulator.golden           # compares with golden.json
    python -m tests.simulator.golden --write   # and takes over what has changed

A figure may change, but not unnoticed: docs/simulator.md tells what changed and why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from muxserve.costs import EngineShape, ModelArchitecture
from muxserve.costs.roofline import Roofline
from muxserve.metrics.definitions import Objectives as Latencies
from muxserve.metrics.definitions import percentile, time_per_token
from muxserve.metrics.records import RequestRecord
from muxserve.planning.arrangements import arrangement
from muxserve.planning.arrangements.base import DevicePool, ReplicaLayout, SimulatedLayout, Wanted
from muxserve.planning.checkpoints import planned_architecture
from muxserve.planning.device_pool import CpuPool, GpuPool
from muxserve.planning.trial import run_trial
from muxserve.replicas.dispatch import FreestOfQueues, LoadAware, RoundRobinDispatch
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.member import LatencyTargets
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.scaling import RollingScalingRules as RollingScalingRules
from muxserve.scheduling.token_throttling import TOKEN_BUDGETS, FixedBudget, Throttle, prompt_tokens_ahead
from muxserve.simulator import (
    MODES,
    ControlDelays,
    FleetModel,
    FleetResult,
    Link,
    MigrationCosts,
    Options,
    Pipeline,
    ReplicaRules,
    RingRules,
    SimUnit,
    lone_unit,
    simulate,
    units_of,
)
from muxserve.simulator.requests import SimRequest
from muxserve.spec import PhasesName
from muxserve.workload import Arrivals, ModelLoad, TraceRequest, generate
from muxserve.workload.lengths import LogNormalLengths
from placement import Machine
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from placement.memory import MemoryRules

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))

from split import Split, SplitOptions

FILE = Path(__file__).with_name("golden.json")
GIB = 1 << 30
COSTS = Roofline()
A100 = "A100-80GB"
DTYPE = "float16"
CHAT = LogNormalLengths(150, 0.9, 4, 1000), LogNormalLengths(120, 0.8, 2, 600)
LLAMA_7B = planned_architecture("llama-7b", Path())
LLAMA_13B = planned_architecture("llama-13b", Path())
TINY = ModelArchitecture(
    "tiny",
    layers=4,
    heads=8,
    kv_heads=8,
    head_dim=64,
    hidden=512,
    intermediate=1408,
    vocab=8192,
    max_len=2048,
    default_max_len=2048,
    dtype="float32",
)
Figures = dict[str, float]


def load(rates: dict[str, float], seconds: float, seed: int = 1, cv: float = 1.0) -> list[TraceRequest]:
    """Chats, by model."""
    loads = {name: ModelLoad(rate, *CHAT, Arrivals(cv)) for name, rate in rates.items()}
    return list(generate(loads, seconds, seed))


def figures(records: Sequence[RequestRecord], **more: float) -> Figures:
    """Times in seconds."""
    done = [r for r in records if r.ok]
    ttft = [r.ttft for r in done if r.ttft is not None]
    tpot = [r.tpot for r in done if r.tpot is not None]
    latency = [r.latency for r in done if r.latency is not None]

    def spread(name: str, values: list[float]) -> Figures:
        if not values:
            return {}
        return {
            f"{name}_mean": fmean(values),
            f"{name}_p50": percentile(values, 0.5),
            f"{name}_p99": percentile(values, 0.99),
        }

    return {
        "requests": len(records),
        "answered": len(done),
        **spread("ttft", ttft),
        **spread("tpot", tpot),
        **spread("latency", latency),
        "preemptions": sum(r.preemptions for r in records),
        **more,
    }


# ------------------------------------------------------------ fleets of multiplexed models


MODELS = {
    "a": FleetModel("a", LLAMA_7B, DTYPE, max_len=2048),
    "b": FleetModel("b", LLAMA_7B, DTYPE, max_len=2048),
    "c": FleetModel("c", LLAMA_13B, DTYPE, max_len=2048),
    "tiny": FleetModel("tiny", TINY, "float32", max_num_seqs=16, max_num_batched_tokens=512, elastic=False),
    "other": FleetModel("other", TINY, "float32", max_num_seqs=16, max_num_batched_tokens=512, elastic=False),
}


def placement(gib: float) -> Placement:
    """Two models on one GPU, of which one has a replica beside a third on another two."""
    one = PlacedUnit(
        "unit0", A100, (0,), (PlacedModel("a", 2.0, 0.6, 0.4), PlacedModel("b", 6.0, 0.6, 0.5)), int(gib * GIB)
    )
    two = PlacedUnit(
        "unit1", A100, (1, 2), (PlacedModel("a", 2.0, 0.5, 0.4), PlacedModel("c", 4.0, 0.6, 0.5)), int(gib * GIB)
    )
    return Placement(Cluster((Node(A100, 3),)), (one, two))


def without_replicas(gib: float) -> Placement:
    """Every model in one unit."""
    one, two = placement(gib).units
    return Placement(Cluster((Node(A100, 3),)), (one, replace(two, models=two.models[1:])))


def on_cpu(units: int) -> Placement:
    """Each unit has one model, or one unit has both."""
    models = (PlacedModel("tiny", 3.0, 0.5, 0.5), PlacedModel("other", 3.0, 0.5, 0.5))
    if units == 1:
        placed = (PlacedUnit("unit0", "CPU", (0,), models, GIB // 4),)
    else:
        placed = tuple(PlacedUnit(f"unit{n}", "CPU", (0,), (model,), GIB // 8) for n, model in enumerate(models))
    return Placement(Cluster((Node("CPU", 1),)), placed)


def of_fleet(result: FleetResult) -> Figures:
    """With what units did."""
    return figures(
        result.records,
        steps=result.jobs,
        busy=result.busy_gpu_seconds,
        seconds=result.seconds,
        peak_pages=sum(sum(unit.peak_pages) for unit in result.units),
    )


def fleet(where: Placement, mode: str, requests: list[TraceRequest], options: Options | None = None) -> Figures:
    return of_fleet(simulate(units_of(where, MODELS, MODES[mode]), requests, COSTS, options))


def fleets() -> Iterable[tuple[str, Callable[[], Figures]]]:
    requests = load({"a": 4.0, "b": 6.0, "c": 4.0}, 30.0)
    delays = Options(ControlDelays(0.002, 0.0002, 0.0003, 0.0005, 0.0005, 0.001))
    of_memory = {name for name, mode in MODES.items() if mode.all_awake or mode.exclusive or mode.placement == "prism"}
    for mode in (name for name in MODES if name not in of_memory):
        yield f"ample KV, {mode}", lambda mode=mode: fleet(without_replicas(30.0), mode, requests)
        yield f"tight KV, {mode}", lambda mode=mode: fleet(without_replicas(5.0), mode, requests)
    yield "delays, muxserve", lambda: fleet(without_replicas(30.0), "muxserve", requests, delays)
    live = Options(ControlDelays.live())
    for mode in ("muxserve", "temporal"):
        yield f"live delays, {mode}", lambda mode=mode: fleet(without_replicas(30.0), mode, requests, live)
    yield "replicas, muxserve", lambda: fleet(placement(30.0), "muxserve", requests)
    yield "replicas, temporal", lambda: fleet(placement(30.0), "temporal", requests)
    slow = load({"tiny": 2.0, "other": 2.0}, 20.0)
    for units in (1, 2):
        yield f"{units} CPU units, muxserve", lambda units=units: fleet(on_cpu(units), "muxserve", slow)


# ------------------------------------------------------------ rolling and pipelined models


def apart() -> Iterable[tuple[str, Callable[[], Figures]]]:
    ring, pipe = alone("rolling", 3, (4000,)), alone("pipelined", 2, (4000, 4000))
    for name, rate in (("light", 6.0), ("heavy", 30.0)):
        requests = load({"a": rate}, 30.0)
        yield f"rolling, {name}", lambda requests=requests: of_fleet(simulate(ring, requests, COSTS, rules=RULES))
        yield f"pipelined, {name}", lambda requests=requests: of_fleet(simulate(pipe, requests, COSTS))
    requests = load({"a": 20.0}, 30.0)
    tight, narrow = alone("rolling", 3, (300,)), alone("pipelined", 2, (300, 300))
    yield "rolling, tight KV", lambda: of_fleet(simulate(tight, requests, COSTS, rules=RULES))
    yield "pipelined, tight KV", lambda: of_fleet(simulate(narrow, requests, COSTS))
    delays = Options(ControlDelays(0.002, 0.0, 0.0, 0.0005, 0.0005, 0.001))
    yield "rolling, delays", lambda: of_fleet(simulate(ring, requests, COSTS, delays, RULES))
    yield "pipelined, delays", lambda: of_fleet(simulate(pipe, requests, COSTS, delays))


DEMAND = Demand(
    name="a",
    architecture=LLAMA_7B,
    dtype=DTYPE,
    rate=10.0,
    prompt_tokens=220,
    output_tokens=160,
    slo_ttft=1.0,
    slo_tpot=0.05,
    max_num_seqs=256,
)
WANTED = Wanted(replace(DEMAND, max_len=2048))
RULES = {"a": arrangement("rolling").ring(WANTED)}


def alone(phases: PhasesName, replicas: int, blocks: tuple[int, ...]) -> list[SimUnit]:
    """Replicas with so many blocks on each stage."""
    stages = len(blocks)
    links = (Link(),) * (stages - 1)
    place = SimulatedLayout(
        ReplicaLayout(phases, replicas, stages, 1), EngineShape(A100, 1, 1.0, DTYPE), 16, blocks, links=links
    )
    devices = [tuple(range(n * stages, (n + 1) * stages)) for n in range(replicas)]
    return [arrangement(phases).sim_unit(WANTED, place, f"unit{n}", each) for n, each in enumerate(devices)]


def planned() -> Iterable[tuple[str, Callable[[], Figures]]]:
    """As `phases: auto` compares them."""
    wanted = WANTED
    gpus: DevicePool = GpuPool(A100, (2,), 80 * GIB, MemoryRules())
    small: DevicePool = GpuPool(A100, (2,), 19 * GIB, MemoryRules())
    cpu: DevicePool = CpuPool(Machine(2, 8 * GIB), 2)
    slow = replace(wanted, demand=replace(DEMAND, architecture=TINY, dtype="float32", rate=4.0, max_num_seqs=16))

    def one(wanted: Wanted, pool: DevicePool, layout: ReplicaLayout, rate: float) -> Figures:
        requests = load({"a": rate}, 30.0)
        trial = run_trial(wanted, pool, pool.place(wanted, layout), COSTS, requests, rate)
        done = [each for each in trial.outcomes if each.ttft is not None]
        objectives = Latencies(1.0, 0.05)
        return {
            "requests": len(trial.outcomes),
            "answered": len(done),
            "ttft_mean": fmean(each.ttft or 0.0 for each in done),
            "wait_mean": fmean(each.wait for each in done),
            "latency_mean": fmean(each.latency for each in done),
            "attained": sum(each.met(objectives, True) for each in done) / len(done),
            "balance": trial.balance,
            "preemptions": trial.preemptions,
            **{f"bubbles_{n}": each for n, each in enumerate(trial.bubbles)},
        }

    layouts = {
        "multiplexed": ReplicaLayout("multiplexed", 2, 1, 1),
        "pipelined": ReplicaLayout("pipelined", 1, 2, 1),
        "one stage": ReplicaLayout("pipelined", 2, 1, 1),
        "rolling": ReplicaLayout("rolling", 2, 1, 1),
    }
    for name, layout in layouts.items():
        for about, pool in (("ample", gpus), ("tight", small)):
            yield f"planned, {name}, {about} KV", lambda g=pool, y=layout: one(wanted, g, y, 16.0)
        if name != "one stage":
            yield f"planned, {name}, CPU", lambda y=layout: one(replace(slow, replicas=y.replicas), cpu, y, 2.0)


# ------------------------------------------------------------ replicas


def replicas() -> Iterable[tuple[str, Callable[[], Figures]]]:
    served = FleetModel("a", LLAMA_7B, DTYPE, 256, 2560)
    units = [lone_unit(f"r{n}", "A10", (n,), served, 400) for n in range(8)]
    requests = load({"a": 13.0}, 60.0, cv=2.0)

    def run(high: float = 0.0, instances: int = 4, **options: object) -> Figures:
        rules = ReplicaRules(**{"spares": tuple(units[instances:]), **options})  # type: ignore[arg-type]
        levels = [
            ("high", "high") if high and n % round(1 / high) == 0 else ("normal", "normal")
            for n in range(len(requests))
        ]
        result = simulate(units[:instances], requests, COSTS, None, {"a": rules}, levels.__getitem__)
        (together,) = result.replicas
        return figures(
            result.records,
            steps=result.jobs,
            busy=result.busy_gpu_seconds,
            migrations=together.migrations,
            instances=together.average,
            lost=sum(request.lost for request in result.requests),
            down=sum(together.downtimes),
        )

    yield "replicas, round-robin", lambda: run(dispatch=lambda levels: RoundRobinDispatch())
    yield "replicas, load-aware", lambda: run(dispatch=lambda levels: LoadAware())
    yield "replicas, freest", lambda: run(dispatch=FreestOfQueues)
    yield "replicas, migration", lambda: run(migration=MigrationRules())
    yield "replicas, priorities", lambda: run(0.1, migration=MigrationRules())
    yield "replicas, slow copies", lambda: run(migration=MigrationRules(in_flight=2), copying=MigrationCosts(1e8))
    yield (
        "replicas, scaling",
        lambda: run(instances=1, migration=MigrationRules(), scaling=ScalingRules(1, 6, low=80, high=480)),
    )
    yield "replicas, stale views", lambda: run(stale=1.0, tick=0.5, migration=MigrationRules())


# ------------------------------------------------------------ the papers' systems


def papers() -> Iterable[tuple[str, Callable[[], Figures]]]:
    requests = load({"a": 16.0}, 30.0)
    served = FleetModel("a", LLAMA_13B, DTYPE, 256, 2048)
    options = Options(ControlDelays(prefill_step=5e-3, decode_step=5e-3), sample_seconds=0.0)
    units = [lone_unit(f"i{n}", "L20-48GB", (n,), served, 900) for n in range(8)]

    def attained(found: Sequence[SimRequest]) -> float:
        objectives, met = Latencies(5.0, 0.1), 0
        for r in found:
            if r.first_token is not None and r.finish is not None:
                tpot = time_per_token(r.first_token + r.switch_wait, r.finish, r.made)
                met += objectives.met(r.first_token - r.arrival + r.switch_wait, tpot).get("all", True)
        return met / len(found)

    def of(found: Sequence[SimRequest], **more: float) -> Figures:
        waits = fmean(request.switch_wait for request in found)
        return figures([request.record() for request in found], wait=waits, attained=attained(found), **more)

    def rolling(**more: object) -> Figures:
        rules = RingRules(
            LatencyTargets(5.0, 0.1), expected_output=160, learns_answers=False, spares=tuple(units[4:]), **more
        )  # type: ignore[arg-type]
        result = simulate(units[:4], requests, COSTS, options, {"a": rules})
        (together,) = result.replicas
        return of(result.requests, busy=result.busy_gpu_seconds, replicas=together.average, moves=together.moves)

    def split(within: bool) -> Figures:
        counts = (1, 1), (1, 1)
        how = SplitOptions(*counts, Link(20e9, 1e-3), Link(1e9, 1e-3), within_node=within, streamed=not within)
        arrangement = Split(replace(units[0], combined=True), COSTS, how, options)
        return of(arrangement.run(requests), transfers=arrangement.transfer_seconds)

    scaling = RollingScalingRules(window=5.0, patience=2.0, most=8, idle=0.1)
    yield "EcoServe", lambda: rolling()
    yield "EcoServe, scaling", lambda: rolling(scaling=scaling, bounds=Bounds(2, 4), start_seconds=2.0)
    fewest = {"a": ReplicaRules(dispatch=lambda levels: LoadAware())}
    chunked = Pipeline((LLAMA_13B.layers,), (), partial(FixedBudget, 512))
    mixed = [lone_unit(f"i{n}", "L20-48GB", (n,), served, 900, pipeline=chunked, waiting_tokens=4096) for n in range(4)]
    yield "vLLM", lambda: of(simulate(units[:4], requests, COSTS, options, fewest).requests)
    yield "Sarathi", lambda: of(simulate(mixed, requests, COSTS, options, fewest).requests)
    yield "DistServe", lambda: split(True)
    yield "MoonCake", lambda: split(False)

    def pipeline(how: Pipeline, budget: str, blocks: int = 4000, overhead: float = 0.0) -> Figures:
        ahead = prompt_tokens_ahead(how.stages, 2048, Throttle())
        how = replace(how, budget=TOKEN_BUDGETS[budget])
        model = replace(served, max_num_seqs=1024)
        unit = lone_unit("u", "L20-48GB", tuple(range(how.stages)), model, blocks, pipeline=how, waiting_tokens=ahead)
        result = simulate([unit], requests, COSTS, Options(ControlDelays(decode_step=overhead), sample_seconds=0.0))
        made = result.units[0].micro_batches
        assert made is not None
        return figures(
            result.records,
            steps=len(made.steps),
            bubbles=made.bubble_fraction(),
            variation=made.spread()["tokens"].variation,
            peak=result.units[0].peak_pages[0] / sum(result.units[0].pool_pages.values()),
        )

    four = Pipeline((10,) * 4, (Link(),) * 3)
    for budget in TOKEN_BUDGETS:
        yield f"gLLM, {budget}", lambda budget=budget: pipeline(four, budget)
    throttled = "token_throttling"
    yield "gLLM, tight KV", lambda: pipeline(four, throttled, 250)
    yield "gLLM, made ahead", lambda: pipeline(replace(four, ahead=True, depth=5), throttled)
    yield "gLLM, one chunk at a time", lambda: pipeline(replace(four, chunk_ahead=False), throttled)
    yield "gLLM, host", lambda: pipeline(replace(four, return_seconds=0.001), throttled, overhead=0.002)
    yield "gLLM, layers", lambda: pipeline(replace(four, layers=(11, 11, 10, 8)), throttled)

    def one_stage() -> Figures:
        how = Pipeline((LLAMA_7B.layers,), (), TOKEN_BUDGETS["fixed"])
        model = FleetModel("a", LLAMA_7B, DTYPE, 1024, 2048)
        unit = lone_unit("u", A100, (0,), model, 250, pipeline=how, waiting_tokens=16384)
        return of_fleet(simulate([unit], requests, COSTS))

    # The figure by which admission shows: one stage, few blocks.
    yield "one stage, tight KV", one_stage


def scenarios() -> dict[str, Callable[[], Figures]]:
    """All of them by name."""
    return {name: run for group in (fleets, apart, planned, replicas, papers) for name, run in group()}


def differences(known: Figures, now: Figures) -> list[str]:
    """What differs by more than rounding."""
    found = []
    for name in sorted(known.keys() | now.keys()):
        old, new = known.get(name), now.get(name)
        if old is None or new is None or abs(old - new) > 1e-8 * max(abs(old), abs(new), 1e-6):
            found.append(f"{name}: {old} -> {new}" + (f" ({new / old - 1:+.1%})" if old and new is not None else ""))
    return found


def main() -> int:
    known: dict[str, Figures] = json.loads(FILE.read_text()) if FILE.exists() else {}
    now = {name: run() for name, run in scenarios().items()}
    changed = 0
    for name in [*now, *(each for each in known if each not in now)]:
        found = differences(known.get(name, {}), now.get(name, {}))
        changed += bool(found)
        if found:
            print(f"{name}\n  " + "\n  ".join(found))
    print(f"{changed} of {len(now)} scenarios differ")
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(now, indent=1) + "\n")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
