"""Llumnix's evaluation in simulation (arXiv:2406.03243, sections 6.3 to 6.5): 16 instances of LLaMA-7B on A10.

    python benchmarks/paper/llumnix.py [--requests 10000] [--only PART,PART] [--rows NAME/NAME] [--missing] [--out FILE]

Parts: tails, priorities, scaling, thresholds. `tails` searches for a rate of each trace at which INFaaS++ queues for
tens of seconds at p99, as in the paper; the others take the rates that it found.

Every part prints a table; each row goes to the result file when it is done, so that `--missing` goes on where a run
was stopped. docs/replicas.md discusses them beside the paper's claims.
Step times come from the roofline of an A10: nothing here ran on one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from dispatch_policies import Freest, LoadAware
from inputs import DTYPE, llama
from report import machine, write_report

from muxserve.costs.roofline import Roofline
from muxserve.replicas.dispatch import FreestOfQueues
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.scaling import ScalingRules
from muxserve.simulator import FleetResult, Options, ReplicaRules, SimUnit, lone_unit, simulate
from muxserve.simulator.requests import SimRequest
from muxserve.workload import Arrivals, ModelLoad, TraceRequest, generate
from muxserve.workload.published import published
from placement.demand import Demand

ROOT = Path(__file__).resolve().parent.parent.parent
# The KV cache of LLaMA-7B on an A10 in the paper: 13,616 tokens, 851 blocks of 16 (section 6.1).
BLOCKS = 851
MODEL = Demand("llama-7b", llama("7b"), DTYPE, 256, 2560)
COSTS = Roofline()
INSTANCES = 16
# Prompts, answers, and the requests per second from which the rate is searched.
LENGTHS: dict[str, tuple[str, str, float]] = {
    "ShareGPT": ("sharegpt", "sharegpt", 12.2),
    "BurstGPT": ("burstgpt", "burstgpt", 13.4),
    "S-S": ("short", "short", 81.2),
    "M-M": ("medium", "medium", 12.0),
    "L-L": ("long", "long", 3.9),
    "S-L": ("short", "long", 5.7),
    "L-S": ("long", "short", 34.7),
}
SYSTEMS: dict[str, ReplicaRules] = {
    "infaas++": ReplicaRules(dispatch=lambda levels: LoadAware()),
    "llumnix": ReplicaRules(dispatch=lambda levels: Freest(), migration=MigrationRules()),
    # Dispatch counts whole queues, as Llumnix's release does; the rest is the same.
    "llumnix-queues": ReplicaRules(dispatch=FreestOfQueues, migration=MigrationRules()),
}
# What is not in the paper's comparison: either half of Llumnix alone.
OURS = "llumnix-queues"
PARTS: dict[str, ReplicaRules] = {
    "freeness, no migration": ReplicaRules(dispatch=lambda levels: Freest()),
    "infaas++ with migration": ReplicaRules(dispatch=lambda levels: LoadAware(), migration=MigrationRules()),
}
DISSECTED = ("ShareGPT", "M-M", "L-S")
Row = dict[str, Any]


def workload(prompt: str, output: str, rate: float, count: int, cv: float = 1.0, seed: int = 1) -> list[TraceRequest]:
    """The first `count` requests of those lengths at that rate."""
    load = ModelLoad(rate, published(prompt, "prompt"), published(output, "output"), Arrivals(cv))
    return list(itertools.islice(generate({"llama-7b": load}, 4 * count / rate, seed), count))


def replicas(count: int, first: int = 0) -> tuple[SimUnit, ...]:
    """So many of them: prompts go first, otherwise all decode, as in the vLLM of the paper."""
    numbers = range(first, first + count)
    return tuple(lone_unit(f"r{n:02d}", "A10", (n,), MODEL, BLOCKS, policy="rolling") for n in numbers)


def play(
    requests: Sequence[TraceRequest],
    rules: ReplicaRules,
    priorities: Callable[[int], tuple[str, str]] | None = None,
    instances: int = INSTANCES,
) -> tuple[FleetResult, Row]:
    """Simulate; the result, and the figures of all requests."""
    start = time.perf_counter()
    rules = replace(rules, spares=replicas(INSTANCES - instances, instances))
    options = Options(sample_seconds=0.0)
    result = simulate(replicas(instances), requests, COSTS, options, {MODEL.name: rules}, priorities)
    (together,) = result.replicas
    row = figures(result) | {
        "preemptions": sum(request.preemptions for request in result.requests),
        "migrations": together.migrations,
        "migrations_given_up": together.aborted,
        "downtime_ms": round(1e3 * sum(together.downtimes) / len(together.downtimes), 1)
        if together.downtimes
        else None,
        "average_instances": round(together.average, 3),
        "seconds_simulated": round(result.seconds, 1),
        "seconds_of_simulation": round(time.perf_counter() - start, 2),
    }
    return result, row


def figures(result: FleetResult, which: Callable[[SimRequest], bool] | None = None) -> Row:
    """Mean, p50 and p99, seconds rounded to a tenth of a millisecond, of `prefill` (time to first token), `decode`
    (mean time per token after it), `request` (arrival to last token) and `loss` (by preemptions), over the answered
    requests (that `which` takes): the terms of the paper's section 6.1."""
    done = [r for r in result.requests if r.finish is not None and (which is None or which(r))]
    times: dict[str, list[float]] = {"prefill": [], "decode": [], "request": [], "loss": []}
    for r in done:
        assert r.first_token is not None
        assert r.finish is not None
        times["prefill"].append(r.first_token - r.arrival)
        times["request"].append(r.finish - r.arrival)
        times["loss"].append(r.lost)
        if r.made > 1:
            times["decode"].append((r.finish - r.first_token) / (r.made - 1))
    return {name: spread(values) for name, values in times.items()}


