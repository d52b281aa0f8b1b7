"""The requests of `density.py` on a virtual clock: what residency by demand, also with models that take turns, and idle
timers make of the same wakes.

    python benchmarks/density_replay.py [--models 24] [--limit 4GiB] [--pool 128MiB] [--rate 1.5] [--tokens 16]
                                        [--seeds 0 1 2]

All play in the simulator of `muxserve simulate`, with what `planning/specs/residency.py` says of wakes: seconds alone,
how much longer beside others, what is set aside. Idle timers know no limit: what they took at most is printed, and with
`--within` they wait for memory as residency does. Nothing here depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from density import KV_BYTES, PROMPT, fleet_file
from report import percentiles

from muxserve.cli.simulate_places import PlacementSearch, places_of
from muxserve.config.values import parse_size
from muxserve.costs.measured import latency_model
from muxserve.scheduling import room_ahead
from muxserve.scheduling.residency import Residency
from muxserve.scheduling.residency_types import Change, KvRules, Residence, Sleep, Standing, Stay, Wake
from muxserve.scheduling.turns import TurnRules
from muxserve.simulator import SimUnit, mode_of
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.unit import SimulatedUnit
from muxserve.workload import open_workload
from placement.format import format_size
from tests.support.tiny_checkpoint import tiny_checkpoint

# The planner wants a pool that holds requests of usual lengths; here as much of it counts as there is live.
POOL = 1 << 30


class IdleTimers(Residency):
    """Every model that somebody waits for is woken at once, or with `within` when there is memory. It sleeps when it
    has had nothing to do for `idle` seconds."""

    idle = 5.0
    within = False

    def decide(self, now: float, fixed: int | None, standings: Iterable[Standing]) -> list[Change]:
        """See `Residency.decide`."""
        every = list(standings)
        self.restless = True
        assert fixed is None, "nothing is measured in simulation"
        free = self.rules.limit - self.rules.fixed - KV_BYTES - sum(self.sizes.taken(each) for each in every)
        changes: list[Change] = []
        for each in every:
            if each.residence is Residence.LEAVING and each.waiting:
                changes.append(Stay(each.model))
            elif each.residence is Residence.ASLEEP and each.waiting:
                need = self.sizes.needs(each.model)
                if not self.within or need <= free:
                    free -= need
                    changes.append(Wake(each.model))
            elif each.residence is Residence.AWAKE and not each.running:
                asked = self.rates.of(each.model).last
                if now - max(each.since, asked) >= self.idle:
                    changes.append(Sleep(each.model, "idle"))
        return changes


SYSTEMS = ("memory", "turns", "timers")


def unit_of(models: int, limit: int, slo: float, pool: int, folder: Path) -> SimUnit:
    """The fleet of `density.py` as `muxserve simulate` plays it."""
    checkpoint = tiny_checkpoint(layers=8, heads=16, kv_heads=4, seed=0, max_len=256)
    paths = {f"model-{n:02d}": checkpoint for n in range(models)}
    file = fleet_file(folder, "replay", paths, limit, 5.0, slo, POOL)
    places = places_of(file, None, None, None, None, latency_model(None), PlacementSearch())
    (unit,) = places.placed("muxserve").units(mode_of("muxserve"))
    residency = unit.residency
    assert residency is not None, "the fleet has a limit"
    rules = replace(residency.rules, kv=KvRules.of(pool))
    return replace(unit, residency=replace(residency, rules=rules))


def main() -> None:
    """Replay, and print a line per seed and system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second of all models together")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--slo", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--limit", type=parse_size, default=4 << 30)
    parser.add_argument("--pool", type=parse_size, default=KV_BYTES, help="most bytes that pages take, 1GiB at most")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--wake", type=float, help="seconds that a wake takes alone, in place of the expected ones")
    parser.add_argument("--drag", type=float, help="drag of wakes, in place of the expected one")
    parser.add_argument("--within", action="store_true", help="idle timers wait for memory")
    parser.add_argument("--no-room-ahead", action="store_true", help="no model sleeps before its memory is wanted")
    args = parser.parse_args()
    if args.no_room_ahead:
        room_ahead.RoomAhead.sleeps = lambda *_: []
    IdleTimers.within = args.within
    with tempfile.TemporaryDirectory(prefix="density-") as name:
        unit = unit_of(args.models, args.limit, args.slo, args.pool, Path(name))
    residency = unit.residency
    assert residency is not None, "the fleet has a limit"
    if args.wake is not None:
        wakes = {name: replace(each, seconds=args.wake) for name, each in residency.models.items()}
        residency = replace(residency, models=wakes)
    if args.drag is not None:
        residency = replace(residency, contention=replace(residency.contention, drag=args.drag))
    unit = replace(unit, residency=residency)
    of_one = next(iter(residency.models.values()))
    print(
        f"limit {format_size(residency.rules.limit)}, not of models {format_size(residency.rules.fixed)}, "
        f"a model {format_size(of_one.bytes)}, a wake {of_one.seconds:.2f} s alone, drag {residency.contention.drag:g}"
    )
    names = list(residency.models)
    latency = latency_model(None)
    met: dict[str, list[float]] = {}
    for seed in args.seeds:
        text = (
            f"bursty-groups:rate={args.rate},alpha=0,duration={args.seconds},prompt={PROMPT},output={args.tokens},"
            f"seed={seed}"
        )
        for system in SYSTEMS:
            contention = residency.contention
            way = replace(
                residency,
                turns=TurnRules(cores=residency.rules.wakes.cores) if system == "turns" else None,
                # Live, decoding gives way only where memory decides.
                contention=replace(contention, decode_weight=1.0) if system == "timers" else contention,
            )
            played = SimulatedUnit(replace(unit, residency=way), latency)
            if system == "timers":
                assert played.residents is not None
                played.residents.awake = IdleTimers(way.rules, way.models)
            load = [SimRequest.of(each, number) for number, each in enumerate(open_workload(text, names))]
            played.clock.run(iter(load), played.arrive, played.machine.overheads.request)
            result = played.result()
            told = result.residency
            assert told is not None, "residency is what is played"
            waits = [each.first_token - each.arrival for each in result.records if each.first_token is not None]
            attained = sum(each <= args.slo for each in waits) / len(result.records)
            paces = [each.tpot for each in result.records if each.tpot is not None]
            met.setdefault(system, []).append(attained)
            times = percentiles(waits)
            print(
                f"seed {seed} {system}: {attained:.1%} of {len(result.records)} within {args.slo:g} s; TTFT p50 "
                f"{times['p50']:.2f} s, p90 {times['p90']:.2f} s, p99 {times['p99']:.2f} s; then a token every "
                f"{1e3 * statistics.mean(paces):.0f} ms; {told.wakes} wakes, at most {format_size(told.peak_bytes)} "
                "(KV pool included)"
            )
    for system, each in met.items():
        print(f"{system}: {statistics.mean(each):.1%}, at worst {min(each):.1%}")


if __name__ == "__main__":
    main()
