"""gLLM's evaluation in simulation (arXiv:2504.14775): Qwen2.5-14B and 32B and a model of 100B, each over four GPUs.

    python benchmarks/paper/gllm.py [--seconds 128] [--seeds 3] [--only PART,PART] [--rows NAME/NAME] [--missing]

Parts: settings, scaling, iterations (figure 1), ablation, sensitivity, variants. The four GPUs are L20 in one machine,
over PCIe (20.79 GB/s measured there), or one L20, A100 or A800 in each of four machines (73.28 Gb/s).

Every part prints a table; each row goes to the result file when it is done, so that `--missing` goes on where a run was
stopped, and figure 1 to a picture beside it. docs/pipelined.md discusses them beside the paper's claims. Step times
come from the roofline of the GPUs: nothing here ran on one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from report import machine, write_report

from muxserve.costs import Decode, EngineCosts, EngineShape, LatencyModel, Load, ModelArchitecture
from muxserve.costs.architecture import split_layers
from muxserve.costs.calibration import LINKS
from muxserve.costs.devices import device
from muxserve.costs.profile import Overheads
from muxserve.costs.roofline import Roofline
from muxserve.metrics.definitions import Objectives
from muxserve.metrics.summary import summarise
from muxserve.scheduling.token_throttling import (
    BudgetInputs,
    FixedBudget,
    Throttle,
    TokenBudget,
    TokenThrottling,
    prompt_tokens_ahead,
)
from muxserve.simulator import (
    FleetResult,
    Link,
    Options,
    Pipeline,
    SimUnit,
    lone_unit,
    simulate,
)
from muxserve.simulator.stages import kv_blocks
from muxserve.workload import ModelLoad, TraceRequest, generate
from muxserve.workload.lengths import Lengths, LogNormalLengths, QuantileLengths
from placement.demand import Demand

ROOT = Path(__file__).resolve().parent.parent.parent
COSTS = Roofline()
DTYPE = "bfloat16"
# Part of each GPU's memory: gLLM's release takes 0.9 of what the weights leave, vLLM 0.9 of all.
UTILISATION = 0.9
MODELS = {
    # layers, heads, KV heads, head size, hidden, MLP, vocabulary: config.json of the Hugging Face checkpoints.
    "14B": ModelArchitecture("Qwen2.5-14B", 48, 40, 8, 128, 5120, 13824, 152064, 32768, 32768, DTYPE),
    "32B": ModelArchitecture("Qwen2.5-32B", 64, 40, 8, 128, 5120, 27648, 152064, 32768, 32768, DTYPE),
    # 30 of the 126 layers of Llama-3.1-405B: a checkpoint of 100B is not published.
    "100B": ModelArchitecture("Llama-3.1-100B", 30, 128, 8, 128, 16384, 53248, 128256, 32768, 32768, DTYPE),
}
# ShareGPT as the release's benchmark prunes it (prompts of 4 to 1,024 tokens, answers of 4 to 512), which is not at
# hand: log-normals with means of 220 and 155 tokens; answers are those of the paper, prompts 1/5.2 of Azure's, which is
# how the two relate there. Azure: quantiles of the public conversation trace of 2023, whose answers (mean 211) are
# stretched to the paper's mean of 258.
LENGTHS: dict[str, tuple[Lengths, Lengths]] = {
    "ShareGPT": (LogNormalLengths(160, 1.3, 4, 1024), LogNormalLengths(141, 1.1, 4, 512)),
    "Azure": (
        QuantileLengths(
            1154.7, {0.1: 207, 0.25: 396, 0.5: 1020, 0.75: 1315, 0.9: 2735, 0.95: 4083, 0.99: 4142}, 2, 14050
        ),
        QuantileLengths(
            258.0,
            {
                share: tokens * 258.0 / 211.1
                for share, tokens in zip(
                    (0.1, 0.25, 0.5, 0.6, 0.7, 0.75, 0.9, 0.95, 0.99),
                    (54, 91, 129, 177, 384, 395, 424, 451, 601),
                    strict=True,
                )
            },
            9,
            1222,
        ),
    ),
}
# The LM head weighs as much as 2.8 layers of 14B and 1.6 of 32B.
ASSIGNED = {"14B": (13, 13, 12, 10), "32B": (16, 17, 16, 15)}
# Requests per second on four L20; the last two are more than any of them can do.
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("14B", "ShareGPT"): (4, 8, 12, 16, 20, 24, 28, 40, 56),
    ("14B", "Azure"): (1, 2, 3, 4, 5, 6, 8, 12, 16),
    ("32B", "ShareGPT"): (2, 4, 6, 8, 10, 12, 16, 24, 32),
    ("32B", "Azure"): (0.5, 1, 1.5, 2, 2.5, 3, 4, 6, 8),
    # These on four A800.
    ("100B", "ShareGPT"): (1, 2, 4, 6, 8, 10, 12, 18, 24),
    ("100B", "Azure"): (0.5, 1, 1.5, 2, 2.5, 3, 4, 6, 8),
}


@dataclass(frozen=True)
class Place:
    """`gpus` of a kind, in one machine or each in a machine of its own; what they can do of four L20's rates."""

    device: str
    network: bool = False
    gpus: int = 4
    rates: float = 1.0

    @property
    def link(self) -> Link:
        """Between two stages."""
        return NETWORK if self.network else Link()


