"""Every policy on every scenario, with both shapes of engines, in simulation on A100-80GB: throughput, and how many
requests keep their SLO.

    python benchmarks/policies.py [--scenarios NAME ...] [--seeds 3 4 5] [--fixed]
                                  [--steps 4] [--out FILE]

A scenario is a unit, given, and a load on it, which is offered at several levels; figures are means over the seeds. The
SLO is 8 times the latency of the request alone, on the fewest GPUs that hold its model (as in MuxServe's evaluation).
Throughput is MuxServe's, each model over its own span, weighted by rates. The constants of `slack` were chosen on seeds
0 to 2 of the scenarios of `_chosen_on`; other seeds, and the scenarios of `_held_out`, had no part in it.

Models have two engines, of prefill and of decode, or in the columns `one` one engine of both phases, with an equal part
of the unit as its planned share; of four ways to plan it that one was best on seed 0 of the scenarios of `_chosen_on`.
docs/scheduling.md discusses the table. `PREDICTION` was written before the first run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent / "paper"))

from inputs import DTYPE, fleet_model, placed_unit
from msgspec import structs
from report import machine, write_report

from muxserve.costs.roofline import Roofline
from muxserve.metrics.summary import summarise
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.scheduling.types import ModelProfile
from muxserve.simulator import AloneSimulation, Mode, SimUnit, mode_of, simulate, units_of
from muxserve.workload import Arrivals, LogNormalLengths, ModelLoad, TraceRequest, generate
from placement.cluster import Cluster, Node, PlacedUnit, Placement
from placement.demand import Demand

ROOT = Path(__file__).resolve().parent.parent
ALONE_ON = {"7b": 1, "8b": 1, "13b": 1, "30b": 2, "65b": 4, "70b": 4}
PREDICTION = (
    "One engine per model: under free and slack within 3 % of two engines in throughput, with 1 to 3 points more "
    "requests within 4 times alone at light and busy loads, since a prompt in the step of the sequences reads the "
    "weights once; under adbs behind all others, as a prompt has one planned share and no precedence. free: most "
    "throughput with either shape where nothing contends, but behind slack in requests within 4 times alone "
    "wherever engines beside each other slow each other down. Loser: adbs with one engine."
)


@dataclass(frozen=True)
class Way:
    """A policy with engines of a shape: two of each model, or `one`."""

    mode: Mode
    one: bool = False


WAYS = {name: Way(mode_of(name)) for name in ("slack", "adbs", "free", "fcfs")} | {
    f"{name}, one": Way(mode_of(name), one=True) for name in ("slack", "adbs", "free")
}
SLO_SCALES = (2.0, 4.0, 8.0)
LONGEST = 4096
Row = dict[str, float]


@dataclass(frozen=True)
class Served:
    """One model: its size, requests per second, mean lengths in tokens, and how its arrivals are spread (cv)."""

    size: str
    rate: float
    prompt: int = 161
    output: int = 338
    cv: float = 1.0
    prefill_share: float = 0.5
    decode_share: float = 0.3


@dataclass(frozen=True)
class Scenario:
    """Models on one unit of `gpus`. `memory` is the part of the KV memory that is there. After half of the time the
    rates are those of `later`, if there are any; nobody has told the unit of that."""

    models: Sequence[Served]
    gpus: int
    seconds: float = 40.0
    memory: float = 1.0
    later: Sequence[float] = ()

    def times(self, factor: float) -> Scenario:
        """The same with so many times the requests."""
        models = [replace(model, rate=model.rate * factor) for model in self.models]
        return replace(self, models=models, later=[rate * factor for rate in self.later])


def _scenarios() -> dict[str, Scenario]:
    return _chosen_on() | _held_out()


def _held_out() -> dict[str, Scenario]:
    """Scenarios on which no constant was chosen."""
    skewed = [Served("13b", 9.0), Served("13b", 3.0), Served("13b", 1.0, decode_share=0.2)]
    mixed = [Served("65b", 1.5), Served("13b", 10.0, decode_share=0.2), Served("7b", 20.0)]
    chat = Served("7b", 6.0, 200, 300)
    return {
        "three 13B, 9:3:1": Scenario(skewed, 2),
        "65B, 13B, 7B": Scenario(mixed, 8),
        "six 7B, bursts, tight": Scenario(
            [Served("7b", rate, cv=3.0, decode_share=0.2) for rate in (8.0, 8.0, 4.0, 4.0, 2.0, 2.0)], 4, memory=0.3
        ),
        "70B, 8B, 8B (GQA), shift": Scenario(
            [Served("70b", 2.0, 600, 250, decode_share=0.4), Served("8b", 20.0, 300, 200), Served("8b", 4.0, 300, 200)],
            4,
            later=[2.0, 4.0, 20.0],
        ),
        "summaries beside chat": Scenario([Served("13b", 2.0, 1800, 80), chat], 2),
        "one 13B, bursts": Scenario([Served("13b", 5.0, cv=4.0)], 1),
        "30B beside four 7B": Scenario(
            [Served("30b", 3.0, 400, 300), *(Served("7b", rate, decode_share=0.2) for rate in (8.0, 4.0, 2.0, 1.0))], 4
        ),
    }


def _chosen_on() -> dict[str, Scenario]:
    """Scenarios whose first seeds the constants of `slack` were chosen on."""

    def even(count: int, size: str, rate: float, **changes: object) -> list[Served]:
        return [Served(size, rate, **changes) for _ in range(count)]  # type: ignore[arg-type]

    two = Scenario(even(2, "7b", 5.0, decode_share=0.4), 1)
    three = Scenario(
        [Served("30b", 4.0, decode_share=0.4), Served("13b", 16.0), Served("7b", 16.0, decode_share=0.2)], 4
    )
    big = Scenario([Served("65b", 1.0), Served("30b", 8.0, decode_share=0.4)], 4)
    four = Scenario(even(4, "7b", 9.0), 4)
    eight = Scenario([Served("7b", 10.0 * 0.6**rank, decode_share=0.2) for rank in range(8)], 4)
    modern = Scenario([Served("70b", 3.0, 400, 300, decode_share=0.4), Served("8b", 20.0, 400, 200)], 4)
    long = Scenario([Served("7b", 1.6, 1500, 150), Served("13b", 1.0, 1500, 150)], 1)
    short = Scenario([Served("7b", 10.0, 300, 20), Served("7b", 4.0, 161, 250)], 1)
    one = Scenario([Served("7b", 8.0, 200, 250)], 1)
    made = {
        "one 7B": one,
        "two 7B, even": two,
        "two 7B, 1:8": replace(two, models=[Served("7b", 1.0, decode_share=0.4), Served("7b", 8.0, decode_share=0.4)]),
        "30B, 13B, 7B": three,
        "65B, 30B": big,
        "four 7B, even": four,
        "eight 7B, skewed": eight,
        "70B, 8B (GQA)": modern,
        "long prompts": long,
        "short answers": short,
        "bursts (cv 4)": replace(four, models=even(4, "7b", 7.0, cv=4.0)),
        "popularity shifts": replace(
            four, models=[Served("7b", rate) for rate in (24.0, 4.0, 2.0, 2.0)], later=[2.0, 2.0, 4.0, 24.0]
        ),
        "2:1:1 lengths": replace(
            three,
            models=[
                Served("30b", 3.0, 322, 676, decode_share=0.4),
                Served("13b", 12.0),
                Served("7b", 12.0, decode_share=0.2),
            ],
        ),
    }
    made["tight memory"] = replace(made["2:1:1 lengths"], memory=0.5)
    made["tight memory, shifts"] = replace(made["popularity shifts"], memory=0.25)
    return made


# Times the scenario's rates.
LOADS = {"light": 0.4, "busy": 0.8, "overload": 1.5}


def model_of(name: str, size: str) -> Demand:
    """A model as the simulator takes it."""
    if size in ("8b", "70b"):
        return Demand(name, planned_architecture(f"llama-3.1-{size}", ROOT), DTYPE, max_len=2 * LONGEST)
    return replace(fleet_model(name, size), max_len=2 * LONGEST)


def requests_of(scenario: Scenario, names: Sequence[str], seed: int) -> list[TraceRequest]:
    """The load."""

    def loads(rates: Sequence[float]) -> Mapping[str, ModelLoad]:
        return {
            name: ModelLoad(
                rate,
                LogNormalLengths(model.prompt / 1.377, 0.8, 1, min(4 * model.prompt, LONGEST - 600)),
                LogNormalLengths(model.output / 1.377, 0.8, 1, min(4 * model.output, LONGEST // 2)),
                Arrivals(model.cv),
            )
            for name, model, rate in zip(names, scenario.models, rates, strict=True)
        }

    rates = [model.rate for model in scenario.models]
    if not scenario.later:
        return list(generate(loads(rates), scenario.seconds, seed))
    half = scenario.seconds / 2
    first = list(generate(loads(rates), half, seed))
    return first + [
        structs.replace(r, arrival=r.arrival + half) for r in generate(loads(scenario.later), half, seed + 1)
    ]


def run(scenario: Scenario, way: Way, seed: int = 0, fixed: bool = False, steps: int = 0) -> Row:
    """Simulate the scenario in that way. `fixed`: engines cannot change their share from one lease to the next;
    `steps`: sizes of share that they have (0: any)."""
    latency = Roofline()
    names = [f"{model.size}-{rank}" for rank, model in enumerate(scenario.models)]
    models = {name: model_of(name, served.size) for name, served in zip(names, scenario.models, strict=True)}
    cluster = Cluster((Node("A100-80GB", max(scenario.gpus, *(ALONE_ON[m.size] for m in scenario.models))),))
    members = {
        name: (models[name], m.rate, m.prefill_share, m.decode_share)
        for name, m in zip(names, scenario.models, strict=True)
    }
    unit = placed_unit("unit0", 0, scenario.gpus, members)
    unit = replace(unit, kv_bytes=int(unit.kv_bytes * scenario.memory))
    lone = tuple(_alone(name, m.size, models[name]) for name, m in zip(names, scenario.models, strict=True))
    reference = AloneSimulation(units_of(Placement(cluster, lone), models, mode_of("spatial")), latency)
    units = units_of(Placement(cluster, (unit,)), models, way.mode, steps or None)
    units = [shaped(each, way.one, fixed) for each in units]
    result = simulate(units, requests_of(scenario, names, seed), latency)
    rates = {name: m.rate for name, m in zip(names, scenario.models, strict=True)}
    summary = summarise(result.records, rates=rates, reference=reference, slo_scales=SLO_SCALES)
    overall = summary.overall
    met = dict(zip(SLO_SCALES, overall.attainment["latency"], strict=True))
    assert overall.ttft is not None
    assert overall.tpot is not None
    assert overall.latency is not None
    figures = {
        "throughput": summary.weighted_throughput_own_span,
        "slo": met[8.0],
        "slo2": met[2.0],
        "slo4": met[4.0],
        "ttft_mean": overall.ttft.mean,
        "ttft_p99": overall.ttft.p99,
        "tpot_mean": overall.tpot.mean,
        "latency_mean": overall.latency.mean,
        "preemptions": overall.preemptions,
        "failed": overall.requests - overall.completed,
    }
    return {name: round(value, 4) for name, value in figures.items()}


def means(rows: Sequence[Row]) -> Row:
    """Means of the figures over the seeds."""
    return {name: round(fmean(row[name] for row in rows), 4) for name in rows[0]}


def shaped(unit: SimUnit, one: bool, fixed: bool) -> SimUnit:
    """The unit with one engine per model, or with engines whose share is `fixed`."""

    part = 1.0 / len(unit.models)

    def changed(profile: ModelProfile) -> ModelProfile:
        profile = profile.with_engines(elastic=False) if fixed else profile
        return profile.with_engines(both=True, prefill_share=part, decode_share=part) if one else profile

    return replace(unit, models=tuple(replace(model, profile=changed(model.profile)) for model in unit.models))


def _alone(name: str, size: str, model: Demand) -> PlacedUnit:
    return placed_unit(name, 0, ALONE_ON[size], {name: (model, 1.0, 1.0, 1.0)})


def table(rows: dict[str, dict[str, Row]]) -> dict[str, object]:
    """Print each point, and how the ways compare: throughput of the best one at a point is 1."""
    print(f"{'':32s}" + "".join(f"{name:>18s}" for name in WAYS))
    behind: dict[str, list[str]] = {name: [] for name in WAYS}
    logs: dict[str, list[float]] = {name: [] for name in WAYS}
    for point, row in rows.items():
        best = {key: max(row[name][key] for name in WAYS) for key in ("throughput", "slo")}
        cells = []
        for name in WAYS:
            ratio = row[name]["throughput"] / best["throughput"]
            logs[name].append(math.log(ratio))
            cells.append(f"{ratio:10.3f} {row[name]['slo']:6.1%}")
            if ratio < 0.99 or row[name]["slo"] < best["slo"] - 0.01:
                behind[name].append(point)
        print(f"{point:32s}" + "".join(f"{cell:>18s}" for cell in cells), flush=True)
    means = {name: round(math.exp(fmean(values)), 4) for name, values in logs.items()}
    figures = {key: _mean(rows, key) for key in ("slo", "slo4", "slo2", "tpot_mean", "ttft_mean")}
    print(f"throughput, mean: {means}")
    for key, values in figures.items():
        print(f"{key}, mean: {values}")
    print("more than 1 % behind the best: " + "; ".join(f"{name} {len(at)}" for name, at in behind.items()))
    return {"throughput": means, **figures, "behind": behind}


def _mean(rows: dict[str, dict[str, Row]], key: str) -> Row:
    return {name: round(fmean(row[name][key] for row in rows.values()), 4) for name in WAYS}


def main() -> int:
    """Run everything."""
    made = _scenarios()
    parser = argparse.ArgumentParser(description="Policies on scenarios, in simulation.")
    parser.add_argument("--scenarios", nargs="+", choices=list(made), default=list(made))
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to run; results of others stay in --out"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/policies.json")
    parser.add_argument("--steps", type=int, default=0, help="sizes of share that engines have, of equal steps; 0: any")
    parser.add_argument("--fixed", action="store_true", help="engines whose share is one for their life")
    options = parser.parse_args()
    report: dict[str, object] = {
        "machine": machine(),
        "costs": "roofline",
        "slo_scale": 8.0,
        "shares": "fixed" if options.fixed else "per lease",
        "share_steps": options.steps,
        "held_out": list(_held_out()),
        "prediction": PREDICTION,
    }
    points = [(f"{name}, {load}", name, load) for name in options.scenarios for load in options.loads]
    known = json.loads(options.out.read_text())["points"] if options.ways != [*WAYS] else {}
    done: dict[str, dict[str, list[Row]]] = {point: {way: [] for way in options.ways} for point, _, _ in points}
    for index, seed in enumerate(options.seeds):
        for point, name, load in points:
            scenario = made[name].times(LOADS[load])
            for column, rows in done[point].items():
                rows.append(run(scenario, WAYS[column], seed, options.fixed, options.steps))
        seeds = options.seeds[: index + 1]
        print(f"seeds {seeds}")
        found = {
            point: known.get(point, {}) | {column: means(rows) for column, rows in row.items()}
            for point, row in done.items()
        }
        write_report(options.out, report | {"seeds": seeds, "compared": table(found), "points": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