def spread(values: Sequence[float]) -> Row:
    """Mean, p50 and p99; zeros of none."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    middle, tail = np.percentile(values, (50, 99))
    return {"mean": round(float(np.mean(values)), 4), "p50": round(float(middle), 4), "p99": round(float(tail), 4)}


def show(title: str, row: Row) -> None:
    """One line."""
    prefill, decode, request, loss = (row[name] for name in ("prefill", "decode", "request", "loss"))
    print(
        f"  {title:40s} prefill {prefill['mean']:7.2f} {prefill['p99']:7.2f} s   decode {decode['mean'] * 1e3:6.1f} "
        f"{decode['p99'] * 1e3:7.1f} ms   request {request['mean']:6.1f} {request['p99']:6.1f} s   "
        f"loss {loss['mean']:5.2f} {loss['p99']:6.2f} s",
        flush=True,
    )


def gain(other: Row, ours: Row) -> Row:
    """How many times longer the other's latencies are."""
    return {
        f"{name}_{key}": round(other[name][key] / ours[name][key], 2) if ours[name][key] else None
        for name in ("prefill", "decode", "request")
        for key in ("mean", "p99")
    }


def priorities(count: int, report: Row, missing: Callable[[str], bool]) -> Iterator[tuple[str, Row]]:
    """Section 6.4: a tenth of the requests is of high priority, arrivals come in ever larger clumps."""
    print("priorities: short-short, a tenth high")
    rng = random.Random(7)
    chosen = [rng.random() < 0.1 for _ in range(count)]
    for load, cv in itertools.product((0.7, 0.8), (2.0, 4.0, 6.0, 8.0)):
        rate = round(load * report["tails"]["S-S, Poisson"]["rate"], 1)
        name = f"{rate:g}/s, cv {cv:g}"
        if not missing(name):
            continue
        seeds: list[Row] = []
        for seed in range(1, SEEDS + 1):
            requests = workload("short", "short", rate, count, cv, seed)
            row: Row = {}
            for system, policies, level in (
                ("llumnix-base", OURS, "normal"),
                ("llumnix", OURS, "high"),
                ("to the letter", "llumnix", "high"),
            ):
                result, _ = play(
                    requests, SYSTEMS[policies], lambda n, level=level: (level, level) if chosen[n] else ("normal",) * 2
                )
                for group, wanted in (("high", True), ("normal", False)):
                    row[f"{system}, {group}"] = figures(
                        result, lambda r, wanted=wanted: chosen[int(r.request_id)] == wanted
                    )
                    show(f"{name}, {system}: {group}", row[f"{system}, {group}"])
            seeds.append(
                row
                | {
                    "high_faster": gain(row["llumnix-base, high"], row["llumnix, high"]),
                    "normal_slower": gain(row["llumnix, normal"], row["llumnix-base, normal"]),
                    "to_the_letter_high_faster": gain(row["llumnix-base, high"], row["to the letter, high"]),
                    "to_the_letter_normal_slower": gain(row["to the letter, normal"], row["llumnix-base, normal"]),
                }
            )
        means = {key: means_of([each[key] for each in seeds]) for key in seeds[0] if key.endswith(("faster", "slower"))}
        print(f"    {name}: {means}", flush=True)
        yield name, {"rate": rate, "cv": cv, "seeds": seeds} | means


