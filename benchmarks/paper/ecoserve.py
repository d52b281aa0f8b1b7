"""EcoServe's evaluation in simulation (arXiv:2504.18154): 32 L20 with 10 GbE and 16 A800 with 25 GbE, all on PCIe.

    python benchmarks/paper/ecoserve.py [--only PART,PART] [--systems NAME/NAME] [--settings NAME/NAME] [--missing]
        [--seeds N] [--step FACTOR] [--seconds FACTOR] [--out FILE]

Parts: goodput, pipelines, static, dynamic, ablation. Requests come for five minutes, with three seeds: after
a minute a system that cannot keep up may not show it yet. Attainment is not monotone in the rate, so that all rates of
a grid are tried. Eighteen settings take hours: the goodput of a system in a setting is written when it is found, what
is not run (`--systems`, `--settings`) stays as the result file has it, and `--missing` goes on where a run was stopped.

Every part prints a table and is written to the result file as soon as it is there. docs/rolling.md discusses them
beside the paper's claims. Step times come from the roofline of the two GPUs: nothing here ran on one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inputs import llama
from msgspec import structs
from one_phase import OnePhase
from report import machine, write_report
from split import Split, SplitOptions, division

from muxserve.costs import EngineCosts, EngineShape, ModelArchitecture
from muxserve.costs.architecture import split_layers
from muxserve.costs.calibration import LINKS
from muxserve.costs.devices import device
from muxserve.costs.profile import Overheads
from muxserve.costs.roofline import Roofline
from muxserve.costs.step_costs import StepWork
from muxserve.metrics.definitions import Objectives, time_per_token
from muxserve.replicas.dispatch import DispatchPolicy, NewRequest
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.member import LatencyTargets as RollingObjectives
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.scaling import RollingScalingRules
from muxserve.scheduling.token_throttling import FixedBudget, TokenBudget
from muxserve.simulator import (
    Link,
    Options,
    Pipeline,
    ReplicaRules,
    ReplicasResult,
    RingRules,
    SimUnit,
    lone_unit,
    simulate,
)
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.stages import kv_blocks, make_stages
from muxserve.workload import ModelLoad, TraceRequest, generate
from muxserve.workload.lengths import QuantileLengths
from placement.demand import Demand

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
    "A800": Cluster("A800-80GB-PCIe", 2, 3.125e9, {"Llama-30B": 2, "CodeLlama2-34B": 2, "Qwen2-72B": 4}),
}


@dataclass(frozen=True)
class Dataset:
    """Lengths, and the paper's objective for the first token, seconds."""

    prompt: QuantileLengths
    output: QuantileLengths
    ttft: float

    def means(self) -> tuple[int, int]:
        """Means of prompts and answers, tokens, of 4,000 draws."""
        requests = list(generate({"m": ModelLoad(40.0, self.prompt, self.output)}, 100.0, 7))
        return (
            round(statistics.mean(r.prompt_tokens for r in requests)),
            round(statistics.mean(r.output_tokens for r in requests)),
        )


def _lengths(mean: float, median: float, low: int, high: int) -> QuantileLengths:
    return QuantileLengths(mean, {0.5: median}, low, high)


# The data sets are not at hand: means and medians are those of the paper's table 4, prompts are cut at 4,096 tokens as
# there; the other bounds are chosen.
DATASETS = {
    "Alpaca": Dataset(_lengths(20.63, 17, 4, 512), _lengths(163.80, 119, 2, 1024), 1.0),
    "ShareGPT": Dataset(_lengths(343.76, 148, 4, 4096), _lengths(237.20, 152, 2, 2048), 5.0),
    "LongBench": Dataset(_lengths(2686.89, 2736.5, 256, 4096), _lengths(101.78, 19, 2, 1024), 15.0),
}
# For how long requests come, seconds; those after the first quarter count.
SECONDS = 300.0
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


# A good figure of the engines of 2024 is 5 ms of the host for each step, of which the roofline has one.
STEP = 4e-3
OPTIONS = Options(Overheads(between=STEP), sample_seconds=0.0)


