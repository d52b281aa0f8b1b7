"""How long the decisions over replicas take: up to 1,024 instances with about 100 live requests each.

    python benchmarks/replicas.py [--instances 16,64,256,1024] [--live 100] [--out benchmarks/results/replicas.json]

The loads of a busy fleet stand still while the decisions are timed: taking in a report, dispatching a request, a round
of pairing for migration with a decision on scaling, and, on one instance, choosing the request that moves. Every
dispatch is followed by a new report of its instance, as in a live fleet. In microseconds of the thread's own processor
time, since the machine is shared; the garbage collector is frozen once.

Then the process that decides them in a live fleet: how long a gateway waits to hear where a request goes, from
message to message over Unix sockets, while every unit reports ten times a second. In microseconds of the clock, with
whatever else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

import zmq
from dispatch_policies import Freest, LoadAware, RoundRobinDispatch
from report import machine, percentiles, write_report

from muxserve.net import sockets
from muxserve.replicas.dispatch import FreestOfQueues, NewRequest
from muxserve.replicas.global_scheduler import GlobalScheduler
from muxserve.replicas.migration import MigrationRules, choose_request
from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.scaling import ScalingRules
from muxserve.replicas.views import InstanceLoad, InstanceView, RequestView
from muxserve.spec import (
    FleetSpec,
    GatewaySpec,
    ModelSpec,
    PoolSpec,
    UnitEntry,
    UnitSpec,
    save_fleet,
)
from muxserve.wire import Loads, Place, Placed, decode, encode

CAPACITY = 64_000
POLICIES = {
    "freest": lambda: Freest(),
    "freest_of_queues": lambda: FreestOfQueues(DEFAULT_LEVELS),
    "load_aware": lambda: LoadAware(),
    "round_robin": lambda: RoundRobinDispatch(),
}


def view(name: str, live: int, rng: random.Random) -> InstanceView:
    """An instance with about that many live requests, a tenth of them queued and a twentieth of high priority."""
    count = max(2, round(live * rng.uniform(0.7, 1.3)))
    queued = count // 10 if rng.random() < 0.5 else 0
    # From half full to as good as full, so that there are sources and destinations.
    average = CAPACITY * rng.uniform(0.5, 1.0) / (count - queued)
    running = [
        RequestView(
            f"{name}/{n}",
            int(average * rng.uniform(0.2, 1.8)) // 16 * 16,
            execution="high" if rng.random() < 0.05 else "normal",
        )
        for n in range(count - queued)
    ]
    waiting = [RequestView(f"{name}/w{n}", demand=16 * rng.randint(1, 200), queued=True) for n in range(queued)]
    return InstanceView(name, CAPACITY, running, waiting)


def reported(view: InstanceView) -> InstanceLoad:
    """What the instance reports to the global scheduler."""
    load = view.load()
    load.model = "m"
    return load


def timed(times: int, call: Callable[[int], object]) -> dict[str, float]:
    """Microseconds of `call`, each call on its own."""
    took = []
    for number in range(times):
        start = time.thread_time_ns()
        call(number)
        took.append((time.thread_time_ns() - start) / 1e3)
    return percentiles(took)


def measure(instances: int, live: int, seed: int) -> dict[str, object]:
    """All decisions at that size."""
    rng = random.Random(seed)
    views = [view(f"i{n:04d}", live, rng) for n in range(instances)]
    rules = MigrationRules()
    scaling = ScalingRules(minimum=1, maximum=2 * instances)
    result: dict[str, object] = {
        "instances": instances,
        "live_requests": sum(len(each.running) + len(each.waiting) for each in views),
    }
    dispatch: dict[str, dict[str, float]] = {}
    for name, policy in POLICIES.items():
        scheduler = GlobalScheduler("m", dispatch=policy(), migration=rules, scaling=scaling)
        loads: dict[str, InstanceLoad] = {}
        for each in views:
            loads[each.name] = reported(each)
            scheduler.up(loads[each.name])
        gc.collect()
        gc.freeze()
        sent: list[str] = []

        def send(number: int, scheduler: GlobalScheduler = scheduler, sent: list[str] = sent) -> None:
            decisions = scheduler.arrive(0.0, NewRequest(str(number), 512, 0.0))
            sent.append(decisions[0].instance)  # type: ignore[union-attr]

        took = []
        for number in range(1000):
            took.append(timed(1, lambda _, number=number: send(number))["mean"])  # type: ignore[misc]
            # The request has started and another has ended: the instance stands where it stood.
            index = int(sent[-1][1:])
            loads[sent[-1]] = reported(views[index])
            scheduler.report(loads[sent[-1]])
        dispatch[name] = percentiles(took)
    result["dispatch_us"] = dispatch
    reports = [reported(each) for each in views]
    result["report_us"] = timed(2000, lambda n: scheduler.report(reports[n % instances]))
    # One instance above all others and another below, so that pairs change in every round.
    result["round_us"] = timed(200, lambda n: scheduler.tick(n / 10))
    result["pairs"] = len(scheduler.pairs)
    full = max(views, key=lambda each: sum(r.usage for r in each.running))
    full.waiting = [RequestView("head", demand=4_000, queued=True)]
    empty = InstanceLoad("empty", CAPACITY)
    result["choose_us"] = timed(500, lambda _: choose_request(full, empty, rules, DEFAULT_LEVELS))
    return result


def _deployed(run_dir: str, units: int) -> FleetSpec:
    model = ModelSpec(
        name="m", path="/models/m", pool="main", dtype="float32", layers=2, kv_heads=2, head_dim=64, block_tokens=16,
        num_blocks=128, quota_pages=400, floor_pages=100, max_len=400, rate=1.0, max_num_seqs=8,
        max_num_batched_tokens=64, prefix_caching=True, threads=1, prefill_share=0.5, decode_share=0.5,
        max_concurrency=64, max_queue=64,
    )  # fmt: skip
    gateway = GatewaySpec("127.0.0.1", 0)
    entries = []
    for number in range(units):
        name = f"u{number}"
        pools = [PoolSpec("main", 32768, 1001)]
        unit_spec = UnitSpec(f"{run_dir}/{name}", name, "adbs", 2, pools, [model])
        Path(unit_spec.run_dir).mkdir()
        entries.append(UnitEntry(unit_spec, unit_spec.unit_address, unit_spec.migrator_address, ["m"]))
    return FleetSpec(run_dir, gateway, [model], entries, migration=MigrationRules())


def _report(fleet: FleetSpec, up: Event) -> None:
    """The units of a live fleet, in a process of their own: each reports ten times a second, and never the same."""
    rng = random.Random(1)
    context = zmq.Context()
    context.setsockopt(zmq.MAX_SOCKETS, 4096)
    routers, schedulers = {}, {}
    poller = zmq.Poller()
    for unit in fleet.units:
        router = context.socket(zmq.ROUTER)
        sockets.bind_local(router, unit.unit_address)
        poller.register(router, zmq.POLLIN)
        routers[router] = unit.name
    due = time.monotonic()
    while True:
        for router, _ in poller.poll(max(0, int(1000 * (due - time.monotonic())))):
            schedulers[router] = router.recv_multipart()[0]
        if len(schedulers) == len(routers):
            up.set()
        if time.monotonic() < due:
            continue
        due += 0.1
        for router, scheduler in schedulers.items():
            load = InstanceLoad(
                "", CAPACITY, "m", used=rng.randint(CAPACITY // 4, CAPACITY), running=rng.randint(20, 120)
            )
            router.send_multipart([scheduler, encode(Loads(routers[router], "e", [load]))])


def measure_process(units: int, times: int = 2000) -> dict[str, object]:
    """From `Place` to `Placed`, as one gateway sees it."""
    with tempfile.TemporaryDirectory(prefix="mux-bench-") as run_dir:
        fleet = _deployed(run_dir, units)
        save_fleet(fleet)
        up = get_context("fork").Event()
        reporter = get_context("fork").Process(target=_report, args=(fleet, up), daemon=True)
        reporter.start()
        command = [sys.executable, "-m", "muxserve.global_scheduler.process", "--fleet", str(fleet.file)]
        process = subprocess.Popen([*command, "--die-with-parent", "--log-level", "warning"])
        try:
            if not up.wait(30):
                raise SystemExit("the global scheduler did not greet the units")
            with zmq.Context() as context, context.socket(zmq.DEALER) as gateway:
                gateway.identity = b"gateway/bench"
                gateway.linger = 0
                sockets.connect(gateway, fleet.scheduler_address)
                took = []
                for number in range(times + 100):
                    start = time.perf_counter_ns()
                    gateway.send(encode(Place(str(number), "m", 512, 0.0)))
                    if not isinstance(decode(gateway.recv()), Placed):
                        raise SystemExit("a request was not placed")
                    if number >= 100:
                        took.append((time.perf_counter_ns() - start) / 1e3)
                    # A few hundred requests per second.
                    time.sleep(0.002)
        finally:
            process.terminate()
            process.wait()
            reporter.kill()
            reporter.join()
    return {"units": units, "place_us": percentiles(took)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="16,64,256,1024")
    parser.add_argument("--live", type=int, default=100, help="requests per instance")
    parser.add_argument("--units", default="4,16,64,256", help="units of the live fleet")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/replicas.json"))
    args = parser.parse_args()
    report: dict[str, object] = {"machine": machine()}
    rows = []
    for count in map(int, args.instances.split(",")):
        row = measure(count, args.live, args.seed)
        rows.append(row)
        chosen = row["dispatch_us"]["freest_of_queues"]  # type: ignore[index]
        print(
            f"{count:5d} instances {row['live_requests']:7d} requests   dispatch p50 {chosen['p50']:7.1f} p99 "
            f"{chosen['p99']:7.1f} us   round p99 {row['round_us']['p99']:8.1f}   "  # type: ignore[index]
            f"report p99 {row['report_us']['p99']:6.1f}   choose p99 {row['choose_us']['p99']:6.1f}",  # type: ignore[index]
            flush=True,
        )
    live = []
    for count in map(int, args.units.split(",")):
        measured = measure_process(count)
        live.append(measured)
        took = measured["place_us"]
        print(f"{count:5d} units   place p50 {took['p50']:7.1f} p99 {took['p99']:7.1f} us", flush=True)  # type: ignore[index]
    write_report(args.out, report | {"sizes": rows, "process": live})


if __name__ == "__main__":
    main()
