"""What live migration costs: the pause of a request that moves, and what it does to those that run beside it.

    python benchmarks/migration.py [--quick] [--rounds 4] [--moves 5] [--beside 12]

Two real units of one model on this machine. A request with a prompt of 256 to 8,192 tokens is decoded in one of them
and moves to the other and back, in turns

* live: in stages, while it is decoded;
* stop-and-copy: detached first, then copied in one stage (the unit schedulers can be told to by this program only);

and the time that its prompt took on the idle unit is what beginning again elsewhere would take at least. All of it is
done in several rounds over all lengths, since a shared machine is not as fast at all times.

Downtime is what the client sees: the time between the last token of the one unit and the first of the other, less the
median time between two tokens. It has two parts: until the other unit has the request (with all its KV), and the first
step there, for which it is admitted to an engine that has nothing else to do. The first two moves of each request are
not counted: they map the other pool. Beside the measured figures stand those that the simulator's model of migration
(`MigrationCosts`) gives for the bandwidth that was measured here. Then one request of 8,192 tokens moves to and fro
while others of 512 are decoded, and the time between their tokens during a move is compared with that of the half
second before it, and as a control the time in a window as long as the move with the half second before that; and all of
this again with a limit to the bandwidth of moves (`migration: { bandwidth: ... }`).

Targets: downtime at 8,192 tokens at most 1.5 times that at 256; 20 times less than computing 8,192 tokens; others
slowed down by at most 2 %.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from benchmarks.report import machine, write_report
from benchmarks.two_units import Pair, Seen, TwoUnits, bodies, spec_of_unit
from muxserve.simulator import MigrationCosts
from muxserve.spec import UnitSpec
from tests.support.tiny_checkpoint import tiny_checkpoint

RESULT = Path(__file__).parent / "results" / "migration.json"
LENGTHS = (256, 1024, 4096, 8192)
MAX_LEN = 9984
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 4, 64
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_DIM * 2 * 4
LIVE, STOPPED = "live", "stop_and_copy"
STEPS = 16  # before a move and after it
BESIDE, BESIDE_TOKENS = 4, 512
CALM_SECONDS = 0.5
SWITCH = "MUXSERVE_STOP_AND_COPY"


# ---------------------------------------------------------------- what is started


def host(arguments: list[str]) -> None:
    """A unit whose scheduler can be told to detach requests before anything of them is copied."""
    from muxserve.cluster import unit_host

    real = unit_host.commands_for

    def commands(unit_spec: UnitSpec, file: Path) -> Any:
        line = [sys.executable, __file__, "--scheduler", "--unit-spec", str(file), "--die-with-parent"]
        return replace(real(unit_spec, file), unit_scheduler=line)

    unit_host.commands_for = commands
    sys.exit(unit_host.main(arguments))


def scheduler(arguments: list[str]) -> None:
    """Its scheduler."""
    from muxserve.unit import moving
    from muxserve.unit.scheduler import main
    from muxserve.wire import Detach

    show, switch = moving.Departures._show, os.environ[SWITCH]

    def detach_or_show(self: moving.Departures, move: moving.RequestMove, now: float) -> None:
        if not os.path.exists(switch):
            show(self, move, now)
            return
        move.step, move.deadline = moving.MoveStep.DETACHING, now + moving.SILENCE_SECONDS
        self._tell_engine(move, Detach(move.live.request_id, move.incarnation, move.key, 0))

    moving.Departures._show = detach_or_show  # type: ignore[method-assign]
    sys.exit(main(arguments))


# ---------------------------------------------------------------- what is measured


class Bench:
    """The two units, and which way requests move."""

    def __init__(self, units: TwoUnits, switch: Path) -> None:
        self.units = units
        self._switch = switch

    def move(self, seen: Seen, way: str) -> float:
        """Move a running request to the other unit, as the only one; when that began."""
        if way == STOPPED:
            self._switch.touch()
        else:
            self._switch.unlink(missing_ok=True)
        source = seen.unit
        seen.moved_at = 0.0
        began = self.units.begin_moving(source)
        self.units.pump(lambda: bool(seen.moved_at))
        self.units.end_moving(source)
        return began

    def move_alone(self, seen: Seen, way: str) -> dict[str, float]:
        """The same with nothing beside it; seconds."""
        before = len(seen.at)
        self.units.pump(lambda: len(seen.at) >= before + STEPS)
        began = self.move(seen, way)
        moved = len(seen.at)
        self.units.pump(lambda: len(seen.at) >= moved + STEPS)
        gaps = seen.gaps(seen.at[before])
        step = statistics.median(gaps)
        # The long one is between the last token here and the first one there.
        # When the other unit took it over, and its first token there came.
        enter = next(at for at in seen.at if at > seen.moved_at) - seen.moved_at
        leave = max(gaps) - enter
        return {
            "downtime": max(gaps) - step,
            "step": step,
            "whole": seen.moved_at - began,
            "until_taken_over": leave,
            "until_first_token": enter,
        }

    def round(self, length: int, body: bytes, most: int, times: int, found: Any) -> None:
        """One request that moves to and fro; and what its prompt took."""
        name = self.units.submit("a", body, length, most)
        seen = self.units.requests[name]
        self.units.pump(lambda: bool(seen.at))
        found["recompute"][length].append({"recompute": seen.at[0] - seen.submitted})
        for _ in range(2):
            self.move_alone(seen, LIVE)
        for _ in range(times):
            for way in (LIVE, STOPPED):
                found[way][length].append(self.move_alone(seen, way))
        self.units.cancel(name)
        self.units.wait(0.2)

    def beside(self, long_ones: list[bytes], short_ones: list[bytes], most: int, times: int) -> dict[str, Any]:
        """Time between tokens of requests that stay, while another one leaves their batch; `times` for each of those
        that leave. One that would end before it has moved so often is sent again."""
        ratios: dict[str, list[float]] = {"moving": [], "control": []}
        windows: list[float] = []
        wanted = times * len(long_ones)
        for long_one in itertools.cycle(long_ones):
            self._beside(long_one, short_ones, most, min(times, wanted - len(windows)), ratios, windows)
            if len(windows) >= wanted:
                break
        moves = len(windows)
        result: dict[str, Any] = {"moves": moves, "requests": BESIDE, "move_ms": _ms(windows)}
        for what, values in ratios.items():
            mean, error = statistics.mean(values), statistics.stdev(values) / moves**0.5
            result[what] = {"slowdown": round(mean - 1, 4), "standard_error": round(error, 4)}
            result[what]["median"] = round(statistics.median(values) - 1, 4)
        return result

    def _beside(
        self,
        long_one: bytes,
        short_ones: list[bytes],
        most: int,
        times: int,
        ratios: dict[str, list[float]],
        windows: list[float],
    ) -> None:
        units = self.units
        stay = [units.submit("a", body, BESIDE_TOKENS, 9000, "high") for body in short_ones]
        mover = units.submit("a", long_one, LENGTHS[-1], most)
        seen = units.requests[mover]
        staying = [units.requests[name] for name in stay]
        units.pump(lambda: all(len(one.at) >= STEPS for one in (*staying, seen)))
        for _ in range(times):
            tokens = len(seen.tokens)
            window = statistics.median(windows) if windows else 0.05
            units.wait(2 * CALM_SECONDS + window)
            began = self.move(seen, LIVE)
            windows.append(seen.moved_at - began)
            units.wait(0.1)
            calm = began - window
            ratios["control"].append(_ratio(staying, calm, began))
            ratios["moving"].append(_ratio(staying, began, seen.moved_at))
            self.move(seen, LIVE)  # and back
            units.wait(0.2)
            if most - len(seen.tokens) < 2 * (len(seen.tokens) - tokens):
                break
        for name in (*stay, mover):
            units.cancel(name)
        units.wait(0.2)


def _ratio(staying: list[Seen], begin: float, end: float) -> float:
    """Mean time between tokens in that window, to that in the time before it."""

    def mean(begin: float, end: float) -> float:
        gaps = []
        for one in staying:
            pairs = zip(one.at, one.at[1:], strict=False)
            gaps += [later - earlier for earlier, later in pairs if begin <= later < end]
        return statistics.mean(gaps) if gaps else end - begin

    return mean(begin, end) / mean(begin - CALM_SECONDS, begin)


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def summary(found: Any) -> dict[str, Any]:
    """Medians in milliseconds, and the single downtimes."""
    result: dict[str, Any] = {}
    for way, lengths in found.items():
        for length, ones in lengths.items():
            row = {key: _ms([one[key] for one in ones]) for key in ones[0]}
            if "downtime" in row:
                # What others do on the machine makes it longer, never shorter.
                row["lower_quartile"] = round(statistics.quantiles([one["downtime"] * 1e3 for one in ones])[0], 3)
                row["downtimes"] = sorted(round(one["downtime"] * 1e3, 2) for one in ones)
            result.setdefault(way, {})[length] = row
    return result


def predicted(length: int, step: float, bandwidth: float) -> dict[str, float]:
    """By the simulator's model, milliseconds: the last stage has what was decoded during the stage before, and the
    block that was not full."""
    costs = MigrationCosts(bandwidth=bandwidth)
    first = costs.handshake + length * TOKEN_BYTES / bandwidth
    last = costs.handshake + (first / step + 32) * TOKEN_BYTES / bandwidth
    return {LIVE: round((last + costs.commit) * 1e3, 3), STOPPED: round((first + costs.commit) * 1e3, 3)}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 and 1,024 tokens, three moves; to no file")
    parser.add_argument("--rounds", type=int, default=4, help="rounds over all lengths")
    parser.add_argument("--moves", type=int, default=5, help="moves of each kind, length and round")
    parser.add_argument("--beside", type=int, default=12, help="moves beside other requests, three times")
    parser.add_argument("--limit", type=int, default=128, help="bandwidth of the limited moves, MiB/s")
    options = parser.parse_args()
    lengths = LENGTHS[:2] if options.quick else LENGTHS
    rounds, times, beside_times = (1, 2, 4) if options.quick else (options.rounds, options.moves, options.beside)
    most = 1600
    checkpoint = tiny_checkpoint("llama", LAYERS, HEADS, KV_HEADS, HEAD_DIM, max_len=MAX_LEN)
    wanted = [(rounds, length, most) for length in lengths]
    movers = 1 if options.quick else 3
    *made, short_ones, long_ones = bodies([*wanted, (BESIDE, BESIDE_TOKENS, 9000), (movers, lengths[-1], most)], 256)
    found: Any = {way: defaultdict(list) for way in (LIVE, STOPPED, "recompute")}
    report: dict[str, Any] = {"machine": machine(), "token_bytes": TOKEN_BYTES}
    with tempfile.TemporaryDirectory(prefix="mx") as root:
        switch = Path(root) / "stop-and-copy"
        os.environ[SWITCH] = str(switch)

        def make(name: str) -> UnitSpec:
            return spec_of_unit(Path(root) / name, name, checkpoint, max_len=MAX_LEN, blocks=900)

        def limited(name: str) -> UnitSpec:
            limit = float(options.limit << 20)
            unit = make(f"{name}-limited")
            return msgspec.structs.replace(unit, unit=name, migration_bandwidth=limit)

        with Pair(make, [sys.executable, __file__, "--host"]) as pair, TwoUnits(pair) as units:
            bench = Bench(units, switch)
            for number in range(rounds):
                for length, some in zip(lengths, made, strict=True):
                    bench.round(length, some[number], most, times, found)
            report |= summary(found)
            print(report)
            report["beside"] = bench.beside(long_ones, short_ones, most, beside_times)
            print(report["beside"])
        with Pair(limited, [sys.executable, __file__, "--host"]) as pair, TwoUnits(pair) as units:
            found_limited = Bench(units, switch).beside(long_ones, short_ones, most, beside_times)
            report["beside_limited"] = {"bytes_per_second": options.limit << 20, **found_limited}
            print(report["beside_limited"])

    longest, shortest = lengths[-1], lengths[0]
    live, stopped = report[LIVE], report[STOPPED]
    # What copying the longest at a stretch took, less what a short one took.
    copied = (longest - shortest) * TOKEN_BYTES
    bandwidth = copied / max(1e-6, (stopped[longest]["downtime"] - stopped[shortest]["downtime"]) / 1e3)
    report["bandwidth"] = round(bandwidth)
    report["predicted"] = {n: predicted(n, live[n]["step"] / 1e3, bandwidth) for n in lengths}
    report["load_average_after"] = [round(value, 2) for value in os.getloadavg()]
    report["ratios"] = {
        "longest_to_shortest": round(live[longest]["downtime"] / live[shortest]["downtime"], 3),
        "longest_to_shortest_lower_quartile": round(
            live[longest]["lower_quartile"] / live[shortest]["lower_quartile"], 3
        ),
        "longest_to_shortest_until_taken_over": round(
            live[longest]["until_taken_over"] / live[shortest]["until_taken_over"], 3
        ),
        "recompute_to_live": round(report["recompute"][longest]["recompute"] / live[longest]["downtime"], 1),
        "stop_and_copy_to_live": round(stopped[longest]["downtime"] / live[longest]["downtime"], 2),
    }
    print(report["ratios"], report["predicted"])
    if not options.quick:
        write_report(RESULT, report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--host"]:
        host(sys.argv[2:])
    elif sys.argv[1:2] == ["--scheduler"]:
        scheduler(sys.argv[2:])
    else:
        main()
