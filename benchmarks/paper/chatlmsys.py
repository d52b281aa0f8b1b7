"""Simulated against measured: 16 models on 32 A100s under ChatLMSYS traffic, three systems, two speeds (Fig. 7).

    export MUXSERVE_A100_PROFILE=... MUXSERVE_CHATLMSYS=... MUXSERVE_CHATLMSYS_LENGTHS=...
    python benchmarks/paper/chatlmsys.py [--seeds 3] [--fit] [--out FILE]

MuxServe's authors published what their three systems measured, with the placement of each (benchmark/chatlmsys of the
MuxServe repository). Their placements are simulated here as they were. Requests arrive at each model's rate, as many as
there were, at random moments of the same time. Throughput is as they defined it: per model requests / finish of its
last request, averaged with the arrival rates as weights. What the runs did is taken from what was published:

* lengths: each model's own means, which follow from its published results (tokens per second over requests per second,
  and decode steps times batch over requests); the shape is ShareGPT's, answers have at most 512 tokens;
* the KV memory of each unit (`KV_PART`), and room for one sequence per 416 tokens of it, as their scheduler reckons;
* jobs beside each other may ask for 120 % of the SMs;
* quotas are MuxServe's alone; the others share a unit's memory as it comes;
* temporal multiplexing is one job at a time: the prefill of the oldest request that waits and has a seat; without any,
  decode steps of the model that has the oldest request.

The published step times are those of the forward pass; what the host took beside it is `HOST`: seconds for each step,
and for each sequence of it. `--fit` finds these two again where the TPOTs of the 16 models under *spatial* partitioning
at x500 come out best (least squares of the logarithms). No throughput and none of the other five runs has a part in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inputs import DEVICE, DTYPE, PROFILE, costs, fleet_model, placed_unit
from report import machine, write_report

from muxserve.costs import Decode, EngineCosts, EngineShape, LatencyModel, Load, ModelArchitecture
from muxserve.metrics import RequestRecord
from muxserve.scheduling.admission import wants_prefill
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import POLICIES
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import WHOLE, Grant
from muxserve.simulator import MODES, Mode, SimUnit, simulate, units_of
from muxserve.workload.published import published
from muxserve.workload.trace import TraceRequest
from placement.cluster import Cluster, Node, Placement
from placement.demand import Demand

ROOT = Path(__file__).resolve().parent.parent.parent
LENGTHS = "MUXSERVE_CHATLMSYS_LENGTHS"
# Seconds of the host for each step, and for each sequence in it.
HOST = (8e-3, 1.5e-4)
# How much of a unit's SMs jobs beside each other may ask for: their `overload_threshold` is two tenths of a GPU.
OVERLOAD = 1.2


class OldestFirst(Policy):
    """One job at a time on the whole unit: the prefill of the oldest request that waits and has a seat; without any, a
    decode step of the model that has the oldest request."""

    name = "oldest_first"

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        if ledger.share_used:
            return []
        jobs = [job for model in ledger.models for job in self._jobs(ledger, model, now)]
        if not jobs:
            return []
        _, prefills, model = min(jobs, key=lambda job: (not job[1], job[0], job[2].index))
        if prefills:
            return [self._prefill_job(ledger, model, share=WHOLE)]
        return [self._decode_job(ledger, model, contended=len(jobs) > 1, share=WHOLE)]

    @staticmethod
    def _jobs(ledger: UnitLedger, model: ModelState, now: float) -> list[tuple[float, bool, ModelState]]:
        """What the model could run now, by the arrival of the oldest request in it."""
        found = []
        if wants_prefill(ledger, model, now):
            waiting = [model.queue.head()] if model.queue else []
            found.append((min(each.arrival for each in [*waiting, *model.prefilling.values()]), True, model))
        if model.decode.ready(now):
            decoding = itertools.chain(model.decoding.values(), model.handed.values())
            found.append((min(each.arrival for each in decoding), False, model))
        return found


POLICIES[OldestFirst.name] = OldestFirst
SYSTEMS: dict[str, Mode] = {
    "muxserve": MODES["adbs"],
    "spatial": MODES["spatial"],
    "temporal": Mode("temporal", "oldest request first", policy=OldestFirst.name, adapt_quotas=False),
}


@dataclass(frozen=True)
class WithHost:
    """A latency model whose steps take the host's time as well, during which the device is idle, and whose shares mean
    `overload` times as much."""

    device: LatencyModel
    step: float
    sequence: float
    overload: float = 1.0

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> HostCosts:
        """Costs of that engine with its host."""
        shape = replace(shape, share=min(1.0, shape.share * self.overload))
        return HostCosts(self.device.engine(architecture, shape), self.step, self.sequence)

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """That of the device."""
        return self.device.slowdowns(device, loads)


@dataclass(frozen=True)
class HostCosts:
    """`EngineCosts` with the host; its loads are lower, since the device waits for the host in between."""

    device: EngineCosts
    step: float
    sequence: float

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """Seconds of a prefill step."""
        return self.device.prefill(tokens, pairs, sequences) + self.step + self.sequence * sequences

    def decode(self, batch: int, context: int) -> Decode:
        """One decode step."""
        step = self.device.decode(batch, context)
        return step._replace(fixed=step.fixed + self.step + self.sequence * batch)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """Load on the device, over the whole step."""
        busy = self.device.prefill(tokens, pairs, sequences)
        part = busy / self.prefill(tokens, pairs, sequences)
        load = self.device.prefill_load(tokens, pairs, sequences)
        return Load(load.bandwidth * part, load.compute * part)

    def decode_load(self, batch: int, context: int) -> Load:
        """Load on the device, over the whole step."""
        busy = self.device.decode(batch, context).seconds(context)
        part = busy / self.decode(batch, context).seconds(context)
        load = self.device.decode_load(batch, context)
        return Load(load.bandwidth * part, load.compute * part)


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


def placement_of(name: str, workload: dict[str, Any], system: str) -> tuple[Placement, dict[str, Demand]]:
    """The published placement of one system."""
    measured = workload["measured"][system]
    models = {m["name"]: m for m in workload["models"]}
    sizes = {n: m["architecture"].removeprefix("llama-") for n, m in models.items()}
    fleet: dict[str, Demand] = {}
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


def requests_of(workload: dict[str, Any], lengths: dict[str, Any], seed: int) -> list[TraceRequest]:
    """As many requests per model as were measured, at random moments of the same time, with its mean lengths."""
    prompts, outputs = published("sharegpt", "prompt"), published("sharegpt", "output")
    chance = random.Random("lengths")
    prompt_sample, output_sample = ([each.sample(chance) for _ in range(5000)] for each in (prompts, outputs))
    requests = []
    for model in workload["models"]:
        name = model["name"]
        output_mean = lengths[name]["output_tokens"]
        prompt_mean = lengths[name]["prompt_and_output_tokens"] - output_mean
        scale_in = scale_to(prompt_mean, prompt_sample, LONGEST_PROMPT)
        scale_out = scale_to(output_mean, output_sample, LONGEST_OUTPUT)
        count = workload["measured"]["muxserve"]["per_model"][name]["requests"]
        rng = random.Random(f"{seed}/{name}")
        for _ in range(count):
            prompt = min(LONGEST_PROMPT, max(1, round(prompts.sample(rng) * scale_in)))
            output = min(LONGEST_OUTPUT, max(1, round(outputs.sample(rng) * scale_out)))
            requests.append(TraceRequest(rng.uniform(0, count / model["rate"]), name, prompt, output))
    return sorted(requests, key=lambda r: r.arrival)


@dataclass(frozen=True)
class Runs:
    """What all runs have in common."""

    workloads: dict[str, Any]
    lengths: dict[str, Any]
    latency: LatencyModel

    def records(self, name: str, system: str, host: tuple[float, float], seed: int) -> list[RequestRecord]:
        """Simulate one system."""
        workload = self.workloads[name]
        placement, fleet = placement_of(name, workload, system)
        units = units_of(placement, fleet, SYSTEMS[system])
        overload = 1.0
        if system == "muxserve":
            overload = OVERLOAD
            units = [overloaded(unit) for unit in units]
        elif system == "temporal":
            units = [unlimited(unit) for unit in units]
        latency = WithHost(self.latency, *host, overload)
        return simulate(units, requests_of(workload, self.lengths, seed), latency).records

    def tpot_errors(self, host: tuple[float, float], seeds: int) -> list[float]:
        """Logarithms of simulated over measured TPOT of each model, spatial partitioning at x500."""
        tpots: dict[str, list[float]] = {}
        for seed in range(seeds):
            for record in self.records("x500", "spatial", host, seed):
                if record.tpot is not None:
                    tpots.setdefault(record.model, []).append(record.tpot)
        measured = self.workloads["x500"]["measured"]["spatial"]["per_model"]
        return [math.log(statistics.fmean(each) / measured[name]["tpot_mean"]) for name, each in tpots.items()]

    def fit(self, seeds: int = 1) -> tuple[float, float]:
        """The host's seconds where those errors are least, on a grid that is refined once."""

        def error(host: tuple[float, float]) -> float:
            return sum(each * each for each in self.tpot_errors(host, seeds))

        best, step = (8e-3, 2e-4), (4e-3, 1e-4)
        known: dict[tuple[float, float], float] = {}
        for _ in range(3):
            tried = [
                (round(max(0.0, best[0] + i * step[0]), 6), round(max(0.0, best[1] + j * step[1]), 7))
                for i, j in itertools.product((-1, 0, 1), repeat=2)
            ]
            known |= {host: error(host) for host in tried if host not in known}
            best = min(known, key=lambda host: known[host])
            step = step[0] / 2, step[1] / 2
        return best