def unit_of(cluster: Cluster, model: str, number: int = 0, pipeline: Pipeline | None = None) -> SimUnit:
    """One instance: its KV cache is what nine tenths of its GPUs' memory have beside the weights."""
    architecture, tp = MODELS[model], cluster.tp[model]
    room = device(cluster.device).memory_bytes * UTILISATION * tp - architecture.weight_bytes(DTYPE)
    blocks = int(room // (16 * architecture.kv_bytes_per_token(DTYPE)))
    served = Demand("m", architecture, DTYPE, 256, 2048)
    devices = tuple(range(number * tp, (number + 1) * tp))
    policy = "rolling" if pipeline is None else "free"
    return lone_unit(
        f"i{number}", cluster.device, devices, served, blocks, pipeline=pipeline, waiting_tokens=4096, policy=policy
    )


def costs_of(cluster: Cluster, model: str) -> EngineCosts:
    """Costs of an instance."""
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
    """EcoServe: one macro instance, with scaling of at most `instances`."""
    count = instances or cluster.instances(model)
    rules = RingRules(
        limits or RollingObjectives(DATASETS[dataset].ttft, TPOT, spared),
        expected_output=DATASETS[dataset].means()[1],
        learns_answers=False,
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
    """DistServe or MoonCake. Among the divisions around what `division` says, it has the one that meets the objectives
    best in a trial of a minute, at the rate that `division` expects of it."""
    if not within_node and cluster.device.startswith("L20") and MODELS[model].heads % 8 == 0:
        # One instance per node, so that all KV crosses the network. Llama-30B's 52 heads cannot be divided by eight.
        cluster = replace(cluster, tp={**cluster.tp, model: 8})
    unit, costs = unit_of(cluster, model), costs_of(cluster, model)
    prompt, output = DATASETS[dataset].means()
    tp = cluster.tp[model]
    each = 8 // tp
    on = device(cluster.device)
    inside = Link(on.link_bandwidth * LINKS[on.link].efficiency * tp, 1e-3)
    outside = Link(cluster.network * LINKS["network"].efficiency, 1e-3)
    among = each if within_node else cluster.nodes * each
    first, rate = division(costs, unit, STEP, among, prompt, output, TPOT)

    def divided(prefill: int) -> System:
        if within_node:
            counts, decode = (prefill,) * cluster.nodes, (each - prefill,) * cluster.nodes
        else:
            # Prefill instances are spread over the nodes, so that all network cards send and receive.
            counts = tuple(prefill // cluster.nodes + (n < prefill % cluster.nodes) for n in range(cluster.nodes))
            decode = tuple(each - count for count in counts)
        # MoonCake's KV goes through its pool, over the network also within a node.
        how = SplitOptions(counts, decode, inside if within_node else outside, outside, within_node, not within_node)

        def play(requests: list[TraceRequest]) -> Outcome:
            arrangement = Split(unit, COSTS, how, OPTIONS)
            return Outcome(arrangement.run(requests), arrangement.transfers)

        return play

    trial = workload(dataset, rate * (cluster.nodes if within_node else 1), 60.0)
    candidates = [p for p in (first, first - 1, first + 1) if 0 < p < among]
    best = max(candidates, key=lambda p: divided(p)(trial).attained(objectives(dataset)))
    return divided(best)


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
        if stage.seconds(StepWork(chunk, 1, pairs, batch, 2 * batch * prompt)) + STEP <= TPOT:
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


@dataclass(frozen=True)
class Effort:
    """How long requests come, how often, and the grid of rates."""

    seconds: float = SECONDS
    seeds: int = 3
    step: float = 1.07


@dataclass(frozen=True)
class Choice:
    """Which settings and systems are run; `missing`: of these only what has no result of the same effort."""

    settings: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    missing: bool = False

    def setting(self, name: str) -> bool:
        """Is it run?"""
        return not self.settings or name in self.settings

    def system(self, name: str, known: Row | None, effort: Effort) -> bool:
        """Is it run, in a setting in which it has that result?"""
        if self.missing and known is not None and known["effort"] == asdict(effort):
            return False
        return not self.systems or name in self.systems


ALL = Choice()


class Scan:
    """Goodput of one system in one setting: the largest rate of a geometric grid at which so many requests meet both
    objectives, on average over the seeds. Attainment goes up and down with the rate, so all rates are tried."""

    def __init__(self, make: Callable[[], System], dataset: str, effort: Effort) -> None:
        self.system, self.dataset, self.effort = make(), dataset, effort
        self.found: dict[int, dict[bool, float]] = {}

    def attained(self, place: int, switch: bool) -> float:
        """At the rate step**place."""
        if place not in self.found:
            effort = self.effort
            results = [
                self.system(workload(self.dataset, effort.step**place, effort.seconds, seed + 1))
                for seed in range(effort.seeds)
            ]
            self.found[place] = {
                with_wait: statistics.mean(
                    each.attained(objectives(self.dataset), with_wait, after=effort.seconds / 4) for each in results
                )
                for with_wait in (True, False)
            }
        return self.found[place][switch]

    def over(self, start: float) -> None:
        """Try the rates around `start`: upwards until three quarters of the requests fail, or half of them at two in a
        row, downwards until 99 of 100 meet the objectives at two in a row, or below a fifth of `start` nine tenths do,
        or a fortieth is reached."""
        first = round(math.log(start, self.effort.step))
        place, failed = first, 0
        while failed < 2:
            attained = self.attained(place, True)
            failed = 2 if attained < 0.25 else failed + 1 if attained < SHARES["P50"] else 0
            place += 1
        place = first
        while min(self.attained(each, True) for each in (place, place - 1)) < SHARES["P99"]:
            place -= 1
            rate = self.effort.step**place
            if rate < start / 40 or (rate < start / 5 and self.goodput(SHARES["P90"], True)):
                break

    def goodput(self, share: float, switch: bool) -> float:
        """Requests per second; 0 if no rate that was tried attains `share`."""
        places = [place for place, attained in self.found.items() if attained[switch] >= share]
        return round(self.effort.step ** max(places), 3) if places else 0.0


def goodput_of(make: Callable[[], System], dataset: str, effort: Effort, start: float) -> Row:
    """Rates, requests per second, by percentile, with and without the wait for the phase switch; and the curves."""
    scan = Scan(make, dataset, effort)
    scan.over(start)
    row: Row = {
        "with": {name: scan.goodput(share, True) for name, share in SHARES.items()},
        "without": {"P90": scan.goodput(SHARES["P90"], False)},
        "attained": {
            f"{effort.step**place:.3f}": [round(found[True], 4), round(found[False], 4)]
            for place, found in sorted(scan.found.items())
        },
    }
    row["simulations"] = len(scan.found) * effort.seeds
    return row


def part_goodput(effort: Effort, keep: Callable[[Row], None], known: Row | None = None, choice: Choice = ALL) -> Row:
    """P50, P90 and P99 of seven systems, three models, three data sets, two clusters.

    Args:
        known: earlier results, which stay for what is not chosen.
    """
    found: Row = {"settings": dict((known or {}).get("settings", {})), "improvement": {}}
    for (name, cluster), model, dataset in itertools.product(CLUSTERS.items(), MODELS, DATASETS):
        setting = f"{name}, {model}, {dataset}"
        if not choice.setting(setting):
            continue
        done: Row = found["settings"].setdefault(setting, {})
        start = 4.0 if dataset == "LongBench" else 20.0
        for system, make in systems(cluster, model, dataset).items():
            if choice.system(system, done.get(system), effort):
                began = time.perf_counter()
                figures = goodput_of(make, dataset, effort, start)
                figures |= {"effort": asdict(effort), "seconds": round(time.perf_counter() - began, 1)}
                done[system] = figures
                found["improvement"] = improvements(list(found["settings"].values()))
                keep(found)
                cells = "/".join(f"{value:.2f}" for value in figures["with"].values())
                print(
                    f"{setting:33} {system:18} P50/P90/P99 {cells}   wait in TPOT {figures['without']['P90']:.2f}   "
                    f"{figures['seconds']:.0f} s",
                    flush=True,
                )
            if system in done:
                start = max(0.5, done[system]["with"]["P90"])
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
                        (row[ours][kind][share], row[other][kind][share])
                        for row in settings
                        if ours in row and other in row
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


def part_static(effort: Effort, keep: Callable[[Row], None]) -> Row:
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
                replace(effort, step=1.03),
                2.0 * count if dataset == "ShareGPT" else 0.5 * count,
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


def part_dynamic(effort: Effort, keep: Callable[[Row], None]) -> Row:
    """From 20 to 50 requests per second in steps of 5; instances are added while too few requests meet objectives."""
    cluster, model, dataset = CLUSTERS["L20"], "CodeLlama2-34B", "ShareGPT"
    each = 40.0 * effort.seconds / SECONDS
    requests: list[TraceRequest] = []
    for number, rate in enumerate(range(20, 55, 5)):
        for request in workload(dataset, rate, each, seed=number + 1):
            requests.append(structs.replace(request, arrival=request.arrival + number * each))
    rules = RollingScalingRules(target=0.9, window=10.0, patience=4.0, least=6, most=48)
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


def part_ablation(effort: Effort, keep: Callable[[Row], None]) -> Row:
    """What each constraint of Algorithm 2 is worth, in one setting: goodput without it."""
    cluster, model, dataset = CLUSTERS["L20"], "CodeLlama2-34B", "ShareGPT"
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
        found[name] = goodput_of(make, dataset, effort, 20.0)
        print(f"ablation {name}: {found[name]}", flush=True)
        keep(found)
    return found


def staged(cluster: Cluster, model: str, stages: int, budget: Callable[[], TokenBudget]) -> list[SimUnit]:
    """All instances, the GPUs of each divided among so many stages."""
    architecture, tp = MODELS[model], cluster.tp[model]
    memory = device(cluster.device).memory_bytes * UTILISATION * (tp // stages)
    blocks = min(kv_blocks(architecture, DTYPE, stages, [memory] * stages))
    how = Pipeline(split_layers(architecture.layers, stages), (Link(),) * (stages - 1), budget)
    served = Demand("m", architecture, DTYPE, 256, 2048)
    return [
        lone_unit(
            f"i{number}",
            cluster.device,
            tuple(range(number * tp, (number + 1) * tp)),
            served,
            blocks,
            pipeline=how,
            waiting_tokens=2048 * (stages + 1),
        )
        for number in range(cluster.instances(model))
    ]


def part_pipelines(effort: Effort, keep: Callable[[Row], None], known: Row | None = None) -> Row:
    """Figure 11: instances that are pipelines. Four GPUs each as one stage, as two of two and as four; their prefill
    rolls over them, or steps hold prompts and sequences in instances that know nothing of each other. What is `known`
    stays."""
    cluster, model, dataset = CLUSTERS["L20"], "CodeLlama2-34B", "LongBench"
    found: Row = dict(known or {})
    expected = DATASETS[dataset].means()[1]
    for stages in (2, 1, 4):
        rolled = {
            name: played(
                staged(cluster, model, stages, OnePhase),
                RingRules(
                    RollingObjectives(DATASETS[dataset].ttft, TPOT, spared),
                    expected_output=expected,
                    learns_answers=False,
                ),
            )
            for name, spared in ((ROLLING, None), (SPARING, SPARED))
        }
        mixed = ReplicaRules(dispatch=lambda levels: FewestTokens())
        for name, system in (rolled | {VLLM: played(staged(cluster, model, stages, FixedBudget), mixed)}).items():
            if f"{stages} stages, {name}" in found:
                continue
            figures = goodput_of(lambda system=system: system, dataset, effort, 3.0)
            found[f"{stages} stages, {name}"] = figures
            print(f"pipelines, {stages} stages, {name}: {figures['with']}", flush=True)
            keep(found)
    return found


PARTS = {
    "static": part_static,
    "dynamic": part_dynamic,
    "ablation": part_ablation,
    "pipelines": part_pipelines,
    "goodput": part_goodput,
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas")
    parser.add_argument("--systems", default="", help="systems whose goodput is measured, with slashes")
    parser.add_argument(
        "--settings",
        default="",
        help='settings in which goodput is measured, with slashes: "L20, Llama-30B, Alpaca/..."',
    )
    parser.add_argument("--missing", action="store_true", help="only cases of goodput and pipelines without a result")
    parser.add_argument("--seconds", type=float, default=1.0, help="factor on the seconds of arrivals")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--step", type=float, default=1.07, help="factor between two rates of the grid")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "paper_ecoserve.json")
    given = parser.parse_args()
    report: Row = json.loads(given.out.read_text()) if given.out.exists() else {}
    report["machine"] = machine()
    efforts: Row = report.setdefault("efforts", {})
    effort = Effort(SECONDS * given.seconds, given.seeds, given.step)
    choice = Choice(*(tuple(filter(None, each.split("/"))) for each in (given.settings, given.systems)), given.missing)
    for name in given.only.split(","):

        def keep(found: Row, name: str = name) -> None:
            report[name] = found
            write_report_quietly(given.out, report)

        began = time.perf_counter()
        part = PARTS[name]
        if name == "goodput":
            part = partial(part_goodput, known=report.get("goodput"), choice=choice)
        else:
            efforts[name] = asdict(effort)
            if name == "pipelines" and given.missing:
                part = partial(part_pipelines, known=report.get(name))
        part(effort, keep)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    write_report(given.out, report)


def write_report_quietly(path: Path, report: Row) -> None:
    """So that what was found is there, whatever happens to the rest."""
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