def means_of(rows: Sequence[Row]) -> Row:
    """The mean of each figure over the seeds; None where one has none."""
    return {
        key: round(statistics.mean(each[key] for each in rows), 2) if all(each[key] for each in rows) else None
        for key in rows[0]
    }


def scaling(count: int, report: Row, missing: Callable[[str], bool]) -> Iterator[tuple[str, Row]]:
    """Section 6.5: instances come and go; what a latency costs, by the thresholds of scaling."""
    print("scaling: long-long")
    for kind, part, cv in (("Poisson", 0.6, 1.0), ("gamma", 0.5, 4.0)):
        if not missing(kind):
            continue
        rate = round(part * report["tails"][trace_name("L-L", cv)]["rate"], 2)
        requests = workload("long", "long", rate, count, cv)
        curves: dict[str, list[Row]] = {}
        for system in ("infaas++", OURS):
            curves[system] = []
            for low in (40.0, 80.0, 160.0, 320.0, 640.0):
                rules = ScalingRules(1, INSTANCES, low=low, high=6 * low)
                _, row = play(requests, replace(SYSTEMS[system], scaling=rules), instances=4)
                curves[system].append({"low": low, "high": 6 * low} | row)
                show(f"{kind} {low:4.0f} {system}, {row['average_instances']:5.2f} instances", row)
        row = {"rate": rate, "cv": cv, "curves": curves} | savings(curves["infaas++"], curves[OURS])
        for name, points in row["saved"].items():
            print(f"  {kind}, saved at equal p99 {name}: {[point['saved'] for point in points]}")
        yield kind, row


def savings(theirs: Sequence[Row], ours: Sequence[Row]) -> Row:
    """For each point of theirs and each p99: the fewest instances with which ours has at most that p99, less than
    theirs by which part. Points that none of ours reaches are left out."""
    found: Row = {}
    for name in ("prefill", "decode", "request"):
        found[name] = []
        for row in theirs:
            wanted = row[name]["p99"]
            enough = [each["average_instances"] for each in ours if each[name]["p99"] <= wanted]
            if enough:
                saved = round(1 - min(enough) / row["average_instances"], 3)
                found[name].append({"p99": wanted, "instances": row["average_instances"], "saved": saved})
    return {"saved": found}


def thresholds(count: int, report: Row, missing: Callable[[str], bool]) -> Iterator[tuple[str, Row]]:
    """What the two thresholds of migration, the length of a round and the number in flight do."""
    print("thresholds of migration")
    for name in ("ShareGPT", "M-M"):
        if not missing(name):
            continue
        prompt, output, _ = LENGTHS[name]
        requests = workload(prompt, output, report["tails"][trace_name(name, 1.0)]["rate"], count)
        variants = {
            **{
                f"below {below:g} to above {above:g}": replace(SYSTEMS[OURS], migration=MigrationRules(below, above))
                for below, above in ((0, 0), (16, 32), (48, 48), (48, 96), (48, 384), (160, 320), (480, 960))
            },
            "4 in flight": replace(SYSTEMS[OURS], migration=MigrationRules(in_flight=4)),
            "rounds of 1 s": replace(SYSTEMS[OURS], tick=1.0),
            "reports of 1 s": replace(SYSTEMS[OURS], stale=1.0),
        }
        rows: Row = {}
        for variant, options in variants.items():
            _, rows[variant] = play(requests, options)
            show(f"{name}, {variant}", rows[variant])
        yield name, rows


# Seconds of p99 prefill under INFaaS++: the rates of the paper are those where its requests queue for tens of seconds.
QUEUED = (20.0, 60.0)
SEEDS = 3


def trace_name(lengths: str, cv: float) -> str:
    """As the result file has it."""
    return f"{lengths}, {'Poisson' if cv == 1.0 else f'gamma cv {cv:g}'}"


