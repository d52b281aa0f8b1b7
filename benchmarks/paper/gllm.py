"""gLLM's evaluation in simulation (arXiv:2504.14775): Qwen2.5-14B and 32B, each over four L20.

    python benchmarks/paper/gllm.py [--seconds 128] [--only PART,PART] [--settings MODEL,LENGTHS/...] [--out FILE]

Parts: iterations (figure 1), latency, links, ablation, sensitivity, variants. The four GPUs are in one machine, over
PCIe (20.79 GB/s measured there), or in the second setting one in each of four machines (73.28 Gb/s); `links` has
both beside each other. With `--settings` latency and links run only those, and the result file has them apart.

Every part prints a table; all numbers go to the result file, figure 1 to a picture beside it. docs/pipelined.md
discusses them beside the paper's claims. Step times come from the roofline of an L20: nothing here ran on one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from report import machine, write_report

from muxserve.costs import Decode, EngineCosts, EngineShape, LatencyModel, Load, ModelArchitecture
from muxserve.costs.architecture import split_layers
from muxserve.costs.calibration import LINKS
from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.metrics.definitions import Objectives
from muxserve.metrics.summary import summarise
from muxserve.scheduling.token_throttling import (
    TOKEN_BUDGETS,
    FixedBudget,
    Throttle,
    TokenBudget,
    TokenThrottling,
    prompt_tokens_ahead,
)
from muxserve.simulator import (
    ControlDelays,
    FleetModel,
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

ROOT = Path(__file__).resolve().parent.parent.parent
COSTS = Roofline()
DEVICE, GPUS, DTYPE = "L20-48GB", 4, "bfloat16"
# Of each GPU's memory: gLLM's release takes 0.9 of what the weights leave, vLLM 0.9 of all.
UTILISATION = 0.9
QWEN = {
    # layers, heads, KV heads, head size, hidden, MLP, vocabulary: config.json of the Hugging Face checkpoints.
    "14B": ModelArchitecture("Qwen2.5-14B", 48, 40, 8, 128, 5120, 13824, 152064, 32768, 32768, DTYPE),
    "32B": ModelArchitecture("Qwen2.5-32B", 64, 40, 8, 128, 5120, 27648, 152064, 32768, 32768, DTYPE),
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
# Requests per second; the last two are more than any of them can do.
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("14B", "ShareGPT"): (4, 8, 12, 16, 20, 24, 28, 40, 56),
    ("14B", "Azure"): (1, 2, 3, 4, 5, 6, 8, 12, 16),
    ("32B", "ShareGPT"): (2, 4, 6, 8, 10, 12, 16, 24, 32),
    ("32B", "Azure"): (0.5, 1, 1.5, 2, 2.5, 3, 4, 6, 8),
}
# The rate at which parts other than latency look: the fixed budget is near its limit there.
BUSY = {("14B", "ShareGPT"): 16.0, ("14B", "Azure"): 4.0, ("32B", "ShareGPT"): 8.0, ("32B", "Azure"): 2.0}
# What a request should take at most, seconds; by model, since 32B cannot be as fast as 14B whatever the schedule.
OBJECTIVES = {"14B": Objectives(ttft=2.0, tpot=0.2), "32B": Objectives(ttft=4.0, tpot=0.4)}
ATTAINED = 0.9
# Between machines, bytes per second: 73.28 Gb/s (section 5 of the paper).
NETWORK = Link(73.28e9 / 8, LINKS["network"].latency)
THROTTLED, FIXED, TENSOR = "throttled", "fixed", "tensor parallel"
Row = dict[str, Any]
# What `latency` and `links` run only; all if there are none.
SETTINGS: list[str] = []


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
        return pool.pages // model.profile.pages_per_block * model.profile.block_tokens


@dataclass(frozen=True)
class OverNetwork:
    """Step times of GPUs in several machines: all-reduces cross the network instead of the devices' own link."""

    costs: Roofline

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> NetworkCosts:
        """Of that engine."""
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

    def slowdown(self, device: str, mine: Load, others: tuple[Load, ...]) -> float:
        """That of the device."""
        return self.costs.slowdown(device, mine, others)


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


def pipeline(
    model: str, share: float = 1.0, overhead: float = 0.0, between: Link | None = None, **changes: Any
) -> System:
    """Four stages of one GPU each, with that part of the KV cache."""
    link = between or Link()
    memory = device(DEVICE).memory_bytes * UTILISATION
    blocks = kv_blocks(QWEN[model], DTYPE, GPUS, [memory] * GPUS, split=changes.get("layers"))
    layers = changes.pop("layers", None) or split_layers(QWEN[model].layers, GPUS)
    return System(_unit(model, int(share * min(blocks)), Pipeline(layers, (link,) * (GPUS - 1), **changes)), overhead)


