"""A fleet whose engines only pretend to compute, against the simulator: the same fleet file, costs and requests.

    python benchmarks/simulated_deploy.py [--gpus] [--rates 1 2] [--duration 60] [--out FILE]

`muxserve deploy --simulated` serves three models of about 0.2 billion weights, of which there are none, and `muxserve
replay` sends a Poisson workload; `muxserve simulate` gets the same file. Costs are the roofline's on both sides. With
`--gpus` the models have 8, 3 and 1 billion weights and are served in two units, each on an H100 that is not there
either; the plan file is the same on both sides, too. Requests before that, each beside a long answer of its unit, tell
what gateway and engines take beside their steps, and the simulator gets it as a profile; their processes do not compete
with the engines, which sleep. Requests to an idle fleet would tell what processes take that have to wake up and have
nothing in the caches. Compared are throughput and latencies (target: means within 5 %).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from against_live import compared, overheads, replayed, run, show, summary_of, worst_error
from report import machine, write_report
from servers import ROOT, ServerError, end_cleanly, muxserve_fleet

from muxserve.costs.devices import device
from muxserve.costs.profile import Overheads, Profile, save_profile
from muxserve.metrics.summary import Summary
from muxserve.workload import LogNormalLengths, ModelLoad, generate, power_law_rates
from muxserve.workload.trace import TraceRequest, write_trace

NAMES = ("large", "middle", "small")
GPU = "H100"


def shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Fields of a config.json."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
    }


ON_CPU = dict.fromkeys(NAMES, shape(1024, 2816, 16, 16, 4))
# Those of Llama 3.1 8B and of Llama 3.2 3B and 1B, but for their vocabularies.
ON_GPUS = {
    "large": shape(4096, 14336, 32, 32, 8),
    "middle": shape(3072, 8192, 28, 24, 8),
    "small": shape(2048, 8192, 16, 32, 8),
}
# Which of them share a GPU, and the SMs that a prefill and a decode engine get.
UNITS, SHARES, KV_BYTES = (("large", "small"), ("middle",)), (0.6, 0.4), 40 << 30
PROMPT, OUTPUT = LogNormalLengths(96, 0.8, 8, 512), LogNormalLengths(64, 0.6, 8, 256)
TARGET = 0.05
# Rounds of requests that the overheads are learnt from.
ROUNDS, SHORT = 6, 16


class Round(NamedTuple):
    """A long answer of so many tokens in each unit, which takes most of the round, and `beside` short ones beside it,
    `apart` seconds from each other, so that they are alone with it."""

    long: Mapping[str, int]
    beside: int
    apart: float


ROUND_ON_CPU = Round({"large": 160}, 3, 1.5)
# As often as in the workloads.
ROUND_ON_GPUS = Round({"large": 750, "middle": 1300}, 9, 0.75)


def fleet_file(folder: Path, rate: float, gpus: bool) -> Path:
    """Three models without weights."""
    models = []
    for name, share in power_law_rates(list(NAMES), rate, 1.3).items():
        path = folder / name
        shutil.copytree(ROOT / "configs/models/atlas", path, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((path / "config.json").read_text()) | (ON_GPUS if gpus else ON_CPU)[name]
        (path / "config.json").write_text(json.dumps(config))
        models.append(
            {
                "name": name,
                "path": str(path),
                "rate": share,
                "max_len": 2048 if gpus else 1024,
                "limits": {"max_wait": "none"},
                "engine_args": {"load_format": "dummy"},
            }
        )
    where = {"cluster": {"gpus": len(UNITS), "gpu_type": GPU}} if gpus else {"kv_pool": {"size": "512MiB"}}
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump({**where, "models": models}))
    return file


def plan_file(folder: Path) -> Path:
    """Two units on a GPU each."""
    prefill, decode = SHARES
    units = [
        {
            "name": f"unit{number}",
            "device": device(GPU).name,
            "devices": [number],
            "kv_bytes": KV_BYTES,
            "policy": "slack",
            "models": [{"model": m, "rate": 1.0, "prefill_share": prefill, "decode_share": decode} for m in models],
        }
        for number, models in enumerate(UNITS)
    ]
    nodes = [{"device": device(GPU).name, "gpus": len(UNITS)}]
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump({"plan_version": 1, "nodes": nodes, "units": units}))
    return file


def sparse_requests(rounds: int, like: Round) -> list[TraceRequest]:
    """So many rounds; short answers are those of the other models in turn."""
    found = []
    for number in range(rounds):
        began = number * (like.beside + 1) * like.apart
        found += [TraceRequest(began, name, 64, tokens) for name, tokens in like.long.items()]
        found += [TraceRequest(began + (1 + n) * like.apart, NAMES[1 + n % 2], 64, SHORT) for n in range(like.beside)]
    return found


def main() -> int:
    """Run everything; exit code 1 if a mean or a throughput is off by more than the target."""
    parser = argparse.ArgumentParser(description="deploy --simulated against the simulator.")
    parser.add_argument("--gpus", action="store_true", help="pretended GPUs, instead of this machine's CPU")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 2.0], help="requests/s in all")
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end_cleanly()
    on = device(GPU).name if options.gpus else "CPU"
    report: dict[str, Any] = {
        "machine": machine(),
        "device": on,
        "duration": options.duration,
        "seed": options.seed,
        "rates": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = fleet_file(folder, max(options.rates), options.gpus)
        plan = ("--plan", str(plan_file(folder))) if options.gpus else ()
        costs = folder / "costs.json"

        def simulated(requests: list[TraceRequest], known: Overheads) -> Summary:
            write_trace(folder / "trace.jsonl", list(NAMES), requests)
            save_profile(Profile(overheads={on: known}), costs)
            words = ("--workload", folder / "trace.jsonl", "--costs", costs, "-o", folder / "simulated.json")
            run("simulate", file, *words, *plan)
            return summary_of(folder / "simulated.json")

        try:
            with muxserve_fleet(file, options=("--simulated", *plan)) as server:
                report["start_seconds"] = round(server.start_seconds, 1)
                report["pss_mib"] = {part: round(size, 1) for part, size in server.pss_by_part().items()}
                like = ROUND_ON_GPUS if options.gpus else ROUND_ON_CPU
                replayed(server.url, NAMES, sparse_requests(1, like), folder)  # the first requests of engines are slow
                sparse = sparse_requests(ROUNDS, like)
                live = replayed(server.url, NAMES, sparse, folder)
                known = overheads(live, lambda told: simulated(sparse, told), Overheads())
                report["overheads"] = {"request": round(known.request, 5), "between": round(known.between, 5)}
                report["sparse"] = compared(live, simulated(sparse, known))
                show("sparse", live, report["sparse"])
                for rate in options.rates:
                    loads = {
                        m: ModelLoad(r, PROMPT, OUTPUT) for m, r in power_law_rates(list(NAMES), rate, 1.3).items()
                    }
                    requests = list(generate(loads, options.duration, options.seed))
                    before = server.cpu_seconds()
                    live = replayed(server.url, NAMES, requests, folder)
                    used = server.cpu_seconds() - before
                    rows = compared(live, simulated(requests, known))
                    report["rates"][f"{rate:g}"] = {"requests": len(requests), "core_seconds": round(used, 1), **rows}
                    show(f"{rate:g} requests/s", live, rows)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    report["worst_error"] = worst_error(report["rates"])
    report["within_target"] = report["worst_error"] <= TARGET
    name = "simulated_deploy_gpus" if options.gpus else "simulated_deploy"
    write_report(options.out or ROOT / f"benchmarks/results/{name}.json", report)
    return 0 if report["within_target"] else 1


if __name__ == "__main__":
    sys.exit(main())
