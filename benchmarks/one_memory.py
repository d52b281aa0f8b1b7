"""24 models on few GPUs, as `muxserve deploy` serves them with `memory:`, simulated: what is missing to serve all.

    python benchmarks/one_memory.py [--gpus 4 8] [--seeds 1 2 3] [--out FILE]

The fleet is `configs/many.yaml`, the workload that of docs/plan.md: 3 requests/s in bursty groups of 30 s, ShareGPT's
lengths. `deployed` is what is deployed: weights and KV share one memory, and engines have theirs besides (contexts,
graphs, the largest step of each), also those that rest. The other ways are none that can be
deployed: engines take a part of that, and those that rest take nothing. They say what engines' memory costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import yaml
from report import machine, write_report

from muxserve.config import load_fleet
from muxserve.costs.roofline import Roofline
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.planning.demand.demands import cluster_of, demands_of, memory_of
from muxserve.planning.place.prediction import Simulated
from muxserve.planning.place.sleeping import as_deployed, live_residency
from muxserve.simulator import mode_of
from muxserve.spec import ResidencySpec
from muxserve.workload import open_workload
from placement.demand import Demand
from placement.memory import MemoryRules

ROOT = Path(__file__).resolve().parents[1]
FLEET = ROOT / "configs/many.yaml"
WORKLOAD = "bursty-groups:rate=3,duration=120,phase=30,lengths=sharegpt,seed={seed},max_prompt=2000,max_output=1000"
# The part of their memory besides weights that engines take, by way.
WAYS = {"deployed": 1.0, "engines take 30 %": 0.3, "engines take nothing": 0.0}


def with_engines(made: Simulated, part: float) -> Simulated:
    """The same where engines take that part of their memory, and those that rest nothing if it is less than all."""
    if part == 1.0:
        return made
    rules = MemoryRules.served()
    specs: dict[str, ResidencySpec] = {}
    for unit in made.units(mode_of("muxserve")):
        weights = {each.name: each.architecture.weight_bytes(each.dtype) // unit.tp for each in unit.models}
        spec = made.residency[unit.name]
        models = {
            name: replace(costs, bytes=int(weights[name] + part * (costs.bytes - weights[name])))
            for name, costs in spec.models.items()
        }
        fixed = rules.reserve_bytes + rules.context_bytes
        specs[unit.name] = msgspec.structs.replace(spec, models=models, rules=replace(spec.rules, fixed=fixed))
    return replace(made, residency=specs)


def fleet_on(gpus: int) -> tuple[Simulated, list[Demand]]:
    """The units that are deployed on so many GPUs."""
    declared: Mapping[str, Any] = yaml.safe_load(FLEET.read_text())
    file = FLEET.with_name(f".{FLEET.stem}-{gpus}.yaml")
    file.write_text(yaml.safe_dump({**declared, "cluster": {**declared["cluster"], "gpus": gpus}}))
    try:
        loaded = load_fleet(file, serving=False)
    finally:
        file.unlink()
    cluster = cluster_of(loaded)
    assert cluster is not None, "the fleet is on GPUs"
    demands = demands_of(loaded, ROOT, gpus=memory_of(cluster).items())
    around = Surroundings(MemoryRules.served(loaded.cluster.gpu_memory), loaded.cluster.network)
    return as_deployed(loaded, demands, cluster, around), demands


def main() -> None:
    """Simulate, print a line for each run, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/one_memory.json")
    args = parser.parse_args()
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for gpus in args.gpus:
        made, demands = fleet_on(gpus)
        for way, part in WAYS.items():
            served = with_engines(made, part)
            for seed in args.seeds:
                load = list(open_workload(WORKLOAD.format(seed=seed), [each.name for each in demands]))
                found = live_residency(served, demands, load, Roofline(), lambda *_: None)
                told = found.residency
                assert told is not None, "models sleep"
                run = {
                    "seed": seed,
                    "requests": len(load),
                    "within": round(found.within, 4),
                    "first_token_within": round(found.summary.overall.slo["ttft"], 4),
                    "wakes": told.wakes,
                    "turns": told.switches,
                }
                runs.setdefault(str(gpus), {}).setdefault(way, []).append(run)
                print(f"{gpus} GPUs, {way}: {run}", flush=True)
    write_report(args.out, {"machine": machine(), "workload": WORKLOAD, "runs": runs})


if __name__ == "__main__":
    main()