# Between machines, bytes per second: 73.28 Gb/s (section 5 of the paper).
NETWORK = Link(73.28e9 / 8, LINKS["network"].latency)
L20 = Place("L20-48GB")
PLACES: dict[str, tuple[Place, tuple[str, ...]]] = {
    "L20 in one machine": (L20, ("14B", "32B")),
    "L20 in four machines": (replace(L20, network=True), ("14B", "32B")),
    "A100-40GB in four machines": (Place("A100-40GB", True, rates=2.0), ("14B", "32B")),
    "A800 in four machines": (Place("A800-80GB", True), ("100B",)),
}
# The rate at which parts other than latency look: the fixed budget is near its limit there.
BUSY = {("14B", "ShareGPT"): 16.0, ("14B", "Azure"): 4.0, ("32B", "ShareGPT"): 8.0, ("32B", "Azure"): 2.0}
# What a request should take at most, seconds; by model, since 32B cannot be as fast as 14B whatever the schedule.
OBJECTIVES = {
    "14B": Objectives(ttft=2.0, tpot=0.2),
    "32B": Objectives(ttft=4.0, tpot=0.4),
    "100B": Objectives(ttft=4.0, tpot=0.4),
}
ATTAINED = 0.9
THROTTLED, FIXED, TENSOR = "throttled", "fixed", "tensor parallel"
Row = dict[str, Any]
# Rows that a part finds, by name.
Rows = Iterator[tuple[str, Row]]


@dataclass(frozen=True)
class Effort:
    """Seconds of arrivals, and how often."""

    seconds: float
    seeds: int


@dataclass(frozen=True)
class System:
    """One engine: a `unit` with a pipeline (of one stage where it is tensor parallel), `overhead` seconds on the host
    before each micro-batch, and step times."""

    unit: SimUnit
    overhead: float = 0.0
    costs: LatencyModel = COSTS

    @property
    def capacity(self) -> int:
        """Tokens of KV."""
        (model,), (pool,) = self.unit.models, self.unit.pools
        return pool.pages // model.profile.kv.pages_per_block * model.profile.kv.block_tokens


@dataclass(frozen=True)
class OverNetwork:
    """Step times of GPUs in several machines: all-reduces cross the network instead of the devices' own link."""

    costs: Roofline

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> NetworkCosts:
        """Costs of that engine."""
        inside = self.costs.engine(architecture, shape)
        on = device(shape.device)
        link = LINKS[on.link]
        fixed = inside.all_reduces(0)
        token = inside.all_reduces(1) - fixed
        return NetworkCosts(
            inside,
            fixed * (NETWORK.latency / link.latency - 1.0),
            token * (on.link_bandwidth * link.efficiency / NETWORK.bandwidth - 1.0),
        )

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """That of the device."""
        return self.costs.slowdowns(device, loads)


@dataclass(frozen=True)
class NetworkCosts:
    """`EngineCosts` whose all-reduces take `fixed` seconds longer, and `token` seconds for each token."""

    inside: EngineCosts
    fixed: float
    token: float

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """Seconds of a prefill step."""
        return self.inside.prefill(tokens, pairs, sequences) + self.fixed + self.token * tokens

    def decode(self, batch: int, context: int) -> Decode:
        """One decode step."""
        step = self.inside.decode(batch, context)
        return step._replace(fixed=step.fixed + self.fixed + self.token * batch)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """That of the same step within a machine: nothing runs beside it here."""
        return self.inside.prefill_load(tokens, pairs, sequences)

    def decode_load(self, batch: int, context: int) -> Load:
        """Likewise."""
        return self.inside.decode_load(batch, context)


