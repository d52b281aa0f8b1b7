"""What rolling replicas keep free for answers of unknown length, and what comes of it, in simulation.

    python benchmarks/answer_lengths.py [--out FILE]

Four rolling replicas of a 13B on one L20 each (roofline costs), of which little memory is left for KV, get chats with
lengths of the means and medians of EcoServe's table 4. For each answer a replica keeps free: the `constant` 256 tokens;
as many as it will have (`told`: clients name them as `max_tokens`, as nobody can); the `mean` of all, known beforehand;
what is `learned` from those that have ended, beginning with 256. Objectives: 5 s to the first token with the wait for
the phase switch, and 100 ms per token. Three seeds of a minute each. Writes benchmarks/results/answer_lengths.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "paper"))

from ecoserve import COSTS, DATASETS, DTYPE, OPTIONS, SPARED, TPOT, times
from inputs import llama
from report import machine, write_report

from muxserve.metrics.definitions import Objectives
from muxserve.rolling.member import LatencyTargets
from muxserve.simulator import RingRules, lone_unit, simulate
from muxserve.workload import ModelLoad, TraceRequest, generate
from muxserve.workload.lengths import QuantileLengths
from placement.demand import Demand

TTFT = 5.0
SECONDS = 60.0
SEEDS = (1, 2, 3)
REPLICAS = 4
BLOCK = 16
# Tokens of KV per replica, requests per second.
SETTINGS = {
    "Alpaca": ((3_200, (6.0, 8.0)), (6_400, (8.0, 10.0, 14.0))),
    "ShareGPT": ((6_400, (3.0, 4.0)), (14_400, (6.0, 8.0))),
    "classification": ((3_200, (10.0, 14.0)),),
    "reasoning": ((14_400, (1.0, 1.5)),),
}
# Beside EcoServe's: answers of a few words, and long ones.
LENGTHS = {
    **{name: (each.prompt, each.output) for name, each in DATASETS.items()},
    "classification": (QuantileLengths(200, {0.5: 150}, 4, 2048), QuantileLengths(12, {0.5: 10}, 2, 64)),
    "reasoning": (QuantileLengths(150, {0.5: 100}, 4, 2048), QuantileLengths(1000, {0.5: 800}, 100, 4096)),
}


def rules_of(how: str, requests: list[TraceRequest]) -> RingRules:
    """By what memory is promised."""
    objectives = LatencyTargets(TTFT, TPOT, SPARED)
    if how == "learned":
        return RingRules(objectives)
    mean = round(fmean(request.output_tokens for request in requests))
    longest = max(request.output_tokens for request in requests)
    expected = {"constant": 256, "told": longest, "mean": mean}[how]
    return RingRules(objectives, expected_output=expected, learns_answers=False, max_tokens_told=how == "told")


def run(dataset: str, tokens: int, rate: float, how: str, seed: int) -> dict[str, float]:
    """One minute of requests."""
    prompt, output = LENGTHS[dataset]
    drawn = generate({"m": ModelLoad(rate, prompt, output)}, SECONDS, seed)
    requests = [each for each in drawn if each.prompt_tokens + each.output_tokens <= tokens]
    model = Demand("m", llama("13b"), DTYPE, 256, 2048)
    blocks = tokens // BLOCK
    units = [lone_unit(f"i{n}", "L20-48GB", (n,), model, blocks, policy="rolling") for n in range(REPLICAS)]
    found = simulate(units, requests, COSTS, OPTIONS, {"m": rules_of(how, requests)}).requests
    wanted = Objectives(ttft=TTFT, tpot=TPOT)
    latencies = [times(request, switch=True) for request in found]
    return {
        "attained": fmean(each is not None and wanted.met(*each).get("all", True) for each in latencies),
        "latency": fmean(request.finish - request.arrival for request in found if request.finish is not None),
        "preempted": sum(request.preemptions for request in found) / len(found),
    }


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "answer_lengths.json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dataset, settings in SETTINGS.items():
        for tokens, rates in settings:
            for rate in rates:
                row: dict[str, Any] = {"lengths": dataset, "kv_tokens": tokens, "rate": rate}
                for how in ("constant", "told", "mean", "learned"):
                    runs = [run(dataset, tokens, rate, how, seed) for seed in SEEDS]
                    row[how] = {name: fmean(each[name] for each in runs) for name in runs[0]}
                rows.append(row)
                cells = (
                    f"{how} {row[how]['attained']:.0%}, {row[how]['latency']:.1f} s, {row[how]['preempted']:.1%}"
                    for how in ("constant", "told", "mean", "learned")
                )
                print(f"{dataset}, {tokens} tokens, {rate:g}/s: " + "; ".join(cells), flush=True)
    write_report(arguments.out, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