def tensor_parallel(model: str, network: bool = False) -> System:
    """One stage over four GPUs, in one machine or in four."""
    (blocks,) = kv_blocks(QWEN[model], DTYPE, 1, [device(DEVICE).memory_bytes * UTILISATION * GPUS])
    costs = OverNetwork(COSTS) if network else COSTS
    return System(_unit(model, blocks, Pipeline((QWEN[model].layers,), ())), costs=costs)


def _unit(model: str, blocks: int, how: Pipeline) -> SimUnit:
    served = FleetModel("qwen", QWEN[model], DTYPE, 1024, 2048)
    ahead = prompt_tokens_ahead(how.stages, 2048, Throttle())
    return lone_unit("unit0", DEVICE, tuple(range(GPUS)), served, blocks, pipeline=how, waiting_tokens=ahead)


def systems(model: str, network: bool = False) -> dict[str, tuple[System, Callable[[], TokenBudget]]]:
    """What is compared; chunks and sequences are scheduled the same way in all, but for the budget."""
    between = NETWORK if network else Link()
    return {
        THROTTLED: (pipeline(model, between=between), TokenThrottling),
        FIXED: (pipeline(model, between=between), FixedBudget),
        TENSOR: (tensor_parallel(model, network), FixedBudget),
    }


def workload(lengths: str, rate: float, seconds: float, seed: int = 1) -> list[TraceRequest]:
    """Poisson arrivals."""
    prompt, output = LENGTHS[lengths]
    return list(generate({"qwen": ModelLoad(rate, prompt, output)}, seconds, seed))


def run(system: System, budget: Callable[[], TokenBudget], requests: list[TraceRequest]) -> FleetResult:
    """Simulate."""
    unit = system.unit
    assert unit.pipeline is not None
    unit = replace(unit, pipeline=replace(unit.pipeline, budget=budget))
    options = Options(ControlDelays(decode_step=system.overhead), sample_seconds=0.0)
    return simulate([unit], requests, system.costs, options)


def play(system: System, budget: Callable[[], TokenBudget], requests: list[TraceRequest], seconds: float) -> Row:
    """Simulate; figures of all requests, and of the micro-batches made between a quarter of the arrivals and their
    end."""
    start = time.perf_counter()
    result = run(system, budget, requests)
    model = system.unit.models[0].architecture.name.removeprefix("Qwen2.5-")
    return figures(model, result, seconds) | {"seconds_of_simulation": round(time.perf_counter() - start, 2)}


def figures(model: str, result: FleetResult, seconds: float) -> Row:
    """Times in seconds. `computed_per_second` counts the tokens of the micro-batches, prompt and output, in the time
    looked at: what the engine does while requests come, without the end, when it runs empty."""
    (unit,) = result.units
    made = unit.micro_batches
    assert made is not None
    overall = summarise(result.records, objectives={"qwen": OBJECTIVES[model]}).overall
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
        "tokens_per_second": round(overall.total_tokens_per_second, 1),
        "output_tokens_per_second": round(overall.output_tokens_per_second, 1),
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


def iterations(seconds: float) -> Row:
    """Figure 1: tokens of the micro-batches one after the other."""
    print("iterations: tokens per micro-batch")
    rows: Row = {}
    for (model, lengths), rate in BUSY.items():
        requests = workload(lengths, rate, seconds)
        for system in (FIXED, THROTTLED):
            spec, budget = systems(model)[system]
            result = run(spec, budget, requests)
            row = figures(model, result, seconds)
            made = result.units[0].micro_batches
            assert made is not None
            middle = [step for step in made.steps if step.made >= seconds / 2][:200]
            row["series"] = [[step.prefill, step.decode] for step in middle]
            rows[f"{model}, {lengths}, {rate:g}/s, {system}"] = row
            show(f"{model}, {lengths}, {rate:g}/s, {system}", row)
            spread = row["iterations"]
            print(f"    prefill {spread['prefill']}   decode {spread['decode']}   seconds {spread['seconds']}")
    return rows