def pipeline(model: str, share: float = 1.0, overhead: float = 0.0, place: Place = L20, **changes: Any) -> System:
    """Stages of one GPU each, with that part of the KV cache."""
    memory = device(place.device).memory_bytes * UTILISATION
    layers = changes.pop("layers", None)
    blocks = kv_blocks(MODELS[model], DTYPE, place.gpus, [memory] * place.gpus, split=layers)
    layers = layers or split_layers(MODELS[model].layers, place.gpus)
    how = Pipeline(layers, (place.link,) * (place.gpus - 1), **changes)
    return System(_unit(model, place, int(share * min(blocks)), how), overhead)


def tensor_parallel(model: str, place: Place = L20) -> System:
    """One stage over all GPUs."""
    (blocks,) = kv_blocks(MODELS[model], DTYPE, 1, [device(place.device).memory_bytes * UTILISATION * place.gpus])
    costs = OverNetwork(COSTS) if place.network else COSTS
    return System(_unit(model, place, blocks, Pipeline((MODELS[model].layers,), ())), costs=costs)


def _unit(model: str, place: Place, blocks: int, how: Pipeline) -> SimUnit:
    served = Demand("m", MODELS[model], DTYPE, 1024, 2048)
    ahead = prompt_tokens_ahead(how.stages, 2048, Throttle())
    return lone_unit(
        "unit0", place.device, tuple(range(place.gpus)), served, blocks, pipeline=how, waiting_tokens=ahead
    )


def systems(model: str, place: Place = L20) -> dict[str, tuple[System, Callable[[], TokenBudget]]]:
    """What is compared; chunks and sequences are scheduled the same way in all, but for the budget."""
    return {
        THROTTLED: (pipeline(model, place=place), TokenThrottling),
        FIXED: (pipeline(model, place=place), FixedBudget),
        TENSOR: (tensor_parallel(model, place), FixedBudget),
    }


def workload(lengths: str, rate: float, seconds: float, seed: int = 1) -> list[TraceRequest]:
    """Poisson arrivals."""
    prompt, output = LENGTHS[lengths]
    return list(generate({"m": ModelLoad(rate, prompt, output)}, seconds, seed))


def run(system: System, budget: Callable[[], TokenBudget], requests: list[TraceRequest]) -> FleetResult:
    """Simulate."""
    unit = system.unit
    assert unit.pipeline is not None
    unit = replace(unit, pipeline=replace(unit.pipeline, budget=budget))
    options = Options(Overheads(between=system.overhead), sample_seconds=0.0)
    return simulate([unit], requests, system.costs, options)


def play(system: System, budget: Callable[[], TokenBudget], requests: list[TraceRequest], seconds: float) -> Row:
    """Simulate; figures of all requests, and of the micro-batches made between a quarter of the arrivals and their
    end."""
    result = run(system, budget, requests)
    model = system.unit.models[0].architecture.name.rpartition("-")[2]
    return figures(model, result, seconds)


def figures(model: str, result: FleetResult, seconds: float) -> Row:
    """Times in seconds. `computed_per_second` counts the tokens of the micro-batches, prompt and output, in the time
    looked at: what the engine does while requests come, without the end, when it runs empty."""
    (unit,) = result.units
    made = unit.micro_batches
    assert made is not None
    overall = summarise(result.records, objectives={"m": OBJECTIVES[model]}).overall
    ttft, tpot, latency = overall.ttft, overall.tpot, overall.latency
    assert ttft is not None
    assert tpot is not None
    assert latency is not None
    after, before = seconds / 4, seconds
    spreads = made.spread(after, before)
    computed = sum(step.prefill + step.decode for step in made.steps if after <= step.made < before)
    return {
        "requests": overall.requests,
        "attainment": round(overall.slo["all"], 4),
        "computed_per_second": round(computed / (before - after), 1),
        "tokens_per_second": round(overall.total_tokens_per_second or 0.0, 1),
        "output_tokens_per_second": round(overall.output_tokens_per_second or 0.0, 1),
        "ttft": {"mean": round(ttft.mean, 4), "p99": round(ttft.p99, 4)},
        "tpot": {"mean": round(tpot.mean, 5), "p99": round(tpot.p99, 5)},
        "latency": {"mean": round(latency.mean, 3), "p99": round(latency.p99, 3)},
        "bubble_fraction": round(made.bubble_fraction(after, before), 4),
        "bubbles": [round(each, 3) for each in made.bubbles(after, before)],
        "iterations": {
            name: {"mean": round(each.mean, 4), "variation": round(each.variation, 3)} for name, each in spreads.items()
        },
        "preemptions": sum(record.preemptions for record in result.records),
        "peak_kv": round(unit.peak_pages[0] / sum(unit.pool_pages.values()), 3),
        "seconds_simulated": round(result.seconds, 2),
    }


