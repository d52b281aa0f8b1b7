"""MuxServe's evaluation in simulation: Figures 5, 8, 9, 10 and 11 of arXiv:2404.02015.

    MUXSERVE_A100_PROFILE=... python benchmarks/paper/evaluation.py [--quick] [--out FILE]

Every figure prints a table beside the paper's claim; all numbers go to the result file, plots to a page beside it.
`docs/paper.md` discusses them. With --quick, fewer points.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import round_robin  # noqa: F401 - adds the mode
from memory_greedy import plan_memory_greedy
from report import machine, write_report
from scenarios import Scenario, authors_spatial, by_hand, costs, figures, place, run, synthetic

from muxserve.costs import LatencyModel
from muxserve.simulator import SimulationError
from placement.planner import ClusterPlan, ModeName

ROOT = Path(__file__).resolve().parent.parent.parent
# The paper's three; in `one` colocated models have one engine each, and no lease is withheld.
SYSTEMS: tuple[ModeName, ...] = ("muxserve", "spatial", "temporal", "one")
# How placements are served that no mode of the simulator belongs to.
SERVED = {"one": "free"}
ALPHAS = (0.7, 0.9, 1.3, 1.7, 2.1)
# Requests per second of the most popular model.
HIGHEST = (20.0, 40.0, 60.0, 80.0)
FIGURES = ("5", "baselines", "8", "9", "10")
Row = dict[str, Any]


def measured(scenario: Scenario, system: ModeName, latency: LatencyModel) -> Row:
    """Place and simulate."""
    return served(scenario, place(scenario, system, latency), SERVED.get(system, system), latency)


def served(scenario: Scenario, plan: ClusterPlan, mode: str, latency: LatencyModel) -> Row:
    """Simulate a plan."""
    try:
        row = figures(run(scenario, plan.placement, mode, latency))
    except SimulationError as error:
        row = {"error": str(error)}
    row["estimated_throughput"] = round(plan.weighted_throughput, 4)
    row["unplaced"] = sorted(plan.missing)
    return row


def show(name: str, rows: dict[str, Row]) -> None:
    """One line per system."""
    for system, row in rows.items():
        if "error" in row:
            print(f"  {name:28s} {system:14s} {row['error']}", flush=True)
            continue
        print(
            f"  {name:28s} {system:14s} throughput {row['throughput']:7.2f}   SLO x8 {row['slo_attainment']:5.1%}   "
            f"p99 per token {row['p99_latency_per_token'] * 1e3:6.0f} ms   TTFT {row['p99_ttft']:7.2f} s   "
            f"TPOT {row['p99_tpot'] * 1e3:5.0f} ms",
            flush=True,
        )


def figure5(latency: LatencyModel, quick: bool) -> Row:
    """19 models on 32 GPUs, popularity and rates varied; Figure 11's p99 latencies are in the same rows."""
    print("Figures 5 and 11: 19 models, 32 GPUs (the paper: up to 1.8x the throughput, 2.9x the requests at 99 % SLO)")
    points: Row = {}
    alphas, highest = (ALPHAS[1::2], HIGHEST[1::2]) if quick else (ALPHAS, HIGHEST)
    for alpha, top in itertools.product(alphas, highest):
        name = f"alpha {alpha}, rate {top:g}"
        points[name] = {system: measured(synthetic(alpha, top), system, latency) for system in SYSTEMS}
        show(name, points[name])
    within = {}
    for alpha in alphas:
        within[str(alpha)] = {
            system: most_within_slo(lambda top, a=alpha: synthetic(a, top, seconds=30.0), system, latency, quick)
            for system in SYSTEMS
        }
        print(f"  alpha {alpha}: highest rate at 99 % SLO (x8): {within[str(alpha)]}", flush=True)
    return {"points": points, "highest_rate_at_99_percent_slo": within}


def baselines(latency: LatencyModel) -> Row:
    """Figure 5's throughput over two spatial baselines: placed as well as our planner can, and by the authors' rule."""
    print("Figure 5 over two spatial baselines (the paper: up to 1.8x the throughput)")
    rows: Row = {}
    for alpha, top in itertools.product(ALPHAS, HIGHEST[::3]):
        scenario = synthetic(alpha, top)
        row = {system: measured(scenario, system, latency) for system in SYSTEMS[:2]}
        row["authors' spatial"] = figures(run(scenario, authors_spatial(scenario), "spatial", latency))
        mux = row["muxserve"]["throughput"]
        row["gains"] = {each: round(mux / row[each]["throughput"], 2) for each in ("spatial", "authors' spatial")}
        name = f"alpha {alpha}, rate {top:g}"
        rows[name] = row
        print(
            f"  {name}: {mux:.1f}, " + ", ".join(f"{gain}x of {each}" for each, gain in row["gains"].items()),
            flush=True,
        )
    return rows