def queueing_rate(prompt: str, output: str, start: float, count: int, cv: float) -> float:
    """A rate at which INFaaS++ has a p99 of prefill within `QUEUED`, in the median of the seeds, or the nearest one
    above: in steps of 6 % from `start`, then halved between two steps."""
    known: dict[float, float] = {}

    def p99(rate: float) -> float:
        if rate in known:
            return known[rate]
        found = []
        for seed in range(1, SEEDS + 1):
            _, row = play(workload(prompt, output, rate, count, cv, seed), SYSTEMS["infaas++"])
            show(f"search, {rate:.2f}/s, seed {seed}", row)
            found.append(float(row["prefill"]["p99"]))
        known[rate] = statistics.median(found)
        return known[rate]

    low = high = start
    if p99(start) < QUEUED[0]:
        while p99(high) < QUEUED[0]:
            low, high = high, round(high * 1.06, 2)
    else:
        while p99(low) > QUEUED[1]:
            low, high = round(low / 1.06, 2), low
    for _ in range(4):
        within = [rate for rate, seconds in known.items() if QUEUED[0] <= seconds <= QUEUED[1]]
        if within:
            return within[0]
        middle = round((low + high) / 2, 2)
        low, high = (middle, high) if p99(middle) < QUEUED[0] else (low, middle)
    return high


def tails(count: int, report: Row, missing: Callable[[str], bool]) -> Iterator[tuple[str, Row]]:
    """Section 6.3 by its own rule: each trace at a rate at which INFaaS++ queues for tens of seconds at p99; several
    seeds, gains of each."""
    print(f"tails: INFaaS++ has a p99 of prefill of {QUEUED[0]:g} to {QUEUED[1]:g} s in the median of {SEEDS} seeds")
    for (name, (prompt, output, start)), cv in itertools.product(LENGTHS.items(), (1.0, 4.0)):
        trace = trace_name(name, cv)
        if not missing(trace):
            continue
        rate = queueing_rate(prompt, output, start, count, cv)
        seeds: list[Row] = []
        for seed in range(1, SEEDS + 1):
            requests = workload(prompt, output, rate, count, cv, seed)
            wanted = SYSTEMS | (PARTS if cv == 1.0 and name in DISSECTED else {})
            systems = {system: play(requests, rules)[1] for system, rules in wanted.items()}
            for system, row in systems.items():
                show(f"{trace}, {rate:g}/s, seed {seed}, {system}"[-40:], row)
            gains = {each: gain(systems["infaas++"], row) for each, row in systems.items() if each != "infaas++"}
            seeds.append({"seed": seed, "systems": systems, "gains": gains})
        means = {each: means_of([seed["gains"][each] for seed in seeds]) for each in seeds[0]["gains"]}
        print(f"  {trace}, {rate:g}/s: mean gains of {OURS} over infaas++ {means[OURS]}", flush=True)
        yield trace, {"rate": rate, "requests": count, "seeds": seeds, "mean_gains": means}


# Each takes the number of requests, what was found so far, and which rows are to be found.
PARTS_OF_IT: dict[str, Callable[[int, Row, Callable[[str], bool]], Iterator[tuple[str, Row]]]] = {
    "tails": tails,
    "priorities": priorities,
    "scaling": scaling,
    "thresholds": thresholds,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="requests of a run")
    parser.add_argument("--only", default=",".join(PARTS_OF_IT))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "paper_llumnix.json")
    parser.add_argument("--rows", default="", help='only these rows, with slashes, e.g. "M-M, Poisson/L-L, Poisson"')
    parser.add_argument("--missing", action="store_true", help="only rows that the result file has not yet")
    args = parser.parse_args()
    # Parts and rows that are not run keep their figures.
    report: Row = json.loads(args.out.read_text()) if args.out.exists() else {}
    report |= {
        "machine": machine(),
        "costs": "roofline of an A10, float16",
        "requests": args.requests,
        "capacity_tokens": BLOCKS * 16,
    }
    for part in args.only.split(","):
        rows: Row = report.setdefault(part, {})

        def wanted(row: str, rows: Row = rows) -> bool:
            return not (args.missing and row in rows) and (not args.rows or row in args.rows.split("/"))

        for name, row in PARTS_OF_IT[part](args.requests, report, wanted):
            rows[name] = row
            write_report(args.out, report)


if __name__ == "__main__":
    main()