def latency(seconds: float, network: bool = False) -> Row:
    """Latencies and throughput by rate; the most tokens per second that each system reaches, and the highest rate at
    which it keeps the objectives."""
    rows: Row = {}
    for (model, lengths), rates in RATES.items():
        if SETTINGS and f"{model},{lengths}" not in SETTINGS:
            continue
        print(f"latency: {model}, {lengths}, {'over the network' if network else 'over PCIe'}")
        curves: dict[str, list[Row]] = {name: [] for name in systems(model)}
        for rate in rates:
            requests = workload(lengths, rate, seconds)
            for name, (spec, budget) in systems(model, network).items():
                row = play(spec, budget, requests, seconds)
                curves[name].append({"rate": rate} | row)
                show(f"{rate:g}/s, {name}", row)
        row = {"curves": curves}
        for figure, of in (
            ("most_tokens_per_second", lambda curve: max(each["tokens_per_second"] for each in curve)),
            ("most_computed_per_second", lambda curve: max(each["computed_per_second"] for each in curve)),
            ("rate_within_objectives", sustained),
        ):
            best = {name: of(curve) for name, curve in curves.items()}
            more = {n: round(best[THROTTLED] / best[n] - 1, 3) if best[n] else None for n in (FIXED, TENSOR)}
            row |= {figure: best, f"{figure}_more_than": more}
            print(f"  {figure}: {best}; {THROTTLED} more than {more}")
        rows[f"{model}, {lengths}"] = row
    return rows


def links(seconds: float) -> Row:
    """The paper's second setting, one GPU in each of four machines, beside the first."""
    return {"over PCIe": latency(seconds), "over the network": latency(seconds, network=True)}


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


ABLATIONS = {"as in the paper": "token_throttling", "without WT": "token_throttling_without_wt"} | {
    "without UT": "token_throttling_without_ut",
    "fixed budget": "fixed",
}


def ablation(seconds: float) -> Row:
    """Each half of Eq. 3 switched off; then the same with a KV cache of a tenth, which fills up."""
    rows: Row = {}
    for share in (1.0, 0.1):
        print(f"ablation, {share:.0%} of the KV cache")
        for (model, lengths), rate in BUSY.items():
            spec = pipeline(model, share)
            requests = workload(lengths, rate, seconds)
            for name, budget in ABLATIONS.items():
                title = f"{model}, {lengths}, {rate:g}/s, {share:.0%} KV, {name}"
                rows[title] = play(spec, TOKEN_BUDGETS[budget], requests, seconds)
                show(title, rows[title])
    return rows


SENSITIVITIES: dict[str, tuple[float, ...]] = {
    "iterations": (1, 2, 4, 8, 16, 32),
    "max_prefill": (256, 512, 1024, 2048, 4096, 8192),
    "min_prefill": (1, 8, 32, 128, 512),
    "kv_threshold": (0.0, 0.05, 0.1, 0.2, 0.4),
}


def sensitivity(seconds: float) -> Row:
    """The four hyper-parameters, one at a time; with the whole KV cache and with a tenth."""
    rows: Row = {}
    for model, lengths, share in (("14B", "ShareGPT", 1.0), ("32B", "Azure", 1.0), ("32B", "Azure", 0.1)):
        spec = pipeline(model, share)
        requests = workload(lengths, BUSY[model, lengths], seconds)
        print(f"sensitivity: {model}, {lengths}, {share:.0%} of the KV cache")
        for parameter, values in SENSITIVITIES.items():
            for value in values:
                throttle = replace(Throttle(), **{parameter: value})
                title = f"{model}, {lengths}, {share:.0%} KV, {parameter} {value:g}"
                rows[title] = play(spec, partial(TokenThrottling, throttle), requests, seconds)
                show(title, rows[title])
    return rows


def variants(seconds: float) -> Row:
    """How the pipeline is run, beside the budget: what the paper leaves open."""
    rows: Row = {}
    print("variants of the pipeline")
    for (model, lengths), rate in BUSY.items():
        requests = workload(lengths, rate, seconds)
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
            rows[title] = play(spec, systems(model)[system][1], requests, seconds)
            show(f"{model}, {lengths[:5]}, {way}, {system}", rows[title])
    return rows


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


PARTS: dict[str, Callable[[float], Row]] = {
    "iterations": iterations,
    "latency": latency,
    "links": links,
    "ablation": ablation,
    "sensitivity": sensitivity,
    "variants": variants,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=128.0, help="of arrivals, as long as in the paper")
    parser.add_argument("--only", default=",".join(part for part in PARTS if part != "links"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "paper_gllm.json")
    parser.add_argument("--settings", default="", help="of latency and links, e.g. 14B,ShareGPT/32B,Azure")
    args = parser.parse_args()
    SETTINGS.extend(filter(None, args.settings.split("/")))
    # Parts that are not run keep their figures.
    report: Row = json.loads(args.out.read_text()) if args.out.exists() else {}
    report |= {
        "machine": machine(),
        "costs": f"roofline of an {DEVICE}, {DTYPE}",
        "kv_tokens": {name: pipeline(name).capacity for name in QWEN},
    }
    if not SETTINGS:
        report["seconds_of_arrivals"] = args.seconds
    for part in args.only.split(","):
        key = f"{part} of {args.settings}, {args.seconds:g} s" if SETTINGS else part
        report[key] = PARTS[part](args.seconds)
        write_report(args.out, report)
    if "iterations" in report:
        plot(report["iterations"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
