"""The planner: how long it takes, how near to the best it comes, and how it compares with MuxServe's own.

    python benchmarks/placement.py                                      # speed, growth, gap
    python benchmarks/placement.py --muxserve DIR --profile llama.json  # and against a checkout of MuxServe

Fleets are LLaMA 7B to 65B in MuxServe's mix with power-law rates; costs are the roofline's. Times are CPU seconds of
one process on one core, estimator tables included.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import machine, percentile, write_report
from muxserve.costs.measured import latency_model
from muxserve.costs.roofline import Roofline
from muxserve.planning.demand.demands import equal_nodes, memory_of
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.planning.place.prediction import Trial, predict
from placement.candidates import Candidates
from placement.demand import Demand
from placement.engines import Engines
from placement.estimator import Estimator
from placement.greedy import greedy
from placement.improve import ImproveLimits, improve
from placement.meshes import Machines
from placement.objective import Objective
from placement.planner import PlanOptions, plan_cluster
from placement.values import Values
from tests.support.exact_placement import exact

DEVICE = "A100-80GB"
SIZES = [(4, 8), (8, 16), (16, 32), (32, 64), (64, 128), (64, 256), (128, 512), (200, 1024)]
RESULTS = Path(__file__).parent / "results"


def fleet(models: int, rate: float, seed: int, alpha: float, prompt: int = 161, output: int = 338) -> list[Demand]:
    """`models` LLaMAs, 12:4:2:1 of 7B, 13B, 30B and 65B, with power-law rates of `rate` requests/s on average."""
    rng = random.Random(seed)
    names = rng.choices(["llama-7b", "llama-13b", "llama-30b", "llama-65b"], weights=[12, 4, 2, 1], k=models)
    weights = [(i + 1) ** -alpha for i in range(models)]
    rng.shuffle(weights)
    scale = rate * models / sum(weights)
    return [
        Demand(
            f"m{i}",
            planned_architecture(name, Path(".")),
            "float16",
            rate=weight * scale,
            prompt_tokens=prompt,
            output_tokens=output,
        )
        for i, (name, weight) in enumerate(zip(names, weights, strict=True))
    ]


def values_of(demands: list[Demand], gpus: int) -> tuple[Values, Machines]:
    cluster = equal_nodes(gpus, DEVICE, 8)
    engines = Engines(demands, Roofline(), memory_of(cluster))
    return Values(Estimator(Candidates(engines)), Objective()), Machines(cluster)


def until(seconds: float) -> Callable[[], bool]:
    end = time.process_time() + seconds
    return lambda: time.process_time() >= end


def measure(models: int, gpus: int, rate: float, seed: int, seconds: float) -> dict[str, object]:
    """One fleet: greedy, then the local search for at most `seconds`."""
    demands = fleet(models, rate, seed, 0.9)
    began = time.process_time()
    values, machines = values_of(demands, gpus)
    first = greedy(values, machines)
    placed = time.process_time()
    units = values.evaluations
    better = improve(first, ImproveLimits(), until(seconds))
    done = time.process_time()
    row: dict[str, object] = {
        "models": models,
        "gpus": gpus,
        "rate": round(sum(d.rate for d in demands), 2),
        "greedy_seconds": round(placed - began, 3),
        "total_seconds": round(done - began, 3),
        "greedy_value": round(first.value, 3),
        "value": round(better.value, 3),
        "devices_used": better.devices,
        "missing": len(better.missing),
        "greedy_evaluations": units,
        "evaluations": values.evaluations,
    }
    print(row, flush=True)
    return row


def growth(limit: float) -> list[dict[str, object]]:
    return [measure(models, gpus, 2.5 * gpus / models, 1, limit) for models, gpus in SIZES]


def small(repeats: int) -> dict[str, object]:
    """16 models on 32 GPUs, under several loads; the quickest of three runs each, since others use this machine."""
    rows = []
    for seed in range(repeats):
        rate = [1.0, 2.0, 3.0, 5.0, 8.0][seed % 5]
        runs = [measure(16, 32, rate, seed, 3.0) for _ in range(3)]
        rows.append(min(runs, key=lambda row: float(str(row["greedy_seconds"]))))
    greedy_times = [float(str(row["greedy_seconds"])) for row in rows]
    totals = [float(str(row["total_seconds"])) for row in rows]
    return {
        "target_seconds": 0.3,
        "greedy_seconds_median": percentile(greedy_times, 0.5),
        "greedy_seconds_max": max(greedy_times),
        "with_local_search_seconds_median": percentile(totals, 0.5),
        "with_local_search_seconds_max": max(totals),
        "runs": rows,
    }


def gaps(count: int) -> dict[str, object]:
    """Random fleets of 2 to 6 models on 8 GPUs, against the optimum."""
    rows = []
    for seed in range(count):
        rng = random.Random(seed)
        demands = fleet(rng.randint(2, 6), rng.uniform(0.5, 12.0), seed, rng.choice([0.7, 0.9, 1.3, 1.7, 2.1]))
        values, machines = values_of(demands, 8)
        first = greedy(values, machines)
        began = time.process_time()
        better = improve(first, ImproveLimits())
        searched = time.process_time() - began
        best = exact(values, machines)
        row = {
            "seed": seed,
            "models": len(demands),
            "rate": round(sum(d.rate for d in demands), 2),
            "optimum": round(best.layout.value, 4),
            "proven": best.proven,
            "columns": best.columns,
            "greedy_gap": round(best.gap(first), 5),
            "gap": round(best.gap(better), 5),
            "search_seconds": round(searched, 3),
        }
        print(row, flush=True)
        rows.append(row)
    both = {}
    for key in ("greedy_gap", "gap"):
        found = [float(str(row[key])) for row in rows]
        both[key] = {
            "mean": round(sum(found) / len(found), 5),
            "p50": percentile(found, 0.5),
            "p90": percentile(found, 0.9),
            "max": max(found),
            "within_2_percent": sum(gap <= 0.02 for gap in found),
        }
    return {"fleets": count, "proven": sum(bool(row["proven"]) for row in rows), **both, "runs": rows}


def estimates() -> dict[str, object]:
    """Estimated against simulated throughput (Poisson arrivals, log-normal lengths, two minutes), 6 models, 8 GPUs."""
    latency, cluster = Roofline(), equal_nodes(8, DEVICE, 8)
    rows = []
    for rate in (1.0, 3.0, 6.0, 12.0):
        for seed in range(4):
            demands = fleet(6, rate, seed, 1.3)
            options = PlanOptions(local=ImproveLimits(kicks=10))
            plan = plan_cluster(demands, cluster, latency, memory_of(cluster), options)
            prediction = predict(plan, latency, Trial(120.0))
            simulated = prediction.rate
            error = plan.throughput / simulated - 1.0
            row = {
                "seed": seed,
                "asked": round(plan.asked, 2),
                "estimated": round(plan.throughput, 2),
                "simulated": round(simulated, 2),
                "relative_error": round(error, 4),
            }
            print(row, flush=True)
            rows.append(row)
    errors = [abs(float(str(row["relative_error"]))) for row in rows]
    return {"median": percentile(errors, 0.5), "p90": percentile(errors, 0.9), "max": max(errors), "runs": rows}


def against_muxserve(checkout: Path, profile: Path) -> dict[str, object]:
    """16 models on 32 GPUs: its planner and ours, by its objective under its rules and its costs."""
    from benchmarks.muxserve_planner import OUTPUT, PROMPT, Original, OriginalValues, load

    module = load(checkout)
    latency = latency_model(profile)
    rows = []
    for alpha, rate in ((0.7, 2.0), (0.9, 2.0), (1.3, 2.0), (1.7, 2.0), (2.1, 2.0), (0.9, 5.0), (2.1, 5.0)):
        demands = fleet(16, rate, int(10 * alpha + rate), alpha, PROMPT, OUTPUT)
        original = Original(module, profile, demands, nodes=4)
        theirs, their_seconds, _ = original.plan()
        cluster = equal_nodes(32, DEVICE, 8)
        machines = Machines(cluster)
        engines = Engines(demands, latency, memory_of(cluster))
        values = OriginalValues(Estimator(Candidates(engines)), original)
        first = greedy(values, machines)
        better = improve(first, ImproveLimits(kicks=20, evaluations=1500))
        began = time.process_time()
        own = Values(Estimator(Candidates(Engines(demands, latency, memory_of(cluster)))), Objective())
        greedy(own, machines)
        row = {
            "alpha": alpha,
            "mean_rate": rate,
            "muxserve_value": round(float(theirs), 4),
            "muxserve_seconds": round(their_seconds, 2),
            "greedy_value": round(first.value, 4) if not first.missing else None,
            "value": round(better.value, 4),
            "missing": len(better.missing),
            "own_estimator_greedy_seconds": round(time.process_time() - began, 3),
        }
        print(row, flush=True)
        rows.append(row)
    worse = [row for row in rows if float(str(row["value"])) < float(str(row["muxserve_value"])) - 1e-3]
    return {"never_worse": not worse, "runs": rows}


def plot(rows: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    x = [int(str(row["gpus"])) for row in rows]
    for key, label in (("greedy_seconds", "greedy"), ("total_seconds", "greedy and local search")):
        axes.plot(x, [float(str(row[key])) for row in rows], marker="o", label=label)
    for row, gpus in zip(rows, x, strict=True):
        axes.annotate(
            f"{row['models']}", (gpus, float(str(row["greedy_seconds"]))), xytext=(4, -12), textcoords="offset points"
        )
    axes.axhline(60, linestyle=":", color="grey")
    axes.set(xscale="log", yscale="log", xlabel="GPUs (number at a point: models)", ylabel="CPU seconds, one core")
    axes.set_xticks(x, [str(gpus) for gpus in x])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muxserve", type=Path, help="a checkout of MuxServe")
    parser.add_argument("--profile", type=Path, help="step times (examples/placement/llama.json)")
    parser.add_argument("--fleets", type=int, default=50, help="random fleets for the gap")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of local search for each size")
    parser.add_argument("--sections", nargs="+", help="measure only these: small growth gap estimates muxserve")
    parser.add_argument("--output", type=Path, default=RESULTS / "placement.json")
    arguments = parser.parse_args()
    report: dict[str, object] = {}
    if arguments.sections is not None and arguments.output.exists():
        # What is not measured anew stays.
        report = json.loads(arguments.output.read_text())
        del report["command"]
    wanted = arguments.sections or ["small", "growth", "gap", "estimates", "muxserve"]
    report["machine"] = machine()
    if "small" in wanted:
        report["small"] = small(5)
    if "growth" in wanted:
        report["growth"] = rows = growth(arguments.seconds)
        plot(rows, arguments.output.with_suffix(".png"))
    if "gap" in wanted:
        report["gap"] = gaps(arguments.fleets)
    if "estimates" in wanted:
        report["estimates"] = estimates()
    if "muxserve" in wanted and arguments.muxserve is not None and arguments.profile is not None:
        report["muxserve"] = against_muxserve(arguments.muxserve, arguments.profile)
    write_report(arguments.output, report)


if __name__ == "__main__":
    main()