def most_within_slo(
    scenario: Callable[[float], Scenario], system: ModeName, latency: LatencyModel, quick: bool
) -> float:
    """The highest rate of the most popular model at which 99 % of the requests end within 8 times the latency alone."""

    def good(top: float) -> bool:
        row = measured(scenario(top), system, latency)
        return "error" not in row and not row["unplaced"] and row["slo_attainment"] >= 0.99

    low, high = 0.0, 10.0
    while good(high) and high < 640:
        low, high = high, high * 2
    for _ in range(2 if quick else 4):
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def figure8(latency: LatencyModel) -> Row:
    """Placement: ours against memory-greedy, served by the same policy."""
    print("Figure 8: placement (the paper: up to 1.3x of memory-greedy's throughput)")
    fleets = {
        "8 GPUs, 4 models": Scenario(
            {"13b-0": "13b", "7b-1": "7b", "7b-2": "7b", "30b-3": "30b"},
            {"13b-0": 24.0, "7b-1": 24.0, "7b-2": 4.0, "30b-3": 4.0},
            (8,),
        ),
        "16 GPUs, 7 models": Scenario(
            {"7b-0": "7b", "13b-1": "13b", "30b-2": "30b", "7b-3": "7b", "7b-4": "7b", "13b-5": "13b", "30b-6": "30b"},
            {
                "7b-0": 36.0,
                "13b-1": 24.0,
                "30b-2": 12.0,
                "7b-3": 4.0,
                "7b-4": 4.0,
                "13b-5": 4.0,
                "30b-6": 2.0,
            },
            (8, 8),
        ),
    }
    rows: Row = {}
    for name, scenario in fleets.items():
        rows[name] = {
            "muxserve": measured(scenario, "muxserve", latency),
            "memory-greedy": served(
                scenario, plan_memory_greedy(scenario.demands, scenario.cluster, latency), "muxserve", latency
            ),
        }
        show(name, rows[name])
    return rows


def figure9(latency: LatencyModel) -> Row:
    """ADBS against FCFS and round-robin on given units: requests of one model longer than those of the others, around
    ShareGPT's mean lengths, and only ADBS sets quotas, as in the authors' system. With half of the KV memory too."""
    print("Figure 9: policies (the paper: ADBS 1.43x of round-robin, 1.85x of FCFS)")
    units = {
        "30B, 13B, 7B at 2:8:8, lengths 2:1:1": (
            ("30b", "13b", "7b"),
            (2.0, 8.0, 8.0),
            4,
            ((0.5, 0.4), (0.5, 0.3), (0.5, 0.2)),
            (1.5, 0.75, 0.75),
        ),
        "65B, 30B at 1:8, lengths 4:1": (("65b", "30b"), (1.0, 8.0), 4, ((0.5, 0.3), (0.5, 0.4)), (1.6, 0.4)),
    }
    systems = {
        "adbs": ("muxserve", True),
        "slack": ("slack", True),
        "round-robin": ("round-robin", False),
        "round-robin with quotas": ("round-robin", True),
        "fcfs": ("fcfs", False),
    }
    rows: Row = {}
    for (name, (sizes, rates, gpus, shares, longer)), memory, load in itertools.product(
        units.items(), (1.0, 0.5), (1.0, 2.0, 3.0)
    ):
        scenario, placement = by_hand(sizes, [rate * load for rate in rates], gpus, shares)
        scenario = replace(scenario, longer=dict(zip(scenario.sizes, longer, strict=True)))
        halved = tuple(replace(unit, kv_bytes=int(unit.kv_bytes * memory)) for unit in placement.units)
        key = f"{name}, load x{load:g}" + (", half the memory" if memory < 1.0 else "")
        rows[key] = {}
        for system, (mode, quotas) in systems.items():
            try:
                done = run(scenario, replace(placement, units=halved), mode, latency, quotas)
                rows[key][system] = figures(done) | {"preemptions": done.overall.preemptions}
            except SimulationError as error:
                rows[key][system] = {"error": str(error)}
        show(key, rows[key])
    return rows


def figure10(latency: LatencyModel, quick: bool) -> Row:
    """What each part of the resource manager brings: 4 models, 4 GPUs."""
    print("Figure 10: without a part (the paper: managing compute 1.7x, unified KV 1.2x more throughput and 3.6x SLO)")
    sizes = {"7b-0": "7b", "7b-1": "7b", "13b-2": "13b", "13b-3": "13b"}
    rows: Row = {}
    for alpha in (0.7, 1.3) if quick else (0.7, 0.9, 1.3, 1.7, 2.1):
        weights = {name: (rank + 1) ** -alpha for rank, name in enumerate(sizes)}
        rates = {name: 24.0 * weight for name, weight in weights.items()}
        scenario = Scenario(sizes, rates, (4,))
        plan = place(scenario, "muxserve", latency)
        key = f"alpha {alpha}"
        rows[key] = {}
        for mode in ("muxserve", "no-unified-kv", "no-sm", "no-split", "fcfs"):
            try:
                rows[key][mode] = figures(run(scenario, plan.placement, mode, latency))
            except SimulationError as error:
                rows[key][mode] = {"error": str(error)}
        show(key, rows[key])
    return rows


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description="MuxServe's evaluation in simulation.")
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=[*FIGURES])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/paper_evaluation.json")
    options = parser.parse_args()
    latency, source = costs()
    print(source)
    report: Row = {"machine": machine(), "costs": source}
    if options.out.exists():
        # What is not run now stays as it was found.
        report |= {
            f"figure {n}": row for n in FIGURES if (row := json.loads(options.out.read_text()).get(f"figure {n}"))
        }
    runs: dict[str, Callable[[], Row]] = {
        "5": lambda: figure5(latency, options.quick),
        "baselines": lambda: baselines(latency),
        "8": lambda: figure8(latency),
        "9": lambda: figure9(latency),
        "10": lambda: figure10(latency, options.quick),
    }
    for name in options.figures:
        report[f"figure {name}"] = runs[name]()
    write_report(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
