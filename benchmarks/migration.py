"""What live migration costs: the pause of a request that moves, and what it does to those that run beside it.

    python benchmarks/migration.py [--quick]

Two real units of one model on this machine. A request with a prompt of 256 to 8,192 tokens is decoded in one of them and
moves to the other,

* live: in stages, while it is decoded;
* stop-and-copy: detached first, then copied in one stage (the unit schedulers' program is changed to that);
* and for comparison the same prompt is computed on an idle unit: what it would take to begin again elsewhere.

Downtime is what the client sees: the time between the last token of the one unit and the first of the other, less the
median time between two tokens. The first move of each kind is not counted: it maps the other pool. Beside the measured
figures stand those that the simulator's model of migration (`MigrationCosts`) gives for the bandwidth that was measured
here. Then one request of 8,192 tokens moves to and fro while others of 512 are decoded, and the time between their
tokens during a move is compared with that before it.

Targets: downtime at 8,192 tokens at most 1.5 times that at 256; 20 times less than computing 8,192 tokens; others slowed
down by at most 2 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import machine, write_report
from two_units import TwoUnits, bodies, unit_deployment

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from muxserve.deployment import Deployment
from muxserve.simulator.instances.setup import MigrationCosts
from tests.support.tiny_checkpoint import tiny_checkpoint

RESULT = Path(__file__).parent / "results" / "migration.json"
LENGTHS = (256, 1024, 4096, 8192)
MAX_LEN = 9216
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 4, 64
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_DIM * 2 * 4
WARM_TOKENS, MORE_TOKENS = 24, 24
BESIDE, BESIDE_TOKENS = 4, 512


# ---------------------------------------------------------------- what is started


def host(arguments: list[str]) -> None:
    """A unit whose scheduler detaches a request before anything of it is copied."""
    from muxserve.cluster import unit_host

    real = unit_host.commands_for

    def commands(deployment: Deployment, file: Path) -> Any:
        line = [sys.executable, __file__, "--stop-and-copy-scheduler", "--deployment", str(file), "--die-with-parent"]
        return replace(real(deployment, file), unit_scheduler=line)

    unit_host.commands_for = commands
    sys.exit(unit_host.main(arguments))


def scheduler(arguments: list[str]) -> None:
    """Its scheduler."""
    from muxserve.unit import moving
    from muxserve.unit.scheduler import main
    from muxserve.wire import Detach

    def detach(self: moving.Departures, move: moving.Move, now: float) -> None:
        move.step, move.deadline = moving.Step.DETACHING, now + moving.SILENCE_SECONDS
        self._tell_engine(move, Detach(move.live.request_id, move.incarnation, move.key, 0))

    moving.Departures._show = detach  # type: ignore[method-assign]
    sys.exit(main(arguments))


# ---------------------------------------------------------------- what is measured


def other(unit: str) -> str:
    """The one of the two that it is not."""
    return "b" if unit == "a" else "a"


def move_once(units: TwoUnits, name: str) -> dict[str, float]:
    """Move a running request to the other unit; seconds."""
    seen = units.requests[name]
    source = seen.unit
    seen.moved_at, before = 0.0, len(seen.at)
    began = units.begin_moving(source)
    units.pump(lambda: bool(seen.moved_at))
    units.end_moving(source)
    target = len(seen.at) + MORE_TOKENS
    units.pump(lambda: len(seen.at) >= target)
    gaps = seen.gaps(seen.at[max(0, before - WARM_TOKENS)])
    step = statistics.median(gaps)
    # The long one: the last token here, the first one there.
    at = max(range(len(gaps)), key=gaps.__getitem__)
    return {"downtime": gaps[at] - step, "step": step, "whole": seen.moved_at - began}


def downtimes(units: TwoUnits, length: int, body: bytes, most: int, times: int) -> dict[str, Any]:
    """One request that moves to and fro; and what its prompt took."""
    name = units.submit("a", body, length, most)
    seen = units.requests[name]
    units.pump(lambda: len(seen.at) >= WARM_TOKENS)
    found = [move_once(units, name) for _ in range(times + 1)][1:]
    units.cancel(name)
    units.wait(0.3)
    result: dict[str, Any] = {
        key: round(statistics.median(one[key] for one in found) * 1e3, 3) for key in ("downtime", "step", "whole")
    }
    result["downtimes"] = sorted(round(one["downtime"] * 1e3, 3) for one in found)
    result["recompute"] = round((seen.at[0] - seen.submitted) * 1e3, 3)
    return result


def beside(units: TwoUnits, long_one: bytes, short_ones: list[bytes], most: int, times: int) -> dict[str, Any]:
    """Time between tokens of requests that stay, before and while another one leaves."""
    stay = [units.submit("a", body, BESIDE_TOKENS, most, "high") for body in short_ones]
    mover = units.submit("a", long_one, LENGTHS[-1], most)
    seen = units.requests[mover]
    units.pump(lambda: all(len(units.requests[name].at) >= WARM_TOKENS for name in (*stay, mover)))
    calm: list[float] = []
    moving: list[float] = []
    windows: list[float] = []
    for _ in range(times):
        # There: it leaves the batch of those that stay. Back again: it comes into it.
        begin = units.requests[stay[0]].at[-1]
        units.wait(0.5)
        seen.moved_at = 0.0
        began = units.begin_moving("a")
        units.pump(lambda: bool(seen.moved_at))
        units.end_moving("a")
        units.wait(0.1)
        windows.append(seen.moved_at - began)
        for name in stay:
            calm += units.requests[name].gaps(begin, began)
            moving += units.requests[name].gaps(began, seen.moved_at)
        seen.moved_at = 0.0
        units.begin_moving("b")
        units.pump(lambda: bool(seen.moved_at))
        units.end_moving("b")
        units.wait(0.2)
    for name in (*stay, mover):
        units.cancel(name)
    units.wait(0.3)
    return {
        "moves": times,
        "requests": len(stay),
        "window_ms": round(statistics.median(windows) * 1e3, 2),
        "gaps_before": len(calm),
        "gaps_during": len(moving),
        "before_ms": round(statistics.mean(calm) * 1e3, 3),
        "during_ms": round(statistics.mean(moving) * 1e3, 3),
        "slowdown": round(statistics.mean(moving) / statistics.mean(calm) - 1, 4),
        "median_before_ms": round(statistics.median(calm) * 1e3, 3),
        "median_during_ms": round(statistics.median(moving) * 1e3, 3),
    }


def predicted(length: int, step: float, bandwidth: float) -> dict[str, float]:
    """By the simulator's model, milliseconds: the last stage has what was decoded during the stage before."""
    costs = MigrationCosts(bandwidth=bandwidth)
    first = costs.handshake + length * TOKEN_BYTES / bandwidth
    last = costs.handshake + (first / step + 32) * TOKEN_BYTES / bandwidth
    whole = costs.handshake + length * TOKEN_BYTES / bandwidth
    return {
        "live": round((last + costs.commit) * 1e3, 3),
        "stop_and_copy": round((whole + costs.commit) * 1e3, 3),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 and 1,024 tokens, three moves; to no file")
    options = parser.parse_args()
    lengths = LENGTHS[:2] if options.quick else LENGTHS
    times, beside_times = (3, 3) if options.quick else (15, 12)
    most = (times + 2) * 3 * MORE_TOKENS + 400
    checkpoint = tiny_checkpoint("llama", LAYERS, HEADS, KV_HEADS, HEAD_DIM, max_len=MAX_LEN)
    made = bodies(
        [(1, length, most) for length in lengths] + [(BESIDE, BESIDE_TOKENS, 4000), (1, LENGTHS[-1], most)], 256
    )
    report: dict[str, Any] = {"machine": machine(), "token_bytes": TOKEN_BYTES, "live": {}, "stop_and_copy": {}}

    def run(command: list[str] | None, measure: Callable[[TwoUnits], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="mx") as root:

            def make(name: str) -> Deployment:
                return unit_deployment(Path(root) / name, name, checkpoint, max_len=MAX_LEN, blocks=500)

            with TwoUnits(make, command) as units:
                measure(units)

    def measure(way: str) -> Callable[[TwoUnits], None]:
        def lengths_of(units: TwoUnits) -> None:
            for length, (body,) in zip(lengths, made, strict=False):
                report[way][length] = downtimes(units, length, body, most, times)
                print(way, length, report[way][length])
            if way == "live" and not options.quick:
                report["beside"] = beside(units, made[-1][0], made[-2], most, beside_times)
                print("beside", report["beside"])

        return lengths_of

    run(None, measure("live"))
    run([sys.executable, __file__, "--stop-and-copy-host"], measure("stop_and_copy"))

    longest, shortest = lengths[-1], lengths[0]
    live, stopped = report["live"], report["stop_and_copy"]
    # What copying the longest at a stretch took, less what a short one took.
    copied = (longest - shortest) * TOKEN_BYTES
    bandwidth = copied / max(1e-6, (stopped[longest]["downtime"] - stopped[shortest]["downtime"]) / 1e3)
    report["bandwidth"] = round(bandwidth)
    report["predicted"] = {n: predicted(n, live[n]["step"] / 1e3, bandwidth) for n in lengths}
    report["ratios"] = {
        "longest_to_shortest": round(live[longest]["downtime"] / live[shortest]["downtime"], 3),
        "recompute_to_live": round(live[longest]["recompute"] / live[longest]["downtime"], 1),
        "stop_and_copy_to_live": round(stopped[longest]["downtime"] / live[longest]["downtime"], 2),
    }
    print(report["ratios"], report["predicted"])
    if not options.quick:
        write_report(RESULT, report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stop-and-copy-host"]:
        host(sys.argv[2:])
    elif sys.argv[1:2] == ["--stop-and-copy-scheduler"]:
        scheduler(sys.argv[2:])
    else:
        main()
