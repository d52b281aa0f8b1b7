"""The simulator against the machine it runs on: profile a fleet, simulate a workload, replay the same one on the fleet.

    python benchmarks/sim_vs_live.py [--rates 4 8] [--duration 60] [--profile FILE] [--out FILE]

All in one run, since a shared machine is not as fast at all times: `muxserve profile` measures the engines' steps
(unless a profile is given), the fleet is deployed, and `muxserve replay` sends single requests to the idle fleet, then
the workload. The single requests tell what gateway and unit scheduler add to the first token, and how much of the
cores a request and a token cost outside of the engines. The simulator gets the profile with these three constants, the
same requests, and the fleet's own plan. Compared are throughput and mean latencies (target: within 20 %).
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from against_live import MUXSERVE, compared, overheads, replayed, show, worst_error
from report import machine, write_report
from servers import ROOT, Server, ServerError, end_cleanly, fleet_with, muxserve_fleet

from muxserve.cluster.machine import this_machine
from muxserve.config import load_fleet
from muxserve.costs.front_end import with_front_end
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import Overheads as ProfileOverheads
from muxserve.costs.profile import Profile, load_profile, save_profile
from muxserve.costs.roofline import Roofline
from muxserve.metrics.summary import Summary, summarise
from muxserve.planning.arrangements.base import fleet_model
from muxserve.planning.demands import demands_of
from muxserve.planning.this_machine import plan_machine
from muxserve.planning.unit_plan import resolve_unit
from muxserve.simulator import ControlDelays, Options, mode_of, simulate, units_of
from muxserve.workload import LogNormalLengths, ModelLoad, generate, power_law_rates
from muxserve.workload.trace import TraceRequest
from placement.objective import Objective

ENGINES = "muxserve engine"  # what their processes are called
PROMPT = LogNormalLengths(96, 0.8, 8, 768)
OUTPUT = LogNormalLengths(96, 0.6, 8, 384)
ALONE_TOKENS = 64
# Requests per model and their output tokens: what the front end costs per request and per token comes apart.
SINGLES = ((8, 4), (8, 64), (16, 4))


def profile(fleet: Path, out: Path) -> Profile:
    """Measure the fleet's engines."""
    subprocess.run([str(MUXSERVE), "profile", str(fleet), "-o", str(out), "--threads", "1"], check=True)
    return load_profile(out)


def workload(models: list[str], rate: float, duration: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals, the models' popularity skewed."""
    loads = {m: ModelLoad(r, PROMPT, OUTPUT) for m, r in power_law_rates(models, rate, 1.3).items()}
    return list(generate(loads, duration, seed))


def singles(models: list[str], count: int, output: int, seed: int) -> list[TraceRequest]:
    """Requests far apart: each is alone on the fleet."""
    rng = random.Random(seed)
    requests = [model for model in models for _ in range(count)]
    rng.shuffle(requests)
    return [TraceRequest(0.4 * number, model, ALONE_TOKENS, output) for number, model in enumerate(requests)]


class Singles(NamedTuple):
    """One run of single requests, their tokens, core-seconds outside of the engines, what the client saw."""

    requests: list[TraceRequest]
    tokens: int
    work: float
    summary: Summary


def run_singles(server: Server, models: list[str], count: int, output: int, seed: int, folder: Path) -> Singles:
    """Send them; the work is that of the gateway, the unit scheduler, and the client, which shares the cores too."""
    requests = singles(models, count, output, seed)
    before = server.cpu_seconds(without=ENGINES), client_seconds()
    summary = replayed(server.url, models, requests, folder)
    after = server.cpu_seconds(without=ENGINES), client_seconds()
    work = sum(after) - sum(before)
    return Singles(requests, sum(request.output_tokens for request in requests), work, summary)


def client_seconds() -> float:
    """CPU time of the replays that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def front_end_work(runs: Sequence[Singles]) -> tuple[float, float]:
    """Core-seconds per request and per token: `work = start + request * n + token * tokens` of three runs."""
    first, longer, more = runs
    token = (longer.work - first.work) / (longer.tokens - first.tokens)
    others = len(more.requests) - len(first.requests)
    request = (more.work - first.work - token * (more.tokens - first.tokens)) / others
    return max(0.0, request), max(0.0, token)


def main() -> int:
    """Run everything; exit code 1 if a mean or a throughput is off by more than 20 %."""
    parser = argparse.ArgumentParser(description="The simulator against this machine.")
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--rates", nargs="+", type=float, default=[3.0, 6.0, 9.0], help="requests/s in all")
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="measured just before on this machine")
    parser.add_argument("--save-profile", type=Path, help="write the profile with what was measured of the front end")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/sim_vs_live.json")
    options = parser.parse_args()
    end_cleanly()
    report: dict[str, Any] = {"machine": machine(), "duration": options.duration, "seed": options.seed, "rates": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = load_fleet(options.fleet)
        names = [model.name for model in sorted(fleet.models, key=lambda model: -model.rate)]
        shares = power_law_rates(names, max(options.rates), 1.3)
        file = fleet_with(options.fleet, folder / "fleet.yaml", rates=shares)
        fleet = load_fleet(file)
        measured = load_profile(options.profile) if options.profile else profile(file, folder / "profile.json")
        latency = ProfileModel(measured, beyond=Roofline())
        demands = demands_of(fleet, folder)
        planned = resolve_unit(fleet, this_machine())
        placement = plan_machine([planned], demands, latency, Objective()).placement
        models = {d.name: fleet_model(d, p.max_len) for d, p in zip(demands, planned.unit.models, strict=True)}
        units = units_of(placement, models, mode_of("muxserve"))
        try:
            with muxserve_fleet(file) as server:
                run_singles(server, names, 8, 4, options.seed, folder)  # the first requests of engines are slow
                runs = [run_singles(server, names, *each, options.seed, folder) for each in SINGLES]
                request_work, token_work = front_end_work(runs)
                known = msgspec.structs.replace(
                    measured.overheads.get("CPU", ProfileOverheads()),
                    request_work=request_work / planned.unit.cores,
                    token_work=token_work / planned.unit.cores,
                )

                def simulated(requests: list[TraceRequest], known: ProfileOverheads) -> Summary:
                    delays = ControlDelays.live(known.turn, known.between, known.request)
                    return summarise(simulate(units, requests, with_front_end(latency, known), Options(delays)).records)

                lone = runs[1]
                known = overheads(lone.summary, lambda told: simulated(lone.requests, told), known)
                measured.overheads["CPU"] = known
                report["overheads"] = {key: round(value, 7) for key, value in msgspec.structs.asdict(known).items()}
                print(
                    f"a lone first token takes {known.request * 1e3:.1f} ms beyond its prefill step, a later one "
                    f"{known.between * 1e3:.2f} ms beyond its decode step; outside of engines a request costs "
                    f"{request_work * 1e3:.2f} ms of a core, a token {token_work * 1e3:.2f} ms"
                )
                if options.save_profile:
                    save_profile(measured, options.save_profile)
                for rate in options.rates:
                    requests = workload(names, rate, options.duration, options.seed)
                    live = replayed(server.url, names, requests, folder)
                    rows = report["rates"][str(rate)] = compared(live, simulated(requests, known))
                    show(f"{rate:g} requests/s", live, rows)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    worst = worst_error(report["rates"])
    report["worst_error"] = worst
    report["within_20_percent"] = worst <= 0.2
    write_report(options.out, report)
    return 0 if worst <= 0.2 else 1


if __name__ == "__main__":
    sys.exit(main())