def show(title: str, row: Row) -> None:
    """One line."""
    tokens = row["iterations"]["tokens"]
    print(
        f"  {title:48s} {row['computed_per_second']:6.0f} tok/s   TTFT {row['ttft']['mean']:7.3f} "
        f"{row['ttft']['p99']:7.3f} s   TPOT {row['tpot']['mean'] * 1e3:6.1f} {row['tpot']['p99'] * 1e3:6.1f} ms   "
        f"latency {row['latency']['mean']:6.2f} s   bubbles {row['bubble_fraction']:5.1%}   "
        f"tokens {tokens['mean']:6.1f} cv {tokens['variation']:4.2f}   attained {row['attainment']:4.0%}"
        + (f"   preempted {row['preemptions']}" if row["preemptions"] else ""),
        flush=True,
    )


def iterations(effort: Effort, missing: Callable[[str], bool]) -> Rows:
    """Figure 1: tokens of the micro-batches one after the other."""
    print("iterations: tokens per micro-batch")
    seconds = effort.seconds
    for (model, lengths), rate in BUSY.items():
        requests = workload(lengths, rate, seconds)
        for system in (FIXED, THROTTLED):
            title = f"{model}, {lengths}, {rate:g}/s, {system}"
            if not missing(title):
                continue
            spec, budget = systems(model)[system]
            result = run(spec, budget, requests)
            row = figures(model, result, seconds)
            made = result.units[0].micro_batches
            assert made is not None
            middle = [step for step in made.steps if step.made >= seconds / 2][:200]
            row["series"] = [[step.prefill, step.decode] for step in middle]
            show(title, row)
            spread = row["iterations"]
            print(f"    prefill {spread['prefill']}   decode {spread['decode']}   seconds {spread['seconds']}")
            yield title, row


# Figures of a point of a curve, which are means over the seeds.
POINT = ("attainment", "computed_per_second", "tokens_per_second", "bubble_fraction", "preemptions")


def averaged(system: System, budget: Callable[[], TokenBudget], lengths: str, rate: float, effort: Effort) -> Row:
    """One system at one rate: means over the seeds."""
    rows = [
        play(system, budget, workload(lengths, rate, effort.seconds, seed + 1), effort.seconds)
        for seed in range(effort.seeds)
    ]
    found: Row = {name: round(statistics.mean(row[name] for row in rows), 4) for name in POINT}
    for name in ("ttft", "tpot", "latency"):
        found[name] = {key: round(statistics.mean(row[name][key] for row in rows), 5) for key in ("mean", "p99")}
    return found


def settings(effort: Effort, missing: Callable[[str], bool]) -> Rows:
    """Latencies and throughput by rate, by GPUs, model and lengths; the most tokens per second that each system
    reaches, and the highest rate at which it keeps the objectives."""
    for where, (place, models) in PLACES.items():
        for model, lengths in itertools.product(models, LENGTHS):
            setting = f"{where}, {model}, {lengths}"
            if not missing(setting):
                continue
            print(f"settings: {setting}")
            curves: dict[str, list[Row]] = {name: [] for name in systems(model, place)}
            for rate in (place.rates * each for each in RATES[model, lengths]):
                for name, (spec, budget) in systems(model, place).items():
                    row = averaged(spec, budget, lengths, rate, effort)
                    curves[name].append({"rate": rate} | row)
                    point(f"{rate:g}/s, {name}", row)
            row = {"curves": curves}
            for figure, of in (
                ("most_computed_per_second", lambda curve: max(each["computed_per_second"] for each in curve)),
                ("rate_within_objectives", sustained),
            ):
                best = {name: of(curve) for name, curve in curves.items()}
                more = {n: round(best[THROTTLED] / best[n] - 1, 3) if best[n] else None for n in (FIXED, TENSOR)}
                row |= {figure: best, f"{figure}_more_than": more}
                print(f"  {figure}: {best}; {THROTTLED} more than {more}", flush=True)
            yield setting, row


