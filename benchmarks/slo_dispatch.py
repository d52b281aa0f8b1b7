"""Dispatch by predicted latencies against dispatch by freeness, simulated: is a prediction worth its place?

    python benchmarks/slo_dispatch.py [--seeds N] [--seconds S] [--out FILE]

Llama-3.1-8B on four A100-80GB, multiplexed, KV for 160,000 tokens each. `predictive` sends a request where the larger
of its predicted TTFT and TPOT, each over its objective, is least. `packing` fills a replica up to nine tenths of the
objectives before it takes the next, so that others stay empty for what is long. Predictions come from the very costs of
the simulated steps; a live one would know less. With and without migration.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefix_dispatch import ARCHITECTURE, OPTIONS, ROOT, units
from report import machine, write_report

from muxserve.costs.latency import EngineShape
from muxserve.costs.roofline import Roofline
from muxserve.metrics import Objectives, percentile
from muxserve.replicas.dispatch import DispatchPolicy, FreestOfQueues, NewRequest
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad
from muxserve.simulator import ReplicaRules, simulate
from muxserve.workload import open_workload

REPLICAS = 4
OBJECTIVES = Objectives(ttft=1.0, tpot=0.04)
COSTS = Roofline().engine(ARCHITECTURE, EngineShape("A100-80GB", 1, 1.0, "bfloat16"))
# Requests per second of all replicas, busy and overloaded.
TRAFFIC = {
    "ShareGPT": ("poisson:lengths=sharegpt", (48.0, 64.0)),
    "ShareGPT, bursts (cv 4)": ("gamma:cv=4,lengths=sharegpt", (36.0, 48.0)),
    "long and short prompts": ("poisson:lengths=medium", (32.0, 48.0)),
}
Row = dict[str, Any]


class Predictive:
    """Where the larger of TTFT and TPOT over their objectives will be least."""

    def __init__(self, levels: Levels) -> None:
        self._freest = FreestOfQueues(levels)

    def pressure(self, load: InstanceLoad, request: NewRequest) -> float:
        """The larger of the two."""
        waiting, tokens = load.waiting + 1, load.queued_demand + request.demand
        first = COSTS.prefill(tokens, tokens * tokens // (2 * waiting), waiting)
        batch, context = load.running + waiting, load.used + tokens
        following = COSTS.decode(batch, context).seconds(context)
        return max(first / (OBJECTIVES.ttft or 1.0), following / (OBJECTIVES.tpot or 1.0))

    def able(self, loads: Sequence[InstanceLoad], request: NewRequest) -> Sequence[InstanceLoad]:
        """Those with room, or all."""
        return [x for x in loads if self._freest.left(x, request.execution) >= request.demand] or loads

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy`."""
        return min(self.able(loads, request), key=lambda load: self.pressure(load, request))

    def gone(self, name: str) -> None:
        """See `DispatchPolicy`."""


class Packing(Predictive):
    """The fullest of those that keep the objectives, with a tenth to spare."""

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy`."""
        keeping = [(p, x) for x in self.able(loads, request) if (p := self.pressure(x, request)) <= 0.9]
        return max(keeping, key=lambda pair: pair[0])[1] if keeping else super().choose(loads, request)


POLICIES: dict[str, Callable[[Levels], DispatchPolicy]] = {
    "freest": FreestOfQueues,
    "predictive": Predictive,
    "packing": Packing,
}


def played(policy: str, migration: bool, spec: str, rate: float, seconds: float, seed: int) -> Row:
    """What came of those that came after the first fifth."""
    requests = list(open_workload(f"{spec},rate={rate:g},duration={seconds:g},seed={seed},max_prompt=8000", ["m"]))
    rules = ReplicaRules(dispatch=POLICIES[policy], migration=MigrationRules() if migration else None)
    result = simulate(units(REPLICAS), requests, Roofline(), OPTIONS, {"m": rules})
    after = [record for record in result.records if record.arrival >= seconds / 5]
    met = [r.ok and r.ttft is not None and OBJECTIVES.met(r.ttft, r.tpot).get("all", False) for r in after]
    ttft = [record.ttft for record in after if record.ttft is not None]
    return {
        "attained": sum(met) / len(met),
        "ttft_p99": percentile(ttft, 0.99),
        "tpot_p99": percentile([record.tpot for record in after if record.tpot is not None], 0.99),
        "latency_mean": statistics.fmean(record.latency for record in after if record.latency is not None),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "slo_dispatch.json")
    given = parser.parse_args()
    rows: list[Row] = []
    began = time.perf_counter()
    for traffic, (spec, rates) in TRAFFIC.items():
        for rate in rates:
            for migration in (False, True):
                row: Row = {"traffic": traffic, "rate": rate, "migration": migration}
                for policy in POLICIES:
                    seeds = range(1, given.seeds + 1)
                    runs = [played(policy, migration, spec, rate, given.seconds, seed) for seed in seeds]
                    row[policy] = {key: round(statistics.fmean(run[key] for run in runs), 4) for key in runs[0]}
                rows.append(row)
                cells = "   ".join(
                    f"{p} {row[p]['attained']:.1%} {row[p]['ttft_p99']:.2f} s {row[p]['tpot_p99'] * 1e3:.0f} ms"
                    for p in POLICIES
                )
                print(f"{traffic:24} {rate:g}/s {'moves' if migration else 'stays'}   {cells}", flush=True)
                report = {"machine": machine(), "seconds": given.seconds, "seeds": given.seeds, "rows": rows}
                write_report(given.out, report | {"took_seconds": round(time.perf_counter() - began)})


if __name__ == "__main__":
    main()
