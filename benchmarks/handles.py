"""How long it takes to move a replica's handle from one macro instance of rolling prefill to another.

    python benchmarks/handles.py [--requests 256] [--rounds 300] [--out benchmarks/results/handles.json]

*In the global scheduler*: the live core with eight replicas and N_l 4, N_u 7. The eighth comes (four handles move) and
dies (three move back), in every round, while each of the others reports between two moves. Milliseconds of the clock
from the message that causes the moves to the end of its handling, over the moves; nothing else is handled meanwhile.

*Between two processes*, each with a macro instance: from the decision, over packing, a ZeroMQ socket and unpacking, to
the first request that the other process sends to the replica. Both take in two hundred reports a second meanwhile.

*Decisions*: what the global scheduler takes to say where a request goes, and to take in a report (in which a request
comes, another has its first token and one ends), with 8 and with 64 replicas of one model in macro instances of up to
16. From the bytes of the message to those that are sent, without sockets; milliseconds of a core, not of the clock.

Engines are not part of it: a replica is told nothing when its handle moves, so no step of it can be held up.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import zmq
from report import machine, percentiles, write_report

from muxserve.global_scheduler.core import SchedulerCore
from muxserve.global_scheduler.outbox import ToClient, ToUnit
from muxserve.global_scheduler.rolling_state import apply, rebuild
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.constraints import PrefillDemand
from muxserve.rolling.macro_instance import MacroInstance
from muxserve.rolling.member import MacroMember
from muxserve.rolling.rules import RollingRules
from muxserve.rolling.scheduler import pack, unpack
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
REPORTS_PER_SECOND = 200
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
        max_concurrency=64, max_queue=64, phases="rolling",
    )  # fmt: skip
    gateway = GatewaySpec("127.0.0.1", 0)
    entries = []
    for name in units:
        unit_spec = UnitSpec(f"/nowhere/{name}", name, "rolling", 2, [PoolSpec("main", 32768, 1001)], [model], gateway)
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
        place = Place(f"g{number}", "m", 501, time.monotonic(), "normal", "normal", 500, 400)
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


class Scheduler:
    """One process with a macro instance, its peer and a stream of reports."""

    def __init__(self, name: str, requests: int, directory: str, first: bool) -> None:
        self.macro = MacroInstance(name, RULES.objectives)
        context: zmq.Context[Any] = zmq.Context()
        self.peer: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.units: zmq.Socket[bytes] = context.socket(zmq.PULL)
        (self.peer.bind if first else self.peer.connect)(f"ipc://{directory}/peer")
        self.units.bind(f"ipc://{directory}/{name}")
        self.poller = zmq.Poller()
        self.poller.register(self.peer, zmq.POLLIN)
        self.poller.register(self.units, zmq.POLLIN)
        for number in range(4):
            self.macro.join(self.member(f"{name}-{number}", requests))
        # A request goes to the one that comes.
        for member in self.macro.ring:
            member.leaving = True

    def member(self, name: str, requests: int) -> MacroMember:
        now = time.monotonic()
        member = MacroMember(name, CAPACITY, RULES.tpot, switched_at=now)
        rebuild(member, everything(name, requests), RULES, (), now)
        member.stepped(100)
        return member

    def give(self, name: str) -> None:
        """Hand the member over, with the time at which that was decided."""
        start = time.monotonic_ns()
        data = pack(self.macro.leave(name), f"ipc:///nowhere/{name}")
        self.peer.send_multipart([start.to_bytes(8, "little"), data])

    def take(self) -> tuple[str, float]:
        """Serve reports until the peer hands a member over; then have it serve a request. Returns its name, and
        milliseconds from the decision to the dispatch."""
        self.macro.waiting.clear()
        while True:
            ready = dict(self.poller.poll())
            if self.units in ready:
                self.report(decode(self.units.recv()))
            if self.peer in ready:
                started, data = self.peer.recv_multipart()
                if not data:
                    return "", 0.0
                member = unpack(data).member
                self.macro.join(member)
                now = time.monotonic()
                ((_, to),) = self.macro.arrive(PrefillDemand("probe", 0.01, 500, now), now)
                took = (time.monotonic_ns() - int.from_bytes(started, "little")) / 1e6
                if to is not member:
                    raise SystemExit(f"the request went to {to.name}")
                member.left("probe", now)
                # It goes on decoding well within its objective.
                member.stepped(1)
                return member.name, took

    def report(self, message: Any) -> None:
        member = self.macro.member(message.unit)
        apply(member, message, RULES, (), time.monotonic())
        self.macro.retry(time.monotonic())


def _units(directory: str, names: list[str], requests: int) -> None:
    """The units of both macro instances, in a process of their own."""
    context: zmq.Context[Any] = zmq.Context()
    sockets = []
    for name in names:
        socket = context.socket(zmq.PUSH)
        socket.connect(f"ipc://{directory}/{name}")
        sockets.append((socket, [Reports(f"{name}-{n}", requests) for n in range(4)]))
    due = time.monotonic()
    turn = 0
    while True:
        for socket, reports in sockets:
            socket.send(encode(reports[turn % 4]()))
        turn += 1
        due += 1 / REPORTS_PER_SECOND
        time.sleep(max(0.0, due - time.monotonic()))


def _other(directory: str, requests: int) -> None:
    scheduler = Scheduler("b", requests, directory, first=False)
    gc.freeze()
    while True:
        name, took = scheduler.take()
        if not name:
            return
        scheduler.peer.send(msgspec.msgpack.encode(took))
        scheduler.give(name)


def between_processes(requests: int, rounds: int) -> dict[str, object]:
    """There and back again, between two processes."""
    fork = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="mux-bench-") as directory:
        other = fork.Process(target=_other, args=(directory, requests), daemon=True)
        units = fork.Process(target=_units, args=(directory, ["a", "b"], requests), daemon=True)
        other.start()
        units.start()
        try:
            scheduler = Scheduler("a", requests, directory, first=True)
            scheduler.macro.join(scheduler.member("rolls", requests))
            size = len(pack(scheduler.macro.member("rolls"), "ipc:///nowhere/rolls"))
            gc.freeze()
            took: list[float] = []
            for number in range(rounds + WARM_UP):
                scheduler.give("rolls")
                there = msgspec.msgpack.decode(scheduler.peer.recv(), type=float)
                _, back = scheduler.take()
                if number >= WARM_UP:
                    took += [there, back]
                # Reports are taken in meanwhile.
                end = time.monotonic() + 0.01
                while (left := end - time.monotonic()) > 0:
                    if scheduler.units.poll(max(1, int(1000 * left))):
                        scheduler.report(decode(scheduler.units.recv()))
            scheduler.peer.send_multipart([b"", b""])
            other.join(5)
        finally:
            for process in (other, units):
                process.kill()
                process.join()
    return {"handle_bytes": size, "move_ms": percentiles(took), "longest_ms": round(max(took), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="of each replica")
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
    report["between_processes"] = processes = between_processes(args.requests, args.rounds)
    print(f"between processes          {processes['move_ms']} ms per move, {processes['handle_bytes']} bytes")
    write_report(args.out, report)


if __name__ == "__main__":
    main()
