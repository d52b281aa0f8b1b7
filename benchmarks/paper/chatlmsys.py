"""Simulated against measured: 16 models on 32 A100s under ChatLMSYS traffic, three systems, two speeds (Fig. 7).

    MUXSERVE_A100_PROFILE=... MUXSERVE_CHATLMSYS=... python benchmarks/paper/chatlmsys.py [--seeds 5] [--out FILE]

MuxServe's authors published what their three systems measured, with the placement of each (benchmark/chatlmsys of the
MuxServe repository). Their placements are simulated here as they were. Requests arrive at each model's rate, as many as
there were, at random moments of the same time, with lengths of the ShareGPT distribution scaled to the published means,
answers of at most 512 tokens. Throughput is as they defined it: per model requests / finish of its last request,
averaged with the arrival rates as weights. What the runs did is taken from their published configuration:

* the KV memory of each unit (`KV_PART`), and room for one sequence per 416 tokens of it, as their scheduler reckons;
* temporal multiplexing runs one job at a time on whole GPUs, prefill first, decode steps of the models in turn.

One constant is fitted, and not to any throughput. The published step times are those of the forward pass; what a step
took in the runs is longer. The factor is chosen so that the median over the 16 models of measured / simulated TPOT is 1
under *spatial* partitioning at x500. The other five runs have no part in it. `--factor 1` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inputs import DEVICE, DTYPE, PROFILE, Stretched, costs, fleet_model, placed_unit
from report import machine, write_report

from muxserve.costs import LatencyModel
from muxserve.metrics import RequestRecord
from muxserve.simulator import MODES, FleetModel, Mode, simulate, units_of
from muxserve.workload.published import published
from muxserve.workload.trace import TraceRequest
from placement.cluster import Cluster, Node, Placement

ROOT = Path(__file__).resolve().parent.parent.parent
SYSTEMS: dict[str, Mode] = {
    "muxserve": MODES["muxserve"],
    "spatial": MODES["spatial"],
    "temporal": MODES["round-robin"],
}
GIGABYTE = 10**9
GPU_BYTES = 80 * GIGABYTE
# Part of each GPU's memory that the runs gave to KV (`gpu_memory_utilization` in the YAML files beside the results):
# of a model's own GPUs under spatial partitioning, and of each unit otherwise.
KV_PART_SPATIAL = {"7b": 0.65, "13b": 0.5, "30b": 0.375, "65b": 0.375}
KV_PART = {
    "x500": (0.2119, 0.385, 0.2725, 0.7175, 0.435, 0.7925, 0.2225, 0.7925, None, 0.51),
    "x1200": (0.5163, 0.4912, 0.31, 0.31, 0.2725, 0.2975, 0.505, 0.555, 0.26, 0.705, 0.555),
}
# Tokens that their scheduler sets aside for a sequence, whatever its length, and its largest batch.
SEQUENCE_TOKENS, LARGEST_BATCH = 416, 256
# The models' context, and the longest answer that their arena allowed: the p99 latencies of nearly idle models in the
# results are those of 510 to 580 tokens.
LONGEST_PROMPT, LONGEST_OUTPUT = 1500, 512


def unit_key(key: str) -> tuple[int, int]:
    """Number and GPUs of a unit called `idx4x2gpu`."""
    number, gpus = key.removeprefix("idx").removesuffix("gpu").split("x")
    return int(number), int(gpus)


def placement_of(name: str, workload: dict[str, Any], system: str) -> tuple[Placement, dict[str, FleetModel]]:
    """The published placement of one system."""
    measured = workload["measured"][system]
    models = {m["name"]: m for m in workload["models"]}
    sizes = {n: m["architecture"].removeprefix("llama-") for n, m in models.items()}
    fleet: dict[str, FleetModel] = {}
    units, first = [], 0
    for key, names in sorted(measured["placement"].items(), key=lambda item: -unit_key(item[0])[1]):
        number, gpus = unit_key(key)
        part = KV_PART_SPATIAL[sizes[names[0]]] if system == "spatial" else KV_PART[name][number]
        kv_bytes = int((part or 0.0) * GPU_BYTES)
        members = {}
        for each in names:
            model = fleet_model(each, sizes[each])
            tokens = kv_bytes * gpus / model.architecture.kv_bytes_per_token(DTYPE)
            fleet[each] = replace(model, max_num_seqs=max(1, min(LARGEST_BATCH, int(tokens / SEQUENCE_TOKENS))))
            prefill, decode = (share / 100 for share in measured["per_model"][each]["mps"])
            members[each] = (fleet[each], models[each]["rate"], prefill, decode)
        units.append(replace(placed_unit(key, first, gpus, members), kv_bytes=kv_bytes))
        first += gpus
    nodes = tuple(Node(DEVICE, workload["gpus"]["per_node"]) for _ in range(workload["gpus"]["nodes"]))
    return Placement(Cluster(nodes), tuple(units)), fleet


def scale_to(mean: float, sample: list[int], most: int) -> float:
    """The factor by which lengths, cut at `most`, have that mean."""
    low, high = 0.01, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        short = statistics.fmean(min(most, max(1, round(x * middle))) for x in sample) < mean
        low, high = (middle, high) if short else (low, middle)
    return (low + high) / 2


def requests_of(workload: dict[str, Any], seed: int) -> list[TraceRequest]:
    """As many requests per model as were measured, at random moments of the same time."""
    prompts, outputs = published("sharegpt", "prompt"), published("sharegpt", "output")
    chance = random.Random("lengths")
    scale_in = scale_to(workload["avg_prompt_len"], [prompts.sample(chance) for _ in range(5000)], LONGEST_PROMPT)
    scale_out = scale_to(workload["avg_output_len"], [outputs.sample(chance) for _ in range(5000)], LONGEST_OUTPUT)
    requests = []
    for model in workload["models"]:
        name = model["name"]
        count = workload["measured"]["muxserve"]["per_model"][name]["requests"]
        rng = random.Random(f"{seed}/{name}")
        for _ in range(count):
            prompt = min(LONGEST_PROMPT, max(1, round(prompts.sample(rng) * scale_in)))
            output = min(LONGEST_OUTPUT, max(1, round(outputs.sample(rng) * scale_out)))
            requests.append(TraceRequest(rng.uniform(0, count / model["rate"]), name, prompt, output))
    return sorted(requests, key=lambda r: r.arrival)


def run(name: str, workload: dict[str, Any], system: str, latency: LatencyModel, seed: int) -> list[RequestRecord]:
    """Simulate one system."""
    placement, fleet = placement_of(name, workload, system)
    units = units_of(placement, fleet, SYSTEMS[system])
    return simulate(units, requests_of(workload, seed), latency, seed=seed).records


def tpot_ratio(workloads: dict[str, Any], latency: LatencyModel) -> float:
    """Median over the models of measured / simulated TPOT, spatial partitioning at x500."""
    tpots: dict[str, list[float]] = {}
    for record in run("x500", workloads["x500"], "spatial", latency, 0):
        if record.tpot is not None:
            tpots.setdefault(record.model, []).append(record.tpot)
    measured = workloads["x500"]["measured"]["spatial"]["per_model"]
    return statistics.median(measured[name]["tpot_mean"] / statistics.fmean(each) for name, each in tpots.items())


def fit_factor(workloads: dict[str, Any], latency: LatencyModel) -> float:
    """The factor of `Stretched` at which `tpot_ratio` is 1."""
    low, high = 1.0, 3.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if tpot_ratio(workloads, Stretched(latency, middle)) > 1 else (low, middle)
    return round((low + high) / 2, 2)


def figures(records: list[RequestRecord], workload: dict[str, Any]) -> dict[str, Any]:
    """Throughput as published, and mean latencies."""
    rates = {m["name"]: m["rate"] for m in workload["models"]}
    by_model: dict[str, list[RequestRecord]] = {name: [] for name in rates}
    for record in records:
        by_model[record.model].append(record)
    per_model = {name: len(rs) / max(r.finish or 0.0 for r in rs) for name, rs in by_model.items()}
    return {
        "throughput_weighted": sum(per_model[n] * rates[n] for n in rates) / sum(rates.values()),
        "ttft_mean": statistics.fmean(r.ttft for r in records if r.ttft is not None),
        "tpot_mean": statistics.fmean(t for r in records if (t := r.tpot) is not None),
        "failed": sum(not r.ok for r in records),
        "per_model": per_model,
    }


def row_of(name: str, workload: dict[str, Any], system: str, latency: LatencyModel, seeds: int) -> dict[str, Any]:
    """One system: measured, simulated (mean over the seeds), error."""
    runs = [figures(run(name, workload, system, latency, seed), workload) for seed in range(seeds)]
    measured = workload["measured"][system]
    mean = {key: statistics.fmean(each[key] for each in runs) for key in runs[0] if key != "per_model"}
    models = {n: statistics.fmean(each["per_model"][n] for each in runs) for n in runs[0]["per_model"]}
    return {
        "measured": {key: measured[key] for key in ("throughput_weighted", "ttft_mean", "tpot_mean")},
        "simulated": mean,
        "throughput_error": mean["throughput_weighted"] / measured["throughput_weighted"] - 1,
        "throughput_of_models": {
            n: {"measured": measured["per_model"][n]["throughput"], "simulated": models[n]} for n in models
        },
    }


def show(name: str, system: str, row: dict[str, Any]) -> None:
    """One line."""
    was, is_ = row["measured"], row["simulated"]
    print(
        f"{name:6s} {system:9s} throughput {was['throughput_weighted']:.2f} measured, "
        f"{is_['throughput_weighted']:.2f} simulated ({row['throughput_error']:+.0%})   "
        f"TTFT {was['ttft_mean']:.1f}, {is_['ttft_mean']:.1f} s   "
        f"TPOT {was['tpot_mean'] * 1e3:.0f}, {is_['tpot_mean'] * 1e3:.0f} ms",
        flush=True,
    )


def main() -> int:
    """Simulate all six; exit code 1 if one is off by more than 20 %, 2 without the published files."""
    parser = argparse.ArgumentParser(description="Simulated against measured ChatLMSYS runs.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--factor", type=float, help="how much longer steps took than the published forward passes")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/paper_chatlmsys.json")
    options = parser.parse_args()
    path = os.environ.get("MUXSERVE_CHATLMSYS")
    if path is None or PROFILE not in os.environ:
        print(f"set {PROFILE} and MUXSERVE_CHATLMSYS to the published files", file=sys.stderr)
        return 2
    workloads = json.loads(Path(path).read_text())["workloads"]
    device, source = costs()
    factor = options.factor or fit_factor(workloads, device)
    print(f"{source}; steps take {factor} times that")
    latency = Stretched(device, factor)
    report: dict[str, Any] = {"machine": machine(), "costs": source, "factor": factor, "seeds": options.seeds}
    report["workloads"] = {}
    errors = []
    for name, workload in workloads.items():
        rows = {}
        for system in SYSTEMS:
            rows[system] = row_of(name, workload, system, latency, options.seeds)
            errors.append(abs(rows[system]["throughput_error"]))
            show(name, system, rows[system])
        ranking = {
            side: sorted(rows, key=lambda s: -rows[s][side]["throughput_weighted"])
            for side in ("measured", "simulated")
        }
        for side, order in ranking.items():
            print(f"{name:6s} {side}: {' > '.join(order)}")
        report["workloads"][name] = {"systems": rows, "ranking": ranking}
    report["within_20_percent"] = max(errors) <= 0.2
    write_report(options.out, report)
    return 0 if max(errors) <= 0.2 else 1


if __name__ == "__main__":
    sys.exit(main())
