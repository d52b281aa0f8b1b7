"""Placement by KV pressure: the local search of `placement.balance` on the public problem of 50 cases (ADRS, "PRISM").

    python benchmarks/kv_pressure.py [--out benchmarks/results/kv_pressure.json]

Five to nine GPUs of 80 GB, and twice as many models of 10 to 29 GB with 1 to 9 requests per second and an objective of
5 to 9. The pressure of a GPU is the sum of rate / objective of its models over the memory that they leave free. The
score is 1 / the mean over all cases of the largest pressure: higher is better. `greedy` is Prism's Algorithm 1
(arXiv:2505.04021): the model with the highest rate / objective first, each where the pressure is least. `bound` is the
score if models could be divided: all demand over all free memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import machine, write_report
from placement.balance import balanced

ROOT = Path(__file__).resolve().parents[1]
MEMORY, CASES, SEED = 80, 50, 42


class Case(NamedTuple):
    """GPUs, and for each model its bytes (GB) and its demand."""

    gpus: int
    sizes: list[int]
    demands: list[float]

    def pressure(self, models: Sequence[int]) -> tuple[float, ...]:
        """The KV pressure of a GPU with those models: demand over free memory."""
        free = MEMORY - sum(self.sizes[model] for model in models)
        return (sum(self.demands[model] for model in models) / free if free > 0 else float("inf"),)

    def greedy(self) -> list[list[int]]:
        """Prism's Algorithm 1."""
        places: list[list[int]] = [[] for _ in range(self.gpus)]
        for model in sorted(range(len(self.sizes)), key=lambda each: -self.demands[each]):
            fitting = [items for items in places if self.pressure([*items, model]) < (float("inf"),)]
            min(fitting, key=self.pressure).append(model)
        return places


def cases() -> list[Case]:
    """The public ones: drawn in this order from this generator."""
    draw = np.random.RandomState(SEED)
    found = []
    for _ in range(CASES):
        gpus = int(draw.randint(5, 10))
        models = [(draw.randint(10, 30), draw.randint(1, 10), draw.randint(5, 10)) for _ in range(2 * gpus)]
        found.append(Case(gpus, [int(size) for size, _, _ in models], [rate / slo for _, rate, slo in models]))
    return found


def main() -> None:
    """Place all, and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/kv_pressure.json")
    out = parser.parse_args().out
    worst: dict[str, list[float]] = {"greedy": [], "local search": [], "bound": []}
    seconds = 0.0
    for case in cases():
        start = case.greedy()
        began = time.perf_counter()
        found = balanced(start, case.pressure)
        seconds += time.perf_counter() - began
        worst["greedy"].append(max(map(case.pressure, start))[0])
        worst["local search"].append(max(map(case.pressure, found))[0])
        worst["bound"].append(sum(case.demands) / (case.gpus * MEMORY - sum(case.sizes)))
    scores = {way: round(len(each) / sum(each), 2) for way, each in worst.items()}
    print(scores, f"{1e3 * seconds / CASES:.0f} ms a case")
    write_report(out, {"machine": machine(), "cases": CASES, "scores": scores, "ms_a_case": 1e3 * seconds / CASES})


if __name__ == "__main__":
    main()
