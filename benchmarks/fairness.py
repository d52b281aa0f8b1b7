"""One tenant floods a model: how long the others wait for their first tokens, with and without fairness, in simulation.

    python benchmarks/fairness.py [--out FILE]

A 7B model on one A100-80GB (roofline costs, policy `slack`), chats of 161 tokens in and 338 out at the mean. Three
tenants send `CALM` requests per second each, far less than the model can do; a fourth floods it for the first
half of the time. `with` says whose each request is, so that the virtual token counter (scheduling/fairness.py) chooses
among tenants; `without` says nothing, which is first come, first served; `alone` has no flood.
Writes benchmarks/results/fairness.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "paper"))

from inputs import placed_unit
from policies import Served, model_of
from report import machine, percentiles, write_report

from muxserve.costs.roofline import Roofline
from muxserve.simulator import mode_of, simulate, units_of
from muxserve.workload import Arrivals, LogNormalLengths, ModelLoad, TraceRequest, generate
from placement.cluster import Cluster, Node, Placement

SECONDS = 120.0
MODEL = "chat"
CALM = 1.0
FLOOD = "flood"
TENANTS = ("a", "b", "c")
RATES = (20.0, 60.0)


def load(rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Chats at that rate."""
    lengths = LogNormalLengths(161 / 1.377, 0.8, 1, 644), LogNormalLengths(338 / 1.377, 0.8, 1, 1352)
    return list(generate({MODEL: ModelLoad(rate, *lengths, Arrivals(1.0))}, seconds, seed))


def run(flood: float, fair: bool) -> dict[str, dict[str, float]]:
    """TTFT in seconds of the calm tenants' requests and of the flood's, as percentiles."""
    marked = [(request, name) for seed, name in enumerate(TENANTS) for request in load(CALM, SECONDS, seed)]
    if flood:
        marked += [(request, FLOOD) for request in load(flood, SECONDS / 2, 99)]
    marked.sort(key=lambda each: each[0].arrival)
    served = Served("7b", 1.0)
    model = model_of(MODEL, served.size)
    unit = placed_unit("unit0", 0, 1, {MODEL: (model, 1.0, served.prefill_share, served.decode_share)})
    units = units_of(Placement(Cluster((Node("A100-80GB", 1),)), (unit,)), {MODEL: model}, mode_of("slack"))
    requests = [request for request, _ in marked]
    names = [name for _, name in marked]
    result = simulate(units, requests, Roofline(), tenants=(lambda n: names[n]) if fair else None)
    times: dict[str, list[float]] = {"others": [], FLOOD: []}
    for record, name in zip(result.records, names, strict=True):
        assert record.ttft is not None, record
        times[FLOOD if name == FLOOD else "others"].append(record.ttft)
    return {name: percentiles(values) for name, values in times.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fairness.json")
    args = parser.parse_args()
    rows: dict[str, object] = {"alone": run(0.0, fair=False)}
    for rate in RATES:
        rows[f"flood of {rate:g}/s"] = {"without": run(rate, fair=False), "with": run(rate, fair=True)}
    print(rows)
    write_report(args.out, {"machine": machine(), "unit": "seconds to the first token", "rows": rows})


if __name__ == "__main__":
    main()
