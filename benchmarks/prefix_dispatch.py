"""Which replica gets a request: the freest, or one that has a part of its prompt? Simulated.

    python benchmarks/prefix_dispatch.py [--seeds N] [--seconds S] [--replicas N,N] [--out FILE]

Llama-3.1-8B on 2, 4 and 8 A100-80GB, multiplexed, each with a KV cache of 160,000 tokens and prefix caching; requests
do not move. Three kinds of traffic: conversations behind four system prompts, single questions behind one of 32 system
prompts of 2,000 tokens, and requests that share nothing; at a light and at a heavy load.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from report import machine, write_report

from muxserve.costs.measured import TURN_SECONDS
from muxserve.costs.profile import Overheads
from muxserve.costs.roofline import Roofline
from muxserve.metrics import percentile
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.replicas.dispatch import DispatchPolicy, FreestOfQueues, NewRequest
from muxserve.replicas.prefixes import PrefixAware, PrefixRecord
from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad
from muxserve.simulator import Options, ReplicaRules, SimUnit, sim_unit, simulate
from muxserve.workload import TraceRequest, open_workload
from placement.cluster import PlacedModel, PlacedUnit
from placement.demand import Demand

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = planned_architecture("llama-3.1-8b", ROOT)
MODEL = Demand("m", ARCHITECTURE, "bfloat16", max_num_seqs=256, max_num_batched_tokens=4096, max_len=16384)
KV_TOKENS = 160_000
# Requests per second of a replica, light and heavy.
TRAFFIC = {
    "conversations": (
        "conversations:turns=6,think=30,system=500,systems=4,"
        "prompt=lognormal/80/1/8/2000,output=lognormal/150/0.8/8/1000,max_prompt=15000",
        (2.0, 3.5),
    ),
    "shared system prompts": (
        "conversations:turns=1,system=2000,systems=32,prompt=16..256,output=lognormal/150/0.8/8/1000,max_prompt=3000",
        (3.0, 8.0),
    ),
    "plain": ("poisson:lengths=sharegpt", (3.0, 9.0)),
}


class MostCached:
    """The instance with the longest cached prefix; of equals the freest. Load does not matter otherwise."""

    def __init__(self, levels: Levels) -> None:
        self._freest = FreestOfQueues(levels)
        self._record = PrefixRecord()

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy`."""
        cached = [self._record.cached(load.name, request.prefix) for load in loads]
        most = max(cached)
        equal = [load for load, keys in zip(loads, cached, strict=True) if keys == most]
        chosen = self._freest.choose(equal, request)
        self._record.sent(chosen, request.prefix)
        return chosen

    def gone(self, name: str) -> None:
        """See `DispatchPolicy`."""
        self._record.gone(name)


POLICIES: dict[str, Callable[[Levels], DispatchPolicy]] = {
    "freest": FreestOfQueues,
    "prefix": PrefixAware,
    "most cached": MostCached,
}
OPTIONS = Options(Overheads(turn=TURN_SECONDS), sample_seconds=0.0)
Row = dict[str, Any]


def units(count: int) -> list[SimUnit]:
    """The replicas."""
    kv_bytes = round(KV_TOKENS * ARCHITECTURE.kv_bytes_per_token("bfloat16"))
    placed = (PlacedModel("m", 1.0, 0.5, 0.5),)
    return [sim_unit(PlacedUnit(f"u{n}", "A100-80GB", (n,), placed, kv_bytes), {"m": MODEL}) for n in range(count)]


def requests_of(traffic: str, rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """The load."""
    spec, _ = TRAFFIC[traffic]
    return list(open_workload(f"{spec},rate={rate:g},duration={seconds:g},seed={seed}", ["m"]))


def played(policy: str, replicas: int, requests: list[TraceRequest], seconds: float) -> Row:
    """What came of it: those that came after the first fifth."""
    result = simulate(units(replicas), requests, Roofline(), OPTIONS, {"m": ReplicaRules(dispatch=POLICIES[policy])})
    after = [record for record in result.records if record.arrival >= seconds / 5]
    done = [record for record in after if record.ok]
    ttft = [record.ttft for record in done if record.ttft is not None]
    return {
        "requests": len(after),
        "failed": len(after) - len(done),
        "ttft_mean": statistics.fmean(ttft),
        "ttft_p99": percentile(ttft, 0.99),
        "latency_mean": statistics.fmean(record.latency or 0.0 for record in done),
        "latency_p99": percentile([record.latency or 0.0 for record in done], 0.99),
        "cached": sum(r.cached_tokens for r in done) / sum(r.prompt_tokens for r in done),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--replicas", default="2,4,8")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prefix_dispatch.json")
    given = parser.parse_args()
    rows: list[Row] = []
    began = time.perf_counter()
    for traffic, (_, rates) in TRAFFIC.items():
        for replicas in map(int, given.replicas.split(",")):
            for load, rate in zip(("light", "heavy"), rates, strict=True):
                seeds = range(1, given.seeds + 1)
                loads = [requests_of(traffic, rate * replicas, given.seconds, seed) for seed in seeds]
                row: Row = {"traffic": traffic, "replicas": replicas, "load": load, "rate": rate * replicas}
                for policy in POLICIES:
                    runs = [played(policy, replicas, requests, given.seconds) for requests in loads]
                    mean = {key: round(statistics.fmean(run[key] for run in runs), 4) for key in runs[0]}
                    row[policy] = mean | {"seeds": runs}
                rows.append(row)
                cells = "   ".join(
                    f"{p} {row[p]['ttft_mean'] * 1e3:.0f}/{row[p]['ttft_p99'] * 1e3:.0f} ms "
                    f"{row[p]['latency_mean']:.2f} s {row[p]['cached']:.0%}"
                    for p in POLICIES
                )
                print(f"{traffic:22} {replicas} {load} {rate * replicas:g}/s   {cells}", flush=True)
                report = {"machine": machine(), "seconds": given.seconds, "seeds": given.seeds, "rows": rows}
                write_report(given.out, report | {"took_seconds": round(time.perf_counter() - began)})


if __name__ == "__main__":
    main()
