"""24 models on few GPUs, as `muxserve deploy` serves them with `memory:`, simulated: what is missing to serve all.

    python benchmarks/one_memory.py [--gpus 4 8] [--seeds 1 2 3] [--out FILE]

The fleet is `configs/many.yaml`, the workload that of docs/plan.md: 3 requests/s in bursty groups of 30 s, ShareGPT's
lengths. `deployed` is what is deployed: weights and KV share one memory, and engines have theirs besides (contexts,
graphs, the largest step of each), also those that rest. `one at a time` is what a proxy can do that swaps servers with
vLLM's sleep mode: each group of GPUs has one model awake, which has them until its requests are served. To its favour
servers that sleep take nothing, wakes take as long as those of engines that rest, and the groups of GPUs and the order
of the models are MuxServe's. The other ways cannot be deployed: engines take a part of their memory, and those that
rest take nothing. They say what engines' memory costs.

With `--defaults` the defaults of `deploy` for such a fleet come one after the other, on 4 GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
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
RULES = MemoryRules.served()
# Bytes of each GPU that are taken whichever models are awake, where engines that rest take nothing.
FIXED = RULES.reserve_bytes + RULES.context_bytes
WORKLOAD = "bursty-groups:rate=3,duration=120,phase=30,lengths=sharegpt,seed={seed},max_prompt=2000,max_output=1000"


def one_at_a_time(made: Simulated) -> Simulated:
    """The same with one model awake in each unit, until its requests are served."""
    specs: dict[str, ResidencySpec] = {}
    for name, spec in made.residency.items():
        rules = replace(spec.rules, fixed=FIXED)
        # Two models that take more than half each have no room together.
        half = (rules.limit - rules.always) // 2 + 1
        models = {model: replace(costs, bytes=max(costs.bytes, half)) for model, costs in spec.models.items()}
        specs[name] = msgspec.structs.replace(spec, rules=rules, models=models, turns=None, resting=len(models))
    return replace(made, residency=specs)


def with_engines(part: float, made: Simulated) -> Simulated:
    """The same where engines take that part of their memory, and those that rest nothing."""
    specs: dict[str, ResidencySpec] = {}
    for unit in made.units(mode_of("muxserve")):
        weights = {each.name: each.architecture.weight_bytes(each.dtype) // unit.tp for each in unit.models}
        spec = made.residency[unit.name]
        models = {
            name: replace(costs, bytes=int(weights[name] + part * (costs.bytes - weights[name])))
            for name, costs in spec.models.items()
        }
        specs[unit.name] = msgspec.structs.replace(spec, models=models, rules=replace(spec.rules, fixed=FIXED))
    return replace(made, residency=specs)


WAYS: Mapping[str, Callable[[Simulated], Simulated]] = {
    "deployed": lambda made: made,
    "one at a time": one_at_a_time,
    "engines take 30 %": partial(with_engines, 0.3),
    "engines take nothing": partial(with_engines, 0.0),
}


# What the fleet file says of all models in place of the defaults; those of the policy `free` are the last ones.
LARGE = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "two engines, large steps": {"policy": "slack", "model_defaults": {"engines": "split", **LARGE}},
    "one engine": {"policy": "slack", "model_defaults": LARGE},
    "small steps": {"policy": "slack"},
    "free": {},
    "deployed": {},
}


def by_defaults(seeds: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """What the fleet keeps on 4 GPUs with the first defaults, the first two, and so on. Before the last one, the memory
    of an idle model is free after 1 s."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, says in DEFAULTS.items():
        made, demands = fleet_on(4, says)
        if name != "deployed":
            specs = {
                unit: msgspec.structs.replace(spec, rules=replace(spec.rules, sleep_seconds=1.0))
                for unit, spec in made.residency.items()
            }
            made = replace(made, residency=specs)
        runs[name] = [played(made, demands, seed) for seed in seeds]
        print(f"{name}: {[run['within'] for run in runs[name]]}", flush=True)
    return runs


def played(made: Simulated, demands: list[Demand], seed: int) -> dict[str, Any]:
    """One run of the workload."""
    load = list(open_workload(WORKLOAD.format(seed=seed), [each.name for each in demands]))
    found = live_residency(made, demands, load, Roofline(), lambda *_: None)
    residency = found.residency
    assert residency is not None, "models sleep"
    return {
        "seed": seed,
        "requests": len(load),
        "within": round(found.within, 4),
        "first_token_within": round(found.summary.overall.slo["ttft"], 4),
        "wakes": residency.wakes,
        "turns": residency.switches,
    }


def fleet_on(gpus: int, says: Mapping[str, Any] = MappingProxyType({})) -> tuple[Simulated, list[Demand]]:
    """The units that are deployed on so many GPUs, of a fleet file that also says that."""
    declared: Mapping[str, Any] = yaml.safe_load(FLEET.read_text())
    file = FLEET.with_name(f".{FLEET.stem}-{gpus}.yaml")
    file.write_text(yaml.safe_dump({**declared, **says, "cluster": {**declared["cluster"], "gpus": gpus}}))
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
    parser.add_argument("--defaults", action="store_true", help="also the defaults, one after the other")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/one_memory.json")
    args = parser.parse_args()
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for gpus in args.gpus:
        made, demands = fleet_on(gpus)
        for way, changed in WAYS.items():
            served = changed(made)
            for seed in args.seeds:
                run = played(served, demands, seed)
                runs.setdefault(str(gpus), {}).setdefault(way, []).append(run)
                print(f"{gpus} GPUs, {way}: {run}", flush=True)
    found = {"runs": runs, "defaults": by_defaults(args.seeds)} if args.defaults else {"runs": runs}
    write_report(args.out, {"machine": machine(), "workload": WORKLOAD, **found})


if __name__ == "__main__":
    main()
