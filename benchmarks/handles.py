"""How long it takes to move a replica from one macro instance of rolling prefill to another.

    python benchmarks/handles.py [--requests 256] [--rounds 300] [--out benchmarks/results/handles.json]

*In the global scheduler*: the live core with eight replicas and N_l 4, N_u 7. The eighth comes (four replicas move) and
dies (three move back), in every round, while each of the others reports between two moves. Milliseconds of the clock
from the message that causes the moves to the end of its handling, over the moves; nothing else is handled meanwhile.

*Decisions*: what the global scheduler takes to say where a request goes, and to take in a report (in which a request
comes, another has its first token and one ends), with 8 and with 64 replicas of one model in macro instances of up to
16. From the bytes of the message to those that are sent, without sockets; milliseconds of a core, not of the clock.

Engines are not part of it: a replica hears nothing of its move, so no step of it can be held up.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from report import machine, percentiles, write_report

from muxserve.global_scheduler.core import SchedulerCore
from muxserve.global_scheduler.outbox import ToClient, ToUnit
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.rules import RollingRules
from muxserve.spec import (
    FleetSpec,
    GatewaySpec,
    ModelSpec,
    PoolSpec,
    UnitEntry,
    UnitSpec,
)
from muxserve.wire import Loads, Place, Placed, RollingReport, RollingRequest, decode, encode

CAPACITY = 1_000_000
RULES = RollingRules(ttft=5.0, tpot=0.1, prefill=((1, 0.0002), (10_000, 2.0)), spared=0.25, lower=4, upper=7)
WARM_UP = 10
REPLICAS = (8, 64)


def everything(unit: str, count: int, epoch: str = "e") -> RollingReport:
    """The first report of a replica with that many requests, which have decoded for some time."""
    requests = [RollingRequest(f"{unit}/{n}", 500 + n, 400, True, n / 20) for n in range(count)]
    return RollingReport(unit, epoch, "m", whole=True, requests=requests, steps=10_000)


class Reports:
    """What a replica says while it decodes: in each report a request comes, another has its first token, one ends."""

    def __init__(self, unit: str, count: int) -> None:
        self.unit = unit
        self.ids = [f"{unit}/{n}" for n in range(count)]
        self.steps = 10_000
        self.next = count

    def __call__(self) -> RollingReport:
        self.steps += 1
        self.next += 1
        came, gone = f"{self.unit}/{self.next}", self.ids.pop(0)
        self.ids.append(came)
        request = RollingRequest(came, 500, 400)
        report = RollingReport(self.unit, "e", "m", requests=[request], prefilled=[came], left=[gone])
        report.steps, report.prefill_tokens, report.prefill_seconds = self.steps, 500, 0.1
        return report


def deployed(units: list[str], rules: RollingRules = RULES) -> FleetSpec:
    """A fleet whose units all serve the rolling model."""
    model = ModelSpec(
        name="m", path="/models/m", pool="main", dtype="float32", layers=2, kv_heads=2, head_dim=64, block_tokens=16,
        num_blocks=128, quota_pages=400, floor_pages=100, max_len=400, rate=1.0, max_num_seqs=8,
        max_num_batched_tokens=64, prefix_caching=True, threads=1, prefill_share=0.5, decode_share=0.5,
        max_concurrency=64, max_queue=64, shape="one", rolling=True,
    )  # fmt: skip
    gateway = GatewaySpec("127.0.0.1", 0)
    entries = []
    for name in units:
        unit_spec = UnitSpec(f"/nowhere/{name}", name, "rolling", 2, [PoolSpec("main", 32768, 1001)], [model])
        entries.append(UnitEntry(unit_spec, unit_spec.unit_address, unit_spec.migrator_address, ["m"]))
    return FleetSpec("/nowhere", gateway, [model], entries, rolling={"m": rules})


def in_core(requests: int, rounds: int) -> dict[str, object]:
    """Moves within the global scheduler, from message to message."""
    units = [f"u{n}" for n in range(8)]
    core = SchedulerCore(deployed(units), "s", time.monotonic())

    def hear(unit: str, message: RollingReport | Loads) -> None:
        core.handle(ToUnit(unit), decode(encode(message)), time.monotonic())

    def comes(unit: str) -> None:
        hear(unit, everything(unit, requests))

    def load(unit: str) -> Loads:
        return Loads(unit, "e", [InstanceLoad("", CAPACITY, "m", running=requests)])

    for unit in units[:7]:
        comes(unit)
        hear(unit, load(unit))
    core.tick(time.monotonic())
    speak = {unit: Reports(unit, requests) for unit in units[:7]}
    gc.collect()
    gc.freeze()
    moves: list[float] = []
    held_up: list[float] = []
    reports: list[float] = []

    def moved() -> int:
        state: Any = core.state(time.monotonic())["models"]
        return int(state["m"]["moved"])

    def timed(cause: Callable[[], None]) -> None:
        before = moved()
        start = time.perf_counter()
        cause()
        took = 1e3 * (time.perf_counter() - start)
        count = moved() - before
        if not count:
            raise SystemExit("nothing moved")
        moves.extend([took / count] * count)
        held_up.append(took)

    for number in range(rounds + WARM_UP):
        comes("u7")
        message = load("u7")
        timed(lambda message=message: hear("u7", message))  # type: ignore[misc]
        timed(lambda: core.unit_gone("u7", time.monotonic()))
        for unit, report in speak.items():
            said = report()
            start = time.perf_counter()
            hear(unit, said)
            reports.append(1e3 * (time.perf_counter() - start))
        core.tick(time.monotonic())
        if number == WARM_UP - 1:
            for each in (moves, held_up, reports):
                each.clear()
    return {
        "move_ms": percentiles(moves),
        "all_moves_of_a_change_ms": percentiles(held_up),
        "report_ms": percentiles(reports),
    }


def decisions(replicas: int, requests: int, rounds: int) -> dict[str, object]:
    """What a request and a report take, in a fleet of so many replicas."""
    units = [f"u{n}" for n in range(replicas)]
    rules = msgspec.structs.replace(RULES, upper=16)
    core = SchedulerCore(deployed(units, rules), "s", time.monotonic())
    gateway = ToClient(b"gateway")

    def hear(peer: ToUnit | ToClient, message: Any) -> tuple[list[Any], float]:
        """Answers, and milliseconds of this thread."""
        data = encode(message)
        start = time.thread_time()
        core.handle(peer, decode(data), time.monotonic())
        sent = core.tick(time.monotonic())
        for _, each in sent:
            encode(each)
        return [each for _, each in sent], 1e3 * (time.thread_time() - start)

    for unit in units:
        hear(ToUnit(unit), everything(unit, requests))
        hear(ToUnit(unit), Loads(unit, "e", [InstanceLoad("", CAPACITY, "m", running=requests)]))
    speak = {unit: Reports(unit, requests) for unit in units}
    for unit, report in speak.items():
        report.steps += 1000  # who decodes has time to spare
        hear(ToUnit(unit), report())
    gc.collect()
    gc.freeze()
    places: list[float] = []
    reports: list[float] = []
    # As many requests as reports, since each report ends one.
    count = max(1, rounds * 8 // replicas)
    for number in range((count + WARM_UP) * replicas):
        unit = units[number % replicas]
        took = hear(ToUnit(unit), speak[unit]())[1]
        place = Place(f"g{number}", "m", 501, time.monotonic(), max_tokens=400)
        answers, asked = hear(gateway, place)
        placed = [each for each in answers if isinstance(each, Placed)]
        if len(placed) != 1:
            raise SystemExit(f"{answers} where a replica was expected")
        # It ends at once, so that there are always as many.
        ended = RollingReport(placed[0].unit, "e", "m", requests=[RollingRequest(place.request_id, 500, 400)])
        ended.prefilled = ended.left = [place.request_id]
        ended.steps, ended.prefill_seconds = speak[placed[0].unit].steps, 0.1
        hear(ToUnit(placed[0].unit), ended)
        if number >= WARM_UP * replicas:
            reports.append(took)
            places.append(asked)
    gc.unfreeze()
    return {"place_ms": percentiles(places), "report_ms": percentiles(reports)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="requests of each replica")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/handles.json"))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    report: dict[str, object] = {"machine": machine(), "requests": args.requests, "niceness": os.nice(0)}
    report["global_scheduler"] = core = in_core(args.requests, args.rounds)
    print(f"in the global scheduler    {core['move_ms']} ms per move")
    report["decisions"] = {n: decisions(n, args.requests, args.rounds) for n in REPLICAS}
    for replicas, found in report["decisions"].items():  # type: ignore[attr-defined]
        print(f"{replicas:3} replicas               {found}")
    write_report(args.out, report)


if __name__ == "__main__":
    main()