def overloaded(unit: SimUnit) -> SimUnit:
    """Leases take less of the unit, so that jobs that ask for `OVERLOAD` of it fit beside each other."""
    models = [
        replace(
            model,
            profile=model.profile.with_engines(
                prefill_share=model.profile.engines.prefill_share / OVERLOAD,
                decode_share=model.profile.engines.decode_share / OVERLOAD,
            ),
        )
        for model in unit.models
    ]
    return replace(unit, models=tuple(models))


def unlimited(unit: SimUnit) -> SimUnit:
    """Every model may have all pages of its pool."""
    pages = {pool.name: pool.pages for pool in unit.pools}
    models = [replace(m, profile=replace(m.profile, quota_pages=pages[m.profile.kv.pool])) for m in unit.models]
    return replace(unit, models=tuple(models))


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


def row_of(runs: Runs, name: str, system: str, host: tuple[float, float], seeds: int) -> dict[str, Any]:
    """One system: measured, simulated (mean over the seeds), errors."""
    workload = runs.workloads[name]
    found = [figures(runs.records(name, system, host, seed), workload) for seed in range(seeds)]
    measured = workload["measured"][system]
    mean = {key: statistics.fmean(each[key] for each in found) for key in found[0] if key != "per_model"}
    models = {n: statistics.fmean(each["per_model"][n] for each in found) for n in found[0]["per_model"]}
    errors = {n: models[n] / measured["per_model"][n]["throughput"] - 1 for n in models}
    sizes = sorted(map(abs, errors.values()))
    return {
        "measured": {key: measured[key] for key in ("throughput_weighted", "ttft_mean", "tpot_mean")},
        "simulated": mean,
        "throughput_error": mean["throughput_weighted"] / measured["throughput_weighted"] - 1,
        "errors_of_models": {
            "median": round(statistics.median(sizes), 4),
            "largest": round(sizes[-1], 4),
            "by_model": {n: round(error, 4) for n, error in errors.items()},
        },
    }