def point(title: str, row: Row) -> None:
    """One line of a curve."""
    print(
        f"  {title:24s} {row['computed_per_second']:6.0f} tok/s   TTFT {row['ttft']['mean']:7.3f} s   "
        f"TPOT {row['tpot']['mean'] * 1e3:6.1f} ms   bubbles {row['bubble_fraction']:5.1%}   "
        f"attained {row['attainment']:4.0%}",
        flush=True,
    )


def scaling(effort: Effort, missing: Callable[[str], bool]) -> Rows:
    """The most tokens per second on one, two and four GPUs, at two rates that are more than they can do."""
    for where, model in (("in one machine", "14B"), ("in several machines", "14B"), ("in several machines", "32B")):
        name = f"L20 {where}, {model}, ShareGPT"
        if not missing(name):
            continue
        row: Row = {}
        for gpus in (1, 2, 4) if model == "14B" else (2, 4):
            place = replace(L20, network=where != "in one machine", gpus=gpus)
            rates = [rate * gpus / 4 for rate in RATES[model, "ShareGPT"][-2:]]
            row[str(gpus)] = {
                system: max(averaged(spec, budget, "ShareGPT", rate, effort)["computed_per_second"] for rate in rates)
                for system, (spec, budget) in systems(model, place).items()
            }
            print(f"scaling: {name}, {gpus} GPUs: {row[str(gpus)]}", flush=True)
        yield name, row


def sustained(curve: list[Row]) -> float:
    """The highest rate at which as many requests as wanted keep both objectives, linear between two that were run; 0 if
    the lowest does not."""
    best = 0.0
    for before, after in itertools.pairwise([None, *curve, None]):
        if after is None or after["attainment"] < ATTAINED:
            if after is not None and before is not None:
                part = (before["attainment"] - ATTAINED) / (before["attainment"] - after["attainment"])
                best = before["rate"] + part * (after["rate"] - before["rate"])
            break
        best = after["rate"]
    return round(best, 2)


class WithoutWaiting(Throttle):
    """Eq. 3 without WT: it takes as many prompt tokens as if prompts without end waited."""

    def prefill(self, state: BudgetInputs) -> int:
        """Tokens of prompts."""
        return super().prefill(state._replace(waiting_tokens=sys.maxsize))


class WithoutUtilisation(Throttle):
    """Eq. 3 without UT: the cache never counts as full, and nothing is suspended."""

    def prefill(self, state: BudgetInputs) -> int:
        """Tokens of prompts."""
        return super().prefill(state._replace(kv_free=1.0))


# Both ablations keep the decode half.
ABLATIONS: dict[str, Callable[[], TokenBudget]] = {
    "as in the paper": TokenThrottling,
    "without WT": lambda: TokenThrottling(WithoutWaiting()),
    "without UT": lambda: TokenThrottling(WithoutUtilisation()),
    "fixed budget": FixedBudget,
}


def ablation(effort: Effort, missing: Callable[[str], bool]) -> Rows:
    """Each half of Eq. 3 switched off; then the same with a KV cache of a tenth, which fills up."""
    for share in (1.0, 0.1):
        print(f"ablation, {share:.0%} of the KV cache")
        for (model, lengths), rate in BUSY.items():
            spec = pipeline(model, share)
            for name, budget in ABLATIONS.items():
                title = f"{model}, {lengths}, {rate:g}/s, {share:.0%} KV, {name}"
                if missing(title):
                    row = averaged(spec, budget, lengths, rate, effort)
                    point(title, row)
                    yield title, row


SENSITIVITIES: dict[str, tuple[float, ...]] = {
    "iterations": (1, 2, 4, 8, 16, 32),
    "max_prefill": (256, 512, 1024, 2048, 4096, 8192),
    "min_prefill": (1, 8, 32, 128, 512),
    "kv_threshold": (0.0, 0.05, 0.1, 0.2, 0.4),
}


