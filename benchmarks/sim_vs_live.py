"""The simulator against the machine it runs on, with the costs that a fleet learns while it serves.

    python benchmarks/sim_vs_live.py [--fleets eager compiled rolling] [--parts 0.3 0.6 0.9] [--duration 30] [--times 2]

For each fleet, in one run, since a shared machine is not as fast at all times: `muxserve replay` sends as many requests
as it takes at once (its capacity), then workloads to learn from (`--learn-at`, parts of the capacity). The fleet is
asked for the profile that `muxserve profile --from-fleet` writes. Other requests (`--parts`) are then served `--times`
times, and simulated with that profile, which knows nothing of these runs. The client is measured in the workloads to
learn from: by how much later than the gateway it saw first tokens, in the mean of a workload, and in the median of
these. In the simulation it sees all tokens later by that.

Bar: means of TTFT, TPOT and latency are within 15 % of the mean of the live runs, up to 80 % of the capacity. `spread`
is how far the live runs are from each other (highest over lowest, less 1). p99 are reported and have no bar, and
`client_late` is how late the client sent requests, which counts as latency live.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
from against_live import compared, run, show, summary_of
from prometheus_client.parser import text_string_to_metric_families
from report import machine, write_report
from servers import ROOT, Server, ServerError, end_cleanly, fleet_with, muxserve_fleet

from muxserve.cli.simulate_places import places_of
from muxserve.config import load_fleet
from muxserve.costs.measured import ProfileModel, overheads_on
from muxserve.costs.profile import Profile
from muxserve.costs.roofline import Roofline
from muxserve.metrics.records import RequestRecord
from muxserve.metrics.summary import Summary, summarise
from muxserve.simulator import Options, mode_of, simulate
from muxserve.workload import LogNormalLengths, ModelLoad, generate, power_law_rates
from muxserve.workload.trace import TraceRequest, write_trace

PROMPT = LogNormalLengths(96, 0.8, 8, 768)
OUTPUT = LogNormalLengths(96, 0.6, 8, 384)
# The first requests: how many, their tokens of input and output, and seconds from one to the next.
FIRST, FIRST_INPUT, FIRST_OUTPUT, FIRST_APART = 12, 64, 4, 0.4
FIRST_TOKENS = "muxserve_time_to_first_token_seconds"
# Seconds from the client's start to the first request: the start is a part of nothing that is learnt.
LEAD = 5.0
# Requests that are sent at once, and how many of them are under way.
AT_ONCE, IN_FLIGHT = 100, 32
# Judged figures, how far off they may be, and up to which part of the capacity.
JUDGED = ("ttft_mean", "tpot_mean", "latency_mean")
BAR, BELOW = 0.15, 0.8
CPU = "CPU"
FLEETS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("configs/quickstart.yaml", {"enforce_eager": True}),
    "compiled": ("configs/quickstart.yaml", {"enforce_eager": False}),
    "rolling": ("configs/rolling.yaml", {"enforce_eager": True}),
}


class Served(NamedTuple):
    """Requests in order of arrival, and what the client saw of them; by how many seconds it sent them too late (`mean`,
    `p99`), and by how many it saw first tokens later than the gateway, in the mean."""

    requests: list[TraceRequest]
    summary: Summary
    late: dict[str, float]
    client: float


class Live(NamedTuple):
    """All that was seen of one fleet: what it had learnt before the judged workloads, seconds that the client adds to a
    first token, and each judged workload as often as it was served."""

    capacity: float
    learnt: Profile
    client: float
    judged: dict[float, list[Served]]


def workload(names: Sequence[str], rate: float, duration: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals, the models' popularity skewed."""
    loads = {m: ModelLoad(r, PROMPT, OUTPUT) for m, r in power_law_rates(list(names), rate, 1.3).items()}
    return list(generate(loads, duration, seed))


def first_requests(names: Sequence[str]) -> list[TraceRequest]:
    """Requests of one model after the other, so many seconds apart that each is alone on the fleet."""
    models = [names[number % len(names)] for number in range(FIRST)]
    return [TraceRequest(FIRST_APART * i, model, FIRST_INPUT, FIRST_OUTPUT) for i, model in enumerate(models)]


def serve(
    server: Server, names: Sequence[str], requests: list[TraceRequest], folder: Path, lead: float, *more: str
) -> Served:
    """Send them, `lead` seconds after the client has started."""
    seen = first_tokens(server)
    requests = [msgspec.structs.replace(each, arrival=each.arrival + lead) for each in requests]
    trace, report = folder / "trace.jsonl", folder / "replay.json"
    write_trace(trace, list(names), requests)
    run("replay", "--url", server.url, "--workload", trace, "-o", report, *more)
    summary = summary_of(report)
    late: Any = summary.extra["client"]
    seconds, count = (now - then for now, then in zip(first_tokens(server), seen, strict=True))
    ttft = summary.overall.ttft
    assert ttft is not None, "requests are answered"
    return Served(
        sorted(requests, key=lambda request: request.arrival),
        summary,
        {key: round(late["lateness"][key], 5) for key in ("mean", "p99")},
        ttft.mean - seconds / count,
    )


def first_tokens(server: Server) -> tuple[float, float]:
    """The sum of the seconds to the first token that the gateway measured so far, and how many requests they are of."""
    families = text_string_to_metric_families(server.metrics())
    samples = [sample for family in families if family.name == FIRST_TOKENS for sample in family.samples]
    seconds, count = (
        sum(sample.value for sample in samples if sample.name == f"{FIRST_TOKENS}_{what}") for what in ("sum", "count")
    )
    return seconds, count