def show(name: str, system: str, row: dict[str, Any]) -> None:
    """One line, and the errors of all models."""
    was, is_, errors = row["measured"], row["simulated"], row["errors_of_models"]
    print(
        f"{name:6s} {system:9s} throughput {was['throughput_weighted']:.2f} measured, "
        f"{is_['throughput_weighted']:.2f} simulated ({row['throughput_error']:+.0%})   "
        f"TTFT {was['ttft_mean']:.1f}, {is_['ttft_mean']:.1f} s   "
        f"TPOT {was['tpot_mean'] * 1e3:.0f}, {is_['tpot_mean'] * 1e3:.0f} ms   "
        f"models: median {errors['median']:.0%}, largest {errors['largest']:.0%}"
    )
    each = ", ".join(f"{n.removeprefix('llm-')} {error:+.0%}" for n, error in errors["by_model"].items())
    print(f"       {each}", flush=True)


def main() -> int:
    """Simulate all six; exit code 1 if a winner is wrong, 2 without the published files."""
    parser = argparse.ArgumentParser(description="Simulated against measured ChatLMSYS runs.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems to run, with commas between")
    parser.add_argument("--fit", action="store_true", help="fit the host's seconds again, and use those")
    parser.add_argument(
        "--host", type=float, nargs=2, help="other seconds of the host: for each step, for each sequence"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/paper_chatlmsys.json")
    options = parser.parse_args()
    paths = [os.environ.get(variable) for variable in ("MUXSERVE_CHATLMSYS", LENGTHS)]
    if None in paths or PROFILE not in os.environ:
        print(f"set {PROFILE}, MUXSERVE_CHATLMSYS and {LENGTHS} to the published files", file=sys.stderr)
        return 2
    workloads, lengths = (json.loads(Path(path or "").read_text()) for path in paths)
    device, source = costs()
    runs = Runs(workloads["workloads"], lengths, device)
    host = runs.fit() if options.fit else tuple(options.host or HOST)
    print(f"{source}; the host takes {host[0] * 1e3:.1f} ms for a step and {host[1] * 1e6:.0f} us for a sequence of it")
    report: dict[str, Any] = {"machine": machine(), "costs": source, "seeds": options.seeds}
    report["host"] = {"step": host[0], "sequence": host[1]}
    report["workloads"] = {}
    right = True
    for name in runs.workloads:
        rows = {}
        for system in options.systems.split(","):
            rows[system] = row_of(runs, name, system, host, options.seeds)
            show(name, system, rows[system])
        ranking = {
            side: sorted(rows, key=lambda s: -rows[s][side]["throughput_weighted"])
            for side in ("measured", "simulated")
        }
        for side, order in ranking.items():
            print(f"{name:6s} {side}: {' > '.join(order)}", flush=True)
        right = right and ranking["measured"][0] == ranking["simulated"][0]
        report["workloads"][name] = {"systems": rows, "ranking": ranking}
    report["winners_right"] = right
    write_report(options.out, report)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