def sensitivity(effort: Effort, missing: Callable[[str], bool]) -> Rows:
    """The four hyper-parameters, one at a time; with the whole KV cache and with a tenth."""
    for model, lengths, share in (("14B", "ShareGPT", 1.0), ("32B", "Azure", 1.0), ("32B", "Azure", 0.1)):
        spec = pipeline(model, share)
        print(f"sensitivity: {model}, {lengths}, {share:.0%} of the KV cache")
        for parameter, values in SENSITIVITIES.items():
            for value in values:
                throttle = replace(Throttle(), **{parameter: value})
                title = f"{model}, {lengths}, {share:.0%} KV, {parameter} {value:g}"
                if missing(title):
                    budget = partial(TokenThrottling, throttle)
                    row = averaged(spec, budget, lengths, BUSY[model, lengths], effort)
                    point(title, row)
                    yield title, row


def variants(effort: Effort, missing: Callable[[str], bool]) -> Rows:
    """How the pipeline is run, beside the budget: what the paper leaves open."""
    print("variants of the pipeline")
    for (model, lengths), rate in BUSY.items():
        ways = {
            "chunks in a row": pipeline(model),
            "one chunk at a time": pipeline(model, chunk_ahead=False),
            "made ahead": pipeline(model, ahead=True),
            "five, made ahead": pipeline(model, ahead=True, depth=5),
            "2 ms on the host": pipeline(model, overhead=0.002),
            "layers " + ", ".join(map(str, ASSIGNED[model])): pipeline(model, layers=ASSIGNED[model]),
            "one stage, tensor parallel": tensor_parallel(model),
        }
        for (way, spec), system in itertools.product(ways.items(), (FIXED, THROTTLED)):
            title = f"{model}, {lengths}, {rate:g}/s, {way}, {system}"
            if missing(title):
                row = averaged(spec, systems(model)[system][1], lengths, rate, effort)
                point(title, row)
                yield title, row


def plot(report: Row, path: Path) -> None:
    """Figure 1's kind of picture: tokens of two hundred micro-batches in a row, fixed budget beside throttled."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    wanted = [("14B", "ShareGPT"), ("32B", "Azure")]
    figure, axes = plt.subplots(2, 2, figsize=(11, 5), sharex=True, sharey="row")
    for line, (model, lengths) in zip(axes, wanted, strict=True):
        for axis, system in zip(line, (FIXED, THROTTLED), strict=True):
            row = report[f"{model}, {lengths}, {BUSY[model, lengths]:g}/s, {system}"]
            prefill, decode = zip(*row["series"], strict=True)
            axis.stackplot(range(len(prefill)), decode, prefill, labels=("decode", "prefill"), step="post")
            axis.set_title(f"Qwen2.5-{model}, {lengths}, {BUSY[model, lengths]:g}/s: {system}", fontsize=9)
        line[0].set_ylabel("tokens")
    for axis in axes[-1]:
        axis.set_xlabel("micro-batch")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


PARTS: dict[str, Callable[[Effort, Callable[[str], bool]], Rows]] = {
    "settings": settings,
    "ablation": ablation,
    "scaling": scaling,
    "iterations": iterations,
    "variants": variants,
    "sensitivity": sensitivity,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=128.0, help="seconds of arrivals, as in the paper")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of all parts but iterations, which has one")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument(
        "--rows", default="", help='only these rows, with slashes, e.g. "L20 in one machine, 14B, Azure"'
    )
    parser.add_argument("--missing", action="store_true", help="only rows that the result file has not yet")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "paper_gllm.json")
    args = parser.parse_args()
    effort = Effort(args.seconds, args.seeds)
    # Parts and rows that are not run keep their figures.
    report: Row = json.loads(args.out.read_text()) if args.out.exists() else {}
    report |= {
        "machine": machine(),
        "costs": f"roofline, {DTYPE}",
        "kv_tokens": {
            f"{where}, {model}": pipeline(model, place=place).capacity
            for where, (place, models) in PLACES.items()
            for model in models
        },
    }
    for part in args.only.split(","):
        rows: Row = report.setdefault(part, {})
        report.setdefault("efforts", {})[part] = asdict(effort)

        def wanted(row: str, rows: Row = rows) -> bool:
            return not (args.missing and row in rows) and (not args.rows or row in args.rows.split("/"))

        for name, row in PARTS[part](effort, wanted):
            rows[name] = row
            write_report(args.out, report)
        if part == "iterations":
            plot(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
