"""Aegaeon's headline in simulation (SOSP'25): seven models share a GPU when they take turns, token by token.

    python benchmarks/paper/aegaeon.py [--seeds 1 2 3] [--gpus 1] [--seconds 300] [--out FILE]

Seven models of 14B for each H100, two of which have room; 0.1 requests/s each, answers as in ShareGPT. A first
token is to come within 10 s, and then one every 100 ms. In time is a request whose first and whose last token are.
Models sleep and wake without turns (residency) and with them (turns). docs/residency.md discusses the result.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prism import ROOT, WAKE_SECONDS, Mesh, demand, in_time, unit
from report import machine, percentiles, write_report

from muxserve.costs.roofline import Roofline
from muxserve.simulator import simulate
from muxserve.workload import open_workload

MODELS_PER_GPU, RATE = 7, 0.1
TTFT, TPOT = 10.0, 0.1
WAYS = ("residency", "turns")


def attempt(gpus: int, workload: str, way: str) -> dict[str, Any]:
    """Serve the workload so, and what came of it."""
    names = [f"14b-{number:02d}" for number in range(MODELS_PER_GPU * gpus)]
    load = list(open_workload(workload, dict.fromkeys(names, 1.0)))
    demands = [replace(demand(name, RATE), slo_ttft=TTFT, slo_tpot=TPOT) for name in names]
    each_has = [tuple(demands[gpu::gpus]) for gpu in range(gpus)]
    units = [unit(Mesh((gpu,), models), way, WAKE_SECONDS, TTFT)[0] for gpu, models in enumerate(each_has)]
    result = simulate([each for each in units if each is not None], load, Roofline())
    records = result.records
    told = [each.residency for each in result.units if each.residency is not None]
    return {
        "requests": len(records),
        "failed": sum(bool(record.error) for record in records),
        "in_time": round(sum(in_time(record, TTFT, TPOT) for record in records) / len(records), 4),
        "first_token_in_time": round(
            sum(each.ttft is not None and each.ttft <= TTFT for each in records) / len(records), 4
        ),
        "ttft_seconds": percentiles([each.ttft for each in records if each.ttft is not None]),
        "wakes": sum(each.wakes for each in told),
        "switches": sum(each.switches for each in told),
    }


def main() -> None:
    """Simulate all and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/paper_aegaeon.json")
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "slo": {"ttft_seconds": TTFT, "tpot_seconds": TPOT}, "runs": {}}
    for gpus in args.gpus:
        for arrivals in ("poisson", "bursty-groups"):
            for seed in args.seeds:
                workload = (
                    f"{arrivals}:rate={RATE * MODELS_PER_GPU * gpus:g},duration={args.seconds},lengths=sharegpt,"
                    f"max_prompt=2048,max_output=1024,seed={seed}"
                )
                found = {way: attempt(gpus, workload, way) for way in WAYS}
                report["runs"][f"{gpus} GPUs, {workload}"] = found
                shown = {way: (each["in_time"], each["ttft_seconds"]) for way, each in found.items()}
                print(f"{gpus} GPUs, {arrivals}, seed {seed}: {shown}", flush=True)
    write_report(args.out, report)


if __name__ == "__main__":
    main()
