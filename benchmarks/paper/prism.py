"""Prism's headline in simulation (arXiv:2505.04021): how many GPUs serve 58 models when not all of them are awake.

    python benchmarks/paper/prism.py [--quick] [--seeds 1 2 3] [--out FILE]

58 models of 1 to 70 billion parameters on 8 to 24 H100 under bursty groups; which are popular is drawn. About half of
the GPUs are in units of four, which have the models of 32B and 70B; each other GPU is a unit with some of the smaller
ones. Which models share a unit is the same in all ways to serve; every unit has one scheduler, one KV cache
and the policy `slack`:

- awake: all models of a unit are awake, as MuxServe's paper has it. What has no room is not served.
- residency: `muxserve.scheduling.residency`, which decides live, wakes models and puts them to sleep.
- turns: the same, and a busy model that has to go stops between two steps, and goes on later (Aegaeon, SOSP'25).
- one at a time: a unit has one model at a time, under the same policy (serverless systems that give a model the GPU).

Attainment is a first token within so many seconds of the arrival. `answers_in_time` are those whose last token was not
late either, at the pace that every model promises. docs/residency.md discusses the result.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from report import machine, percentiles, write_report

from muxserve.costs import ModelArchitecture
from muxserve.costs.calibration import host_bandwidth
from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.metrics.records import RequestRecord
from muxserve.scheduling.residency_types import ResidencyRules, WakeCosts
from muxserve.scheduling.turns import TurnRules
from muxserve.simulator import SimResidency, SimUnit, sim_unit, simulate
from muxserve.workload import open_workload
from placement.cluster import PlacedModel, PlacedUnit
from placement.demand import Demand
from placement.memory import MemoryRules, model_bytes

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE, DTYPE = "H100-80GB", "bfloat16"
# The part of a GPU's memory that is the KV cache where not all models are awake.
KV_PART = 0.15
SLOS = (1.0, 2.0, 3.0, 5.0, 10.0)
HEADLINE_SLO = 3.0
GPUS = (8, 10, 12, 14, 16, 20, 24)
WAYS = ("awake", "residency", "turns", "one at a time")
# What a wake takes besides its weights, seconds: measured on a CPU (docs/residency.md), where it has no CUDA context to
# create and no graphs to capture.
WAKE_SECONDS = 0.5
# A token within this time of the one before, seconds.
TPOT_SECONDS = 0.1
# Shapes from the models' config.json files: how many, layers, heads, KV heads, hidden, intermediate, vocabulary.
SHAPES = {
    "1b": (14, 16, 32, 8, 2048, 8192, 128256),
    "3b": (14, 28, 24, 8, 3072, 8192, 128256),
    "8b": (18, 32, 32, 8, 4096, 14336, 128256),
    "14b": (6, 48, 40, 8, 5120, 13824, 152064),
    "32b": (4, 64, 40, 8, 5120, 27648, 152064),
    "70b": (2, 80, 64, 8, 8192, 28672, 128256),
}
LARGE = ("32b", "70b")


def architecture(size: str) -> ModelArchitecture:
    """Llama 3.1 and 3.2 (1B, 3B, 8B, 70B) and Qwen 2.5 (14B, 32B)."""
    _, layers, heads, kv_heads, hidden, intermediate, vocab = SHAPES[size]
    return ModelArchitecture(
        name="LlamaForCausalLM",
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64 if size == "1b" else 128,
        hidden=hidden,
        intermediate=intermediate,
        vocab=vocab,
        max_len=4096,
        default_max_len=4096,
        dtype=DTYPE,
        tied_embeddings=size in ("1b", "3b"),
    )


def demand(name: str, rate: float) -> Demand:
    """The model of that name (`8b-03`) with its share of the load."""
    return Demand(
        name, architecture(name.split("-")[0]), rate=rate, dtype=DTYPE, max_num_seqs=128, slo_ttft=HEADLINE_SLO
    )


@dataclass(frozen=True)
class Mesh:
    """GPUs that serve these models together."""

    gpus: tuple[int, ...]
    models: tuple[Demand, ...]


def meshes(gpus: int, demands: Sequence[Demand]) -> list[Mesh]:
    """Units of four for the large models, single GPUs for the others. The largest first, each goes where the weights
    are fewest."""
    fours = max(1, gpus // 8)
    sizes = [4] * fours + [1] * (gpus - 4 * fours)
    there: list[list[Demand]] = [[] for _ in sizes]
    rules = MemoryRules()
    taken = [0] * len(sizes)
    order = sorted(demands, key=lambda each: -each.architecture.weight_bytes(DTYPE))
    for each in order:
        large = each.name.split("-")[0] in LARGE
        index = min((i for i, size in enumerate(sizes) if (size == 4) == large), key=lambda i: taken[i])
        there[index].append(each)
        taken[index] += model_bytes(each, sizes[index], rules)
    made, first = [], 0
    for size, models in zip(sizes, there, strict=True):
        made.append(Mesh(tuple(range(first, first + size)), tuple(models)))
        first += size
    return made


def unit(
    mesh: Mesh, way: str, fixed: float, objective: float, rules: MemoryRules | None = None
) -> tuple[SimUnit | None, list[str]]:
    """The mesh as it serves in that way; None if nothing fits. Also the models that have no room in it."""
    rules, tp = rules or MemoryRules(), len(mesh.gpus)
    whole = int(device(DEVICE).memory_bytes * rules.utilisation)
    needs = {each.name: model_bytes(each, tp, rules) for each in mesh.models}
    models, missing = list(mesh.models), []
    if way == "awake":
        # The largest go first until the rest leaves some memory for KV.
        models.sort(key=lambda each: needs[each.name])
        while models and sum(needs[each.name] for each in models) > 0.9 * whole:
            missing.append(models.pop().name)
        pool = whole - sum(needs[each.name] for each in models)
    elif way in ("residency", "turns"):
        pool = int(KV_PART * whole)
    else:
        pool = whole - max(needs.values())
    if not models:
        return None, missing
    fleet = fleet_of(models)
    placed = tuple(PlacedModel(each.name, each.rate, 0.5, 0.5) for each in models)
    made = sim_unit(PlacedUnit(f"unit{mesh.gpus[0]}", DEVICE, mesh.gpus, placed, pool, policy="slack"), fleet)
    if way == "awake":
        return made, missing
    costs = {
        each.name: WakeCosts(
            bytes=whole - pool if way == "one at a time" else needs[each.name],
            # Each GPU of a unit has a link of its own.
            seconds=fixed + each.architecture.weight_bytes(DTYPE) / tp / host_bandwidth(DEVICE),
            ttft=objective,
            tpot=TPOT_SECONDS,
        )
        for each in models
    }
    rules_awake = ResidencyRules(whole, min_residence=0.5, residence_factor=2.0, fixed=pool)
    turns = TurnRules() if way == "turns" else None
    return replace(made, residency=SimResidency(rules_awake, costs, turns=turns)), missing


def fleet_of(models: Sequence[Demand]) -> dict[str, Demand]:
    """What the simulator knows of them."""
    return {each.name: Demand(each.name, each.architecture, DTYPE, max_num_seqs=128) for each in models}


def in_time(record: RequestRecord, ttft: float, tpot: float) -> bool:
    """Its first token came within `ttft` seconds, and its last one within `tpot` seconds more for each after that."""
    if record.error or record.ttft is None or record.finish is None:
        return False
    return record.ttft <= ttft and record.finish <= record.arrival + ttft + (record.output_tokens - 1) * tpot


def attempt(gpus: int, way: str, workload: str, names: Sequence[str], fixed: float) -> dict[str, Any]:
    """Serve the workload so, and what came of it."""
    load = list(open_workload(workload, names))
    counts = {name: sum(each.model == name for each in load) for name in names}
    seconds = load[-1].arrival
    demands = [demand(name, max(1, counts[name]) / seconds) for name in names]
    units: list[SimUnit] = []
    missing: list[str] = []
    for mesh in meshes(gpus, demands):
        made, without = unit(mesh, way, fixed, HEADLINE_SLO)
        missing += without
        if made is not None:
            units.append(made)
    result = simulate(units, load, Roofline())
    ttft = [r.first_token - r.arrival for r in result.records if not r.error and r.first_token is not None]
    told = [each.residency for each in result.units if each.residency is not None]
    return {
        "requests": len(load),
        "without_room": len(missing),
        "refused": sum(bool(record.error) for record in result.records),
        "attainment": {str(slo): round(sum(each <= slo for each in ttft) / len(load), 4) for slo in SLOS},
        "answers_in_time": round(
            sum(in_time(record, HEADLINE_SLO, TPOT_SECONDS) for record in result.records) / len(load), 4
        ),
        "ttft_seconds": percentiles(ttft),
        "wakes": sum(each.wakes for each in told),
        "sleeps": sum(each.sleeps for each in told),
        "waited": sum(each.waited for each in told),
        "switches": sum(each.switches for each in told),
    }


def over_seeds(attempts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came of several workloads: means of attainment, and the worst."""
    found = {str(slo): [each["attainment"][str(slo)] for each in attempts] for slo in SLOS}
    return {
        "attainment": {slo: round(statistics.mean(each), 4) for slo, each in found.items()},
        "worst_attainment": {slo: min(each) for slo, each in found.items()},
        "answers_in_time": round(statistics.mean(each["answers_in_time"] for each in attempts), 4),
        "seeds": attempts,
    }


