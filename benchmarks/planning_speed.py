"""How long `muxserve plan` takes, simulations of all ways to serve and of other workloads included, and what comes out.

    python benchmarks/planning_speed.py [--sizes 16x32 200x1024] [--loads 1 2 3] [--out FILE]

Fleets are LLaMA 7B to 65B in MuxServe's mix with power-law rates, objectives as of a chat, and the roofline's costs;
where kernel tables are installed (docs/costs.md), also theirs. Seconds are without the import of Python's modules and
the loading of tables (`tables_core_seconds`): `seconds` by the clock, for which nothing else should run, and
`core_seconds` of processor time of all processes together.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.placement import fleet
from benchmarks.report import machine, write_report
from muxserve.config import load_fleet
from muxserve.costs.kernels import KernelModel, package_version
from muxserve.costs.latency import EngineShape, LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.planning.demand.demands import equal_nodes
from muxserve.planning.planner import Planner, options_of

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "A100-80GB"
# Requests per second and GPU at load 1.
RATE = 1.25


def fleet_file(path: Path, models: int, gpus: int, load: float, seed: int) -> Path:
    """A fleet file with `models` models for so many GPUs."""
    declared = [
        {
            "name": demand.name,
            "architecture": demand.architecture.name,
            "rate": round(demand.rate, 4),
            "workload": {"prompt_tokens": demand.prompt_tokens, "output_tokens": demand.output_tokens},
            "slo": {"ttft_ms": 1000, "tpot_ms": 80},
        }
        for demand in fleet(models, load * RATE * gpus / models, seed, 0.9)
    ]
    path.write_text(yaml.safe_dump({"cluster": {"gpus": gpus, "gpu_type": DEVICE}, "models": declared}))
    return path


def _core_seconds() -> float:
    """Processor time of this process and of those that it had start and end."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def load_tables() -> float:
    """Processor time in which kernel tables are imported and loaded, in seconds."""
    began = _core_seconds()
    (demand,) = fleet(1, 1.0, 1, 0.9)
    KernelModel().engine(demand.architecture, EngineShape(DEVICE, dtype=demand.dtype))
    return _core_seconds() - began


def measure(models: int, gpus: int, load: float, robust: bool, costs: str, seed: int = 1) -> dict[str, object]:
    """Plan one fleet."""
    latency: LatencyModel = Roofline() if costs == "roofline" else KernelModel(beyond=Roofline())
    with tempfile.TemporaryDirectory() as folder:
        file = fleet_file(Path(folder) / "fleet.yaml", models, gpus, load, seed)
        loaded = load_fleet(file, serving=False)
        began, began_wall = _core_seconds(), time.monotonic()
        planner = Planner(file, loaded, latency, options_of(loaded, "muxserve", seed), robust=robust)
        found = planner.on_gpus(equal_nodes(gpus, DEVICE, 8))
        core, wall = _core_seconds() - began, time.monotonic() - began_wall
    first, *others = found.rivals
    row: dict[str, object] = {
        "models": models,
        "gpus": gpus,
        "load": load,
        "robust": robust,
        "costs": costs,
        "seconds": round(wall, 2),
        "core_seconds": round(core, 2),
        "way": first.way,
        "score": round(first.score, 3),
        "others": {each.way: round(each.score, 3) for each in others},
        "devices_used": found.plan.devices,
        "missing": len(found.plan.missing),
    }
    print(row, flush=True)
    return row


def main() -> int:
    """Measure all."""
    parser = argparse.ArgumentParser(description="How long a plan takes.")
    parser.add_argument("--sizes", nargs="+", default=["16x32", "200x1024"], help="models x GPUs")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/planning_speed.json")
    options = parser.parse_args()
    kinds, rows, tables = ["roofline"], [], None
    if package_version():
        kinds, tables = ["roofline", "measured"], round(load_tables(), 2)
    for size in options.sizes:
        models, gpus = map(int, size.split("x"))
        # The largest takes long enough once.
        loads = options.loads if gpus <= 64 else options.loads[:1]
        rows += [
            measure(models, gpus, each, robust, kind) for each in loads for robust in (False, True) for kind in kinds
        ]
    targets = {"16 models, 32 GPUs": 3.0, "200 models, 1024 GPUs": 60.0}
    report = {"machine": machine(), "target_seconds": targets, "tables_core_seconds": tables, "plans": rows}
    write_report(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
