"""EcoServe's evaluation in simulation (arXiv:2504.18154): 32 L20 with 10 GbE and 16 A800 with 25 GbE.

    python benchmarks/paper/ecoserve.py [--only PART,PART] [--systems NAME/NAME] [--seconds FACTOR] [--out FILE]

Parts: goodput, static, dynamic, handles, ablation. With `--systems` the goodput of these alone is looked for anew, and
that of the others is what the result file has.

Every part prints a table and is written to the result file as soon as it is there. docs/phases.md discusses them beside
the paper's claims. Step times come from the roofline of the two GPUs: nothing here ran on one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inputs import llama
from msgspec import structs
from report import machine, percentiles, write_report
from split import Split, SplitOptions, division

from muxserve.costs import EngineCosts, EngineShape, ModelArchitecture
from muxserve.costs.calibration import LINKS
from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.metrics import percentile
from muxserve.metrics.definitions import Objectives, time_per_token
from muxserve.replicas.dispatch import DispatchPolicy, NewRequest
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.member import Member
from muxserve.rolling.member import Objectives as RollingObjectives
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.scaling import ScalingRules
from muxserve.rolling.scheduler import pack, unpack
from muxserve.scheduling.token_throttling import FixedBudget
from muxserve.simulator import (
    FleetModel,
    Link,
    Options,
    Overheads,
    Pipeline,
    ReplicaRules,
    ReplicasResult,
    RingRules,
    SimUnit,
    lone_unit,
    simulate,
)
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.stages import Work, make_stages
from muxserve.workload import LogNormalLengths, ModelLoad, TraceRequest, generate

ROOT = Path(__file__).resolve().parent.parent.parent
COSTS = Roofline()
DTYPE = "float16"
UTILISATION = 0.9
MODELS = {
    # layers, heads, KV heads, head size, hidden, MLP, vocabulary: config.json of the Hugging Face checkpoints.
    "Llama-30B": llama("30b"),
    "CodeLlama2-34B": ModelArchitecture("CodeLlama2-34B", 48, 64, 8, 128, 8192, 22016, 32000, 16384, 16384, DTYPE),
    "Qwen2-72B": ModelArchitecture("Qwen2-72B", 80, 64, 8, 128, 8192, 29568, 152064, 32768, 32768, DTYPE),
}


@dataclass(frozen=True)
class Cluster:
    """`nodes` of eight GPUs, joined by `network` bytes per second; GPUs per instance by model."""

    device: str
    nodes: int
    network: float
    tp: dict[str, int]

    def instances(self, model: str) -> int:
        """All of them."""
        return self.nodes * 8 // self.tp[model]


CLUSTERS = {
    "L20": Cluster("L20-48GB", 4, 1.25e9, {"Llama-30B": 4, "CodeLlama2-34B": 4, "Qwen2-72B": 4}),
    "A800": Cluster("A800-80GB", 2, 3.125e9, {"Llama-30B": 2, "CodeLlama2-34B": 2, "Qwen2-72B": 4}),
}


@dataclass(frozen=True)
class Dataset:
    """Lengths, the paper's objective for the first token, and for how long requests come: several times the objective,
    or queues would not have the time to show."""

    prompt: LogNormalLengths
    output: LogNormalLengths
    ttft: float
    seconds: float

    def means(self) -> tuple[int, int]:
        """Of prompts and answers, tokens, of 4,000 draws."""
        requests = list(generate({"m": ModelLoad(40.0, self.prompt, self.output)}, 100.0, 7))
        return (
            round(statistics.mean(r.prompt_tokens for r in requests)),
            round(statistics.mean(r.output_tokens for r in requests)),
        )


# Log-normals: the data sets are not at hand. Medians and spreads are chosen for the means that are known of them, about
# 20 and 160 tokens (Alpaca-GPT4), 340 and 240 (ShareGPT), 2,700 and 100 (LongBench); docs/phases.md says so.
DATASETS = {
    "Alpaca": Dataset(LogNormalLengths(17, 0.55, 4, 200), LogNormalLengths(120, 0.85, 2, 1024), 1.0, 60.0),
    "ShareGPT": Dataset(LogNormalLengths(150, 1.3, 4, 2048), LogNormalLengths(155, 1.05, 2, 1024), 5.0, 100.0),
    "LongBench": Dataset(LogNormalLengths(2400, 0.5, 256, 8192), LogNormalLengths(45, 1.2, 2, 512), 15.0, 200.0),
}
TPOT = 0.1
# Batches in which Sarathi's budget is looked for.
BUDGETS = (128, 256, 512, 1024, 2048)
SHARES = {"P50": 0.5, "P90": 0.9, "P99": 0.99}
# Whose saved time Algorithm 2 looks at: the mean of all (the paper), or a quarter's, which is what we would serve with.
SPARED = 0.25
ROLLING, SPARING = "EcoServe", "EcoServe, quantile"
VLLM, SARATHI, DISTSERVE, MOONCAKE = "vLLM", "Sarathi", "DistServe", "MoonCake"
# The budget that Sarathi is often run with, whatever the objective.
SARATHI_512 = "Sarathi, 512"
OTHERS = (VLLM, SARATHI, SARATHI_512, DISTSERVE, MOONCAKE)
# The paper's averages over all its settings, at P90.
PAPER = {VLLM: 0.82, SARATHI: 0.86, DISTSERVE: 1.23, MOONCAKE: 1.27}
Row = dict[str, Any]


# A good figure of the engines of 2024: what the host takes for each step, seconds.
STEP = 5e-3
OPTIONS = Options(Overheads(prefill_step=STEP, decode_step=STEP), sample_seconds=0.0)


def unit_of(cluster: Cluster, model: str, number: int = 0, pipeline: Pipeline | None = None) -> SimUnit:
    """One instance: its KV cache is what nine tenths of its GPUs' memory have beside the weights."""
    architecture, tp = MODELS[model], cluster.tp[model]
    room = device(cluster.device).memory_bytes * UTILISATION * tp - architecture.weight_bytes(DTYPE)
    blocks = int(room // (16 * architecture.kv_bytes_per_token(DTYPE)))
    served = FleetModel("m", architecture, DTYPE, 256, 2048)
    devices = tuple(range(number * tp, (number + 1) * tp))
    return lone_unit(f"i{number}", cluster.device, devices, served, blocks, pipeline=pipeline, waiting_tokens=4096)


def costs_of(cluster: Cluster, model: str) -> EngineCosts:
    """Of an instance."""
    return COSTS.engine(MODELS[model], EngineShape(cluster.device, cluster.tp[model], 1.0, DTYPE))


@dataclass
class Outcome:
    """What came of a workload, with the wait for the phase switch told apart."""

    requests: list[SimRequest]
    transfers: int = 0
    together: ReplicasResult | None = None

    def within(self, after: float = 0.0, before: float = float("inf")) -> list[SimRequest]:
        """Requests that arrived then."""
        return [r for r in self.requests if after <= r.arrival < before]

    def attained(
        self, objectives: Objectives, switch: bool = True, after: float = 0.0, before: float = float("inf")
    ) -> float:
        """Part of the requests that arrived then and met all objectives; 1.0 of none.

        Args:
            switch: the wait for the phase switch (from the first token to the begin of the first decode step) counts
                as time to first token, not as time per output token; otherwise the other way round.
        """
        found = [times(request, switch) for request in self.within(after, before)]
        met = [each is not None and objectives.met(*each).get("all", True) for each in found]
        return sum(met) / len(met) if met else 1.0


def times(request: SimRequest, switch: bool) -> tuple[float, float | None] | None:
    """TTFT and TPOT of an answered request, seconds, the wait for the phase switch in the first or in the second."""
    if request.first_token is None or request.finish is None:
        return None
    wait = request.switch_wait if switch else 0.0
    tpot = time_per_token(request.first_token + wait, request.finish, request.made)
    return request.first_token - request.arrival + wait, tpot


# Plays a workload.
System = Callable[[list[TraceRequest]], Outcome]


def played(units: list[SimUnit], rules: ReplicaRules | RingRules) -> System:
    """Instances that work together by these rules."""

    def play(requests: list[TraceRequest]) -> Outcome:
        result = simulate(units, requests, COSTS, OPTIONS, {"m": rules})
        return Outcome(result.requests, together=result.replicas[0] if result.replicas else None)

    return play


class FewestTokens(DispatchPolicy):
    """Where the fewest tokens are, in the KV cache and in the queue."""

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy.choose`."""
        return min(loads, key=lambda load: load.used + load.queued_demand)


def objectives(dataset: str) -> Objectives:
    """The paper's."""
    return Objectives(ttft=DATASETS[dataset].ttft, tpot=TPOT)


def rolling(
    cluster: Cluster,
    model: str,
    dataset: str,
    instances: int | None = None,
    spared: float | None = None,
    limits: RollingObjectives | None = None,
    most: int = 0,
    **more: Any,
) -> System:
    """EcoServe: one macro instance, of at most so many with scaling."""
    count = instances or cluster.instances(model)
    rules = RingRules(
        limits or RollingObjectives(DATASETS[dataset].ttft, TPOT, spared),
        expected_output=DATASETS[dataset].means()[1],
        spares=tuple(unit_of(cluster, model, number) for number in range(count, most)),
        **more,
    )
    return played([unit_of(cluster, model, number) for number in range(count)], rules)


def independent(cluster: Cluster, model: str, budget: int | None = None) -> System:
    """Instances that know nothing of each other: separate batching with prefill priority (vLLM), or hybrid batching of
    chunks with a budget of tokens per step (Sarathi-Serve)."""
    pipeline = None
    if budget is not None:
        pipeline = Pipeline((MODELS[model].layers,), (), partial(FixedBudget, budget))
    units = [unit_of(cluster, model, number, pipeline) for number in range(cluster.instances(model))]
    return played(units, ReplicaRules(dispatch=lambda levels: FewestTokens()))


def split(cluster: Cluster, model: str, dataset: str, within_node: bool) -> System:
    """DistServe or MoonCake, divided as `division` says."""
    unit, costs = replace(unit_of(cluster, model), combined=True), costs_of(cluster, model)
    prompt, output = DATASETS[dataset].means()
    tp = cluster.tp[model]
    each = 8 // tp
    peer = device(cluster.device).link_bandwidth * LINKS[device(cluster.device).link].efficiency * tp
    inside, outside = Link(peer, 1e-3), Link(cluster.network * LINKS["network"].efficiency, 1e-3)
    if within_node:
        p, d = division(costs, unit, STEP, each, prompt, output, TPOT)
        counts, decode = (p,) * cluster.nodes, (d,) * cluster.nodes
    else:
        p, _ = division(costs, unit, STEP, cluster.nodes * each, prompt, output, TPOT)
        # Prefill instances are spread over the nodes, so that all network cards are used for sending and for receiving.
        counts = tuple(p // cluster.nodes + (n < p % cluster.nodes) for n in range(cluster.nodes))
        decode = tuple(each - count for count in counts)
    how = SplitOptions(counts, decode, inside, outside, within_node, streamed=not within_node)

    def play(requests: list[TraceRequest]) -> Outcome:
        arrangement = Split(unit, COSTS, how, OPTIONS)
        return Outcome(arrangement.run(requests), arrangement.transfers)

    return play


def sarathi(cluster: Cluster, model: str, dataset: str) -> System:
    """With the largest budget that keeps the objective beside 32 decodes."""
    pipeline = Pipeline((MODELS[model].layers,), ())
    shape = EngineShape(cluster.device, cluster.tp[model], 1.0, DTYPE)
    (stage,) = make_stages(pipeline, COSTS, MODELS[model], shape)
    prompt, batch = DATASETS[dataset].means()[0], 32
    best = min(BUDGETS)
    for budget in BUDGETS:
        # A chunk from the middle of a prompt, beside sequences of twice the prompt's length: it is how Sarathi-Serve
        # (section 4.3) has the budget chosen, by profiling, for the TPOT objective.
        chunk = max(1, budget - batch)
        pairs = chunk * (prompt // 2) + chunk * (chunk + 1) // 2
        if stage.seconds(Work(chunk, 1, pairs, batch, 2 * batch * prompt)) + STEP <= TPOT:
            best = budget
    return independent(cluster, model, best)


def systems(cluster: Cluster, model: str, dataset: str) -> dict[str, Callable[[], System]]:
    """What is compared."""
    return {
        ROLLING: lambda: rolling(cluster, model, dataset),
        SPARING: lambda: rolling(cluster, model, dataset, spared=SPARED),
        VLLM: lambda: independent(cluster, model),
        SARATHI: lambda: sarathi(cluster, model, dataset),
        SARATHI_512: lambda: independent(cluster, model, 512),
        DISTSERVE: lambda: split(cluster, model, dataset, within_node=True),
        MOONCAKE: lambda: split(cluster, model, dataset, within_node=False),
    }


def workload(dataset: str, rate: float, seconds: float, seed: int = 1) -> list[TraceRequest]:
    """Poisson arrivals."""
    data = DATASETS[dataset]
    return list(generate({"m": ModelLoad(rate, data.prompt, data.output)}, seconds, seed))


class Search:
    """Goodput of one system in one setting: the largest rate at which so many requests meet both objectives. Rates are
    tried once for all percentiles, on a geometric grid."""

    def __init__(self, make: Callable[[], System], dataset: str, seconds: float, step: float) -> None:
        self.make, self.dataset, self.seconds, self.step = make, dataset, seconds, step
        self.found: dict[int, dict[bool, float]] = {}

    def attained(self, place: int, switch: bool) -> float:
        """At the rate step**place."""
        if place not in self.found:
            result = self.make()(workload(self.dataset, self.step**place, self.seconds))
            self.found[place] = {
                with_wait: result.attained(objectives(self.dataset), with_wait, after=self.seconds / 4)
                for with_wait in (True, False)
            }
        return self.found[place][switch]

    def goodput(self, share: float, switch: bool, start: int) -> int:
        """The place of the largest rate that attains `share`, looked for from `start` on; the attainment falls with the
        rate, so one crossing is looked for."""
        place, stride = start, 4
        good = self.attained(place, switch) >= share
        while True:
            following = place + (stride if good else -stride)
            if self.step**following < 0.02:
                return following
            if (self.attained(following, switch) >= share) != good:
                low, high = min(place, following), max(place, following)
                break
            place = following
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.attained(middle, switch) >= share else (low, middle)
        return low


def goodput_of(make: Callable[[], System], dataset: str, seconds: float, start: float, step: float = 1.07) -> Row:
    """Rates, requests per second, by percentile, with and without the wait for the phase switch."""
    search = Search(make, dataset, seconds, step)
    row: Row = {"with": {}, "without": {}}
    place = round(math.log(start, step))
    for switch, kind in ((True, "with"), (False, "without")):
        for name in ("P90", "P50", "P99"):
            if kind == "without" and name != "P90":
                continue
            place = search.goodput(SHARES[name], switch, place)
            row[kind][name] = round(step**place, 3) if step**place >= 0.02 else 0.0
    row["simulations"] = len(search.found)
    return row


def look(system: System, dataset: str, rate: float, seconds: float) -> Row:
    """Times at one rate, seconds."""
    result = system(workload(dataset, rate, seconds))
    within = result.within(seconds / 4)
    row: Row = {"attained": round(result.attained(objectives(dataset), True, seconds / 4), 4)}
    for kind, switch in (("with", True), ("without", False)):
        found = [t for r in within if (t := times(r, switch)) is not None]
        ttft, tpot = [t[0] for t in found], [t[1] for t in found if t[1] is not None]
        row[kind] = {
            "ttft": {"p50": round(percentile(ttft, 0.5), 4), "p99": round(percentile(ttft, 0.99), 4)},
            "tpot": {"p50": round(percentile(tpot, 0.5), 5), "p99": round(percentile(tpot, 0.99), 5)},
        }
    preemptions = sum(request.preemptions for request in result.requests)
    return row | {"preemptions": preemptions, "transfers": result.transfers}


def part_goodput(factor: float, keep: Callable[[Row], None], known: Row | None = None, only: str = "") -> Row:
    """P50, P90 and P99 of seven systems, three models, three data sets, two clusters; and times at one rate.

    Args:
        known: earlier results, which are taken for all systems but `only` these.
    """
    found: Row = {"settings": [], "improvement": {}}
    before = {(r["cluster"], r["model"], r["dataset"]): r for r in (known or {}).get("settings", ())}
    again = only.split("/") if only else [ROLLING, SPARING, *OTHERS]
    for name, cluster in CLUSTERS.items():
        for model in MODELS:
            for dataset, data in DATASETS.items():
                seconds = data.seconds * factor
                row: Row = {"cluster": name, "model": model, "dataset": dataset, "systems": {}}
                old: Row = before.get((name, model, dataset), {})
                start = 4.0 if dataset == "LongBench" else 20.0
                for system, make in systems(cluster, model, dataset).items():
                    if system in again or not old:
                        began = time.perf_counter()
                        figures = goodput_of(make, dataset, seconds, start)
                        figures["seconds"] = round(time.perf_counter() - began, 1)
                    else:
                        figures = old["systems"][system]
                    row["systems"][system] = figures
                    start = max(0.5, figures["with"]["P90"])
                rate = row["systems"][ROLLING]["with"]["P90"]
                row["at"] = rate
                row["times"] = {
                    s: look(make(), dataset, rate, seconds)
                    if s in again or not old or old["at"] != rate
                    else old["times"][s]
                    for s, make in systems(cluster, model, dataset).items()
                }
                found["settings"].append(row)
                found["improvement"] = improvements(found["settings"])
                keep(found)
                cells = "  ".join(
                    f"{s} {'/'.join(f'{v:.2f}' for v in r['with'].values())}" for s, r in row["systems"].items()
                )
                print(f"{name:4} {model:15} {dataset:9} P90/P50/P99  {cells}", flush=True)
    return found


def improvements(settings: list[Row]) -> Row:
    """How much more rolling prefill does, on average over the settings: of ratios (arithmetic, and geometric). Settings
    in which one of the two reaches nothing are left out and counted."""
    found: Row = {"paper, P90": PAPER}
    for ours in (ROLLING, SPARING):
        for kind, shares in (("with", list(SHARES)), ("without", ["P90"])):
            for share in shares:
                cell = found.setdefault(ours, {}).setdefault(f"{share} {kind} wait", {})
                for other in OTHERS:
                    pairs = [
                        (row["systems"][ours][kind][share], row["systems"][other][kind][share]) for row in settings
                    ]
                    ratios = [mine / theirs for mine, theirs in pairs if mine > 0 and theirs > 0]
                    if ratios:
                        cell[other] = {
                            "settings": len(ratios),
                            "left_out": len(pairs) - len(ratios),
                            "mean": round(statistics.mean(ratios) - 1, 3),
                            "geometric": round(statistics.geometric_mean(ratios) - 1, 3),
                            "least": round(min(ratios) - 1, 3),
                            "most": round(max(ratios) - 1, 3),
                            "better_in": sum(ratio > 1 for ratio in ratios),
                        }
    return found


def part_static(factor: float, keep: Callable[[Row], None]) -> Row:
    """Goodput of 1 to 4 instances in one macro instance, against as many times that of one."""
    found: Row = {}
    for model, dataset, spared in (
        ("CodeLlama2-34B", "ShareGPT", None),
        ("CodeLlama2-34B", "ShareGPT", SPARED),
        ("CodeLlama2-34B", "LongBench", SPARED),
    ):
        rows: list[Row] = []
        for count in (1, 2, 3, 4):
            figures = goodput_of(
                partial(rolling, CLUSTERS["L20"], model, dataset, count, spared),
                dataset,
                DATASETS[dataset].seconds * factor,
                2.0 * count if dataset == "ShareGPT" else 0.5 * count,
                step=1.03,
            )
            rate = figures["with"]["P90"]
            alone = rows[0]["P90"] if rows else rate
            rows.append(
                {"instances": count, "P90": rate, "of_linear": round(rate / (alone * count), 3) if alone else None}
            )
            print(f"static {model} {dataset} {spared} {rows[-1]}", flush=True)
            found[f"{model}, {dataset}, {'mean' if spared is None else 'quantile'}"] = rows
            keep(found)
    return found


def part_dynamic(factor: float, keep: Callable[[Row], None]) -> Row:
    """From 20 to 50 requests per second in steps of 5; instances are added while too few requests meet objectives."""
    cluster, model, dataset = CLUSTERS["L20"], "CodeLlama2-34B", "ShareGPT"
    each = 40.0 * factor
    requests: list[TraceRequest] = []
    for number, rate in enumerate(range(20, 55, 5)):
        for request in workload(dataset, rate, each, seed=number + 1):
            requests.append(structs.replace(request, arrival=request.arrival + number * each))
    rules = ScalingRules(target=0.9, window=10.0, patience=4.0, least=6, most=48)
    found: Row = {}
    for name, more in (
        ("scaled", {"scaling": rules, "start_seconds": 5.0, "bounds": Bounds(4, 16)}),
        ("not scaled", {"bounds": Bounds(4, 16)}),
    ):
        result = rolling(cluster, model, dataset, 8, SPARED, most=48, **more)(requests)
        together = result.together
        assert together is not None
        spans = []
        for number, rate in enumerate(range(20, 55, 5)):
            after, before = number * each, (number + 1) * each
            replicas = [count for when, count in together.counts if when < before]
            spans.append(
                {
                    "rate": rate,
                    "attained": round(result.attained(objectives(dataset), True, after, before), 4),
                    "instances_at_end": replicas[-1],
                }
            )
        found[name] = {"spans": spans, "moves": together.moves, "replicas": together.counts}
        print(f"dynamic {name}: {spans} moves {together.moves}", flush=True)
        keep(found)
    return found


def part_ablation(factor: float, keep: Callable[[Row], None]) -> Row:
    """What each constraint of Algorithm 2 is worth, in one setting: goodput without it."""
    cluster, model, dataset = CLUSTERS["L20"], "CodeLlama2-34B", "ShareGPT"
    seconds = DATASETS[dataset].seconds * factor
    found: Row = {}
    ttft = DATASETS[dataset].ttft
    variants: dict[str, RollingObjectives] = {
        "mean of saved time": RollingObjectives(ttft, TPOT),
        "half have less": RollingObjectives(ttft, TPOT, 0.5),
        "a quarter has less": RollingObjectives(ttft, TPOT, 0.25),
        "a twentieth has less": RollingObjectives(ttft, TPOT, 0.05),
        "no TTFT constraint": RollingObjectives(1e9, TPOT),
        "no TPOT constraint": RollingObjectives(ttft, 1e9),
        "window of half the objective": RollingObjectives(ttft / 2, TPOT, 0.25),
    }
    for name, limits in variants.items():
        make = partial(rolling, cluster, model, dataset, limits=limits)
        found[name] = goodput_of(make, dataset, seconds, 20.0)
        print(f"ablation {name}: {found[name]}", flush=True)
        keep(found)
    return found


def part_handles(factor: float, keep: Callable[[Row], None]) -> Row:
    """What it takes to hand a replica with 256 requests to another macro instance: to bytes, and back."""
    member = Member("u0", 100_000, TPOT)
    for number in range(256):
        member.admitted(f"request-{number:08d}-{'x' * 24}", 500, 0.05, float(number))
        member.prefilled(f"request-{number:08d}-{'x' * 24}", float(number) + 0.05)
    taken = []
    size = 0
    for _ in range(2000):
        began = time.perf_counter()
        data = pack(member, "ipc:///run/muxserve/u0/scheduler.sock")
        handle = unpack(data)
        taken.append((time.perf_counter() - began) * 1e3)
        size = len(data)
        assert handle.member == member
    found: Row = {"requests": 256, "bytes": size, "milliseconds": percentiles(taken), "target_milliseconds": 100}
    print(f"handles {found}")
    keep(found)
    return found


PARTS = {
    "handles": part_handles,
    "static": part_static,
    "dynamic": part_dynamic,
    "ablation": part_ablation,
    "goodput": part_goodput,
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--systems", default="", help="of goodput, with slashes; the others are as they were")
    parser.add_argument("--seconds", type=float, default=1.0, help="factor on how long requests come")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "paper_ecoserve.json")
    given = parser.parse_args()
    report: Row = json.loads(given.out.read_text()) if given.out.exists() else {}
    report["machine"] = machine()
    report.pop("command", None)
    commands: Row = report.setdefault("commands", {})
    factors: Row = report.setdefault("factor_on_seconds", {})
    for name in given.only.split(","):

        def keep(found: Row, name: str = name) -> None:
            report[name] = found
            write_report_quietly(given.out, report)

        began = time.perf_counter()
        factors[name] = given.seconds
        part = PARTS[name]
        if name == "goodput" and given.systems:
            # The command of the others stays as it was.
            part = partial(part_goodput, known=report.get("goodput"), only=given.systems)
            key = f"goodput of {given.systems}"
        else:
            key = name
        systems_too = f' --systems "{given.systems}"' if key != name else ""
        commands[key] = f"python benchmarks/paper/ecoserve.py --only {name}{systems_too} --seconds {given.seconds:g}"
        part(given.seconds, keep)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    write_report(given.out, report)


def write_report_quietly(path: Path, report: Row) -> None:
    """So that what was found is there, whatever happens to the rest."""
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
