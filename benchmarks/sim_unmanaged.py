"""Three models on two cores, with leases and without, in simulation: the load of `serving_cpu.py` that was served live.

    python benchmarks/sim_unmanaged.py [--rates 6 9 12 18] [--seeds 0 1 2] [--out FILE]

Engines have one thread each and the measured costs of the quickstart's models. Live, three stock vLLM servers took the
place of engines without leases (benchmarks/results/serving_cpu_sleeping.json); each has a front end of its own besides,
which is not modelled. `within` 2 and 4 are the parts of the requests that end within so many times their latency alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import machine, write_report
from muxserve.costs.architecture import read_architecture
from muxserve.costs.measured import latency_model, overheads_on
from muxserve.metrics.summary import summarise
from muxserve.scheduling.types import EngineSetup, KvLayout, ModelProfile, PoolProfile
from muxserve.simulator import AloneSimulation, Options, SimModel, SimUnit, simulate
from muxserve.workload import LogNormalLengths, ModelLoad, generate

ROOT = Path(__file__).resolve().parent.parent
PROFILE = ROOT / "benchmarks/results/profile_quickstart_cpu.json"
# The parts of the load that models have in `serving_cpu.py`.
PARTS = {"arithmetic": 0.75, "atlas": 0.175, "frontdesk": 0.075}
SECONDS, PAGES = 30.0, 40_000


class Way(NamedTuple):
    """The policy, and whether a model has one engine of both phases."""

    policy: str
    both: bool


SYSTEMS = {
    "split, leases": Way("slack", False),
    "split, no leases": Way("free", False),
    "one engine, leases": Way("slack", True),
    "one engine, no leases": Way("free", True),
}


class Figures(NamedTuple):
    """Parts of the requests within two and four times the latency alone; mean seconds per token and of a request."""

    within_two: float
    within_four: float
    tpot: float
    latency: float


def unit(way: Way) -> SimUnit:
    """The two cores, with one thread for each engine."""
    models = []
    for name in PARTS:
        architecture = read_architecture(json.loads((ROOT / "configs/models" / name / "config.json").read_text()))
        profile = ModelProfile(
            name=name,
            rate=1.0,
            kv=KvLayout("pool0", architecture.layers, architecture.kv_heads, block_tokens=16),
            engines=EngineSetup(0.5, 0.5, 64, 2048, both=way.both, elastic=False),
            quota_pages=PAGES // len(PARTS),
            floor_pages=PAGES // 10,
        )
        models.append(SimModel(profile, architecture, "float32", max_len=2048))
    return SimUnit("unit0", "CPU", (0,), tuple(models), (PoolProfile("pool0", PAGES),), way.policy)


def play(way: Way, rate: float, seed: int) -> Figures:
    """Serve `rate` requests per second that way."""
    latency = latency_model(PROFILE)
    prompt, output = LogNormalLengths(96.0, 0.8, 8, 768), LogNormalLengths(96.0, 0.6, 8, 384)
    loads = {name: ModelLoad(rate * part, prompt, output) for name, part in PARTS.items()}
    options = Options(overheads_on(latency, "CPU"), sample_seconds=0.0)
    simulated = unit(way)
    result = simulate([simulated], list(generate(loads, SECONDS, seed)), latency, options)
    overall = summarise(result.records, reference=AloneSimulation([simulated], latency), slo_scales=(2.0, 4.0)).overall
    assert overall.tpot is not None
    assert overall.latency is not None
    return Figures(*overall.attainment["latency"], overall.tpot.mean, overall.latency.mean)


def main() -> int:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[6.0, 9.0, 12.0, 18.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/sim_unmanaged.json")
    options = parser.parse_args()
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for rate in options.rates:
        for name, way in SYSTEMS.items():
            runs = [play(way, rate, seed) for seed in options.seeds]
            means = {key: round(fmean(getattr(run, key) for run in runs), 4) for key in Figures._fields}
            rows.setdefault(f"{rate:g}", {})[name] = means
            print(f"{rate:g} requests/s, {name}: {means}", flush=True)
    write_report(options.out, {"machine": machine(), "seeds": options.seeds, "rates": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