def fewest(rows: dict[str, dict[str, Any]], slo: float) -> dict[str, int | None]:
    """By way, the fewest GPUs with which 99 % of the requests meet the objective in every workload."""
    found: dict[str, int | None] = {}
    for way in WAYS:
        good = [int(gpus) for gpus, ways in rows.items() if ways[way]["worst_attainment"][str(slo)] >= 0.99]
        found[way] = min(good, default=None)
    return found


def main() -> None:
    """Simulate all and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8, 16 and 24 GPUs, a minute of load")
    parser.add_argument("--rates", type=float, nargs="+", default=[6.0], help="requests/s of all models together")
    parser.add_argument("--fixed", type=float, nargs="+", default=[WAKE_SECONDS, 2.0], help="seconds of each wake")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--phase", type=float, default=30.0, help="seconds for which the same models are active")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/paper_prism.json")
    args = parser.parse_args()
    names = [f"{size}-{n:02d}" for size, (count, *_) in SHAPES.items() for n in range(count)]
    random.Random("popularity").shuffle(names)
    seconds = 60 if args.quick else 300
    report: dict[str, Any] = {"machine": machine(), "models": len(names), "slo_seconds": HEADLINE_SLO, "runs": {}}
    for rate in args.rates:
        for fixed in args.fixed:
            workloads = [
                f"bursty-groups:rate={rate:g},alpha=0.9,duration={seconds},phase={args.phase:g},lengths=sharegpt,"
                f"max_prompt=2048,max_output=1024,seed={seed}"
                for seed in args.seeds
            ]
            rows: dict[str, dict[str, Any]] = {}
            for gpus in (8, 16, 24) if args.quick else GPUS:
                rows[str(gpus)] = {
                    way: over_seeds([attempt(gpus, way, workload, names, fixed) for workload in workloads])
                    for way in WAYS
                }
                shown = {way: each["attainment"][str(HEADLINE_SLO)] for way, each in rows[str(gpus)].items()}
                print(f"{rate:g}/s, {fixed:g} s a wake, {gpus} GPUs: {shown}", flush=True)
            needed = {str(slo): fewest(rows, slo) for slo in SLOS}
            print(f"  GPUs for 99 % within {HEADLINE_SLO:g} s: {needed[str(HEADLINE_SLO)]}", flush=True)
            report["runs"][f"{rate:g} requests/s, {fixed:g} s besides weights"] = {
                "workloads": workloads,
                "by_gpus": rows,
                "gpus_for_99_percent": needed,
            }
            write_report(args.out, report)


if __name__ == "__main__":
    main()