def measure(file: Path, names: Sequence[str], options: argparse.Namespace, folder: Path) -> Live:
    """Everything that is asked of the live fleet."""
    with muxserve_fleet(file) as server:
        print(f"  serves after {server.start_seconds:.0f} s", flush=True)
        # The first requests of engines are slow.
        serve(server, names, first_requests(names), folder, LEAD)
        at_once = workload(names, AT_ONCE, 1.0, options.seed + 2)
        taken = serve(server, names, at_once, folder, 0.0, "--max-in-flight", str(IN_FLIGHT))
        capacity = taken.summary.overall.requests_per_second or 0.0
        print(f"  {capacity:.1f} requests/s at once", flush=True)

        def loaded(part: float, seed: int, seconds: float) -> Served:
            return serve(server, names, workload(names, part * capacity, seconds, seed), folder, LEAD)

        taught = [loaded(part, options.seed + 1, options.learn_for) for part in options.learn_at]
        with urllib.request.urlopen(f"{server.url}/fleet/profile", timeout=30) as answer:
            learnt = msgspec.json.decode(answer.read(), type=Profile)
        judged: dict[float, list[Served]] = {part: [] for part in options.parts}
        for _ in range(options.times):
            for part in options.parts:
                judged[part].append(loaded(part, options.seed, options.duration))
    return Live(capacity, learnt, median(served.client for served in taught), judged)


def seen_later(record: RequestRecord, seconds: float) -> RequestRecord:
    """By a client that sees all tokens so much later."""
    times = {"first_token": record.first_token, "finish": record.finish}
    later = {name: at + seconds for name, at in times.items() if at is not None}
    return msgspec.structs.replace(record, **later)


def held_against(runs: Sequence[Summary], simulated: Summary) -> dict[str, dict[str, float]]:
    """`compared` with the mean of all live runs, with the lowest and the highest of them."""
    each = [compared(live, simulated) for live in runs]
    rows: dict[str, dict[str, float]] = {}
    for name in each[0]:
        lives = [rows_of[name]["live"] for rows_of in each]
        live, simulation = fmean(lives), each[0][name]["simulated"]
        rows[name] = {
            "live": round(live, 5),
            "lowest": min(lives),
            "highest": max(lives),
            "spread": round(max(lives) / min(lives) - 1, 4),
            "simulated": simulation,
            "error": round(simulation / live - 1, 4),
        }
    return rows


def misses(part: float, rows: dict[str, dict[str, float]]) -> list[str]:
    """The figures that are further than the bar from the live ones, at a load that has one."""
    return [name for name in JUDGED if part < BELOW and abs(rows[name]["error"]) > BAR]


def judge(live: Live, file: Path) -> dict[str, Any]:
    """Simulate what was served with what the fleet had learnt before."""
    latency = ProfileModel(live.learnt, beyond=Roofline())
    placed = places_of(file, None, None, None, None, latency).placed("muxserve")
    mode, options = mode_of("muxserve"), Options(overheads_on(latency, CPU))
    units, rules = placed.units(mode), placed.rules_of(mode)
    parts: dict[str, Any] = {}
    for part, runs in live.judged.items():
        records = simulate(units, runs[0].requests, latency, options, rules).records
        simulated = summarise([seen_later(record, live.client) for record in records])
        rows = held_against([served.summary for served in runs], simulated)
        show(f"{part:g} of capacity", runs[0].summary, rows)
        parts[f"{part:g}"] = {**rows, "misses": misses(part, rows), "client_late": [served.late for served in runs]}
    return {
        "capacity": round(live.capacity, 2),
        "client": round(live.client, 5),
        "request": round(options.overheads.request, 5),
        "parts": parts,
    }


def main() -> int:
    """Run everything; exit code 1 if a figure is beyond its bar."""
    parser = argparse.ArgumentParser(description="The simulator against this machine.")
    parser.add_argument("--fleets", nargs="+", choices=[*FLEETS], default=[*FLEETS])
    parser.add_argument("--parts", nargs="+", type=float, default=[0.3, 0.6, 0.9], help="parts of the capacity")
    parser.add_argument(
        "--learn-at",
        nargs="+",
        type=float,
        default=[0.3, 0.45, 0.6],
        help="parts of the capacity that are served before the judged ones",
    )
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--learn-for", type=float, default=30.0, help="seconds of each workload to learn from")
    parser.add_argument("--times", type=int, default=2, help="times that each judged workload is served")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/sim_vs_live.json")
    options = parser.parse_args()
    end_cleanly()
    report: dict[str, Any] = {
        "machine": machine(),
        **{key: getattr(options, key) for key in ("duration", "times", "seed", "learn_at", "learn_for")},
        "fleets": {},
    }
    try:
        for name in options.fleets:
            print(f"\n=== {name}", flush=True)
            source, engine_args = FLEETS[name]
            names = [m.name for m in sorted(load_fleet(ROOT / source).models, key=lambda model: -model.rate)]
            with tempfile.TemporaryDirectory() as directory:
                folder = Path(directory)
                file = fleet_with(ROOT / source, folder / "fleet.yaml", engine_args=engine_args)
                report["fleets"][name] = judge(measure(file, names, options, folder), file)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    report["missed"] = sum(len(row["misses"]) for fleet in report["fleets"].values() for row in fleet["parts"].values())
    write_report(options.out, report)
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
