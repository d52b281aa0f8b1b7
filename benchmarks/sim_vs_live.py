"""The simulator against the machine it runs on, with the costs that a fleet learns while it serves.

    python benchmarks/sim_vs_live.py [--fleets eager compiled rolling] [--parts 0.3 0.6 0.9] [--duration 30]

Of each fleet, in one run, since a shared machine is not as fast at all times: `muxserve replay` sends as many requests
as it takes at once (its capacity), workloads to learn from (`--learn-at`, parts of the capacity), and then the
workloads that are judged, with other requests and at other rates. Between them the fleet is asked what it has learnt,
as by `muxserve profile --from-fleet`: costs of steps, without waiting for a core, the front end's work, which stretches
jobs beside that (`costs/front_end.py`), and the delays of engines and of requests beside steps. The simulator gets such
a profile; then the workloads. What is measured here is the client's, which the fleet does not see: how much later than
the gateway it saw first tokens of a workload to learn from, in the mean. It sees all tokens so much later than they are
simulated. Bars: means within 5 %, p99 within 10 %.

Ways, from nothing to all that can be known:

* `steps`: the profile as of just before each judged run, its steps alone: without the front end's work and delays.
* `before`: that profile. Nothing of the judged run is known.
* `served`: the profile as of the end of each judged run: the costs that the machine had meanwhile. Latencies are not
  known.

`--profile` adds `profiled`: that profile instead, with the front end's work and delays that were learnt.

A shared machine does not serve the same requests twice in the same time. So each judged workload is served `--times`
times, after all others each time. Each is simulated with `--draws` seeds, and the figures are means of these. `spread`
is how far the live runs are from each other (highest over lowest, less 1), and errors are those of the mean of all
simulations against the mean of all. A figure is missed if it is further than its bar from every live run (`misses`);
`misses_mean` are those that are so far from the mean of the live runs. What the machine itself lets one know is in
`missed_middle`, how many figures the mean of the live runs misses itself, since they are far apart, and in `predicted`:
how often a figure of a live run is within its bar of what is simulated for it, and, as the way `live`, of another live
run of the same requests.

What remains is looked for in pairs of one request live and simulated: how much later its first token came, by the third
of the prompts that it is in, and by how many requests were under way (`remains`, medians in ms). `client_late` is how
late the client sent requests, which counts as latency live.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from against_live import compared, run, show, summary_of
from prometheus_client.parser import text_string_to_metric_families
from report import machine, write_report
from servers import ROOT, Server, ServerError, end_cleanly, fleet_with, muxserve_fleet

from muxserve.cli.simulate_places import places_of
from muxserve.config import load_fleet
from muxserve.costs.front_end import with_front_end
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import Overheads, Profile, load_profile
from muxserve.costs.roofline import Roofline
from muxserve.metrics.records import RequestRecord
from muxserve.metrics.summary import Summary, summarise
from muxserve.simulator import ControlDelays, Options, mode_of, simulate
from muxserve.simulator.setup import TURN_SECONDS
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
# Judged figures, and how far off they may be.
BARS = {
    f"{figure}_{statistic}": bar
    for figure in ("ttft", "tpot", "latency")
    for statistic, bar in (("mean", 0.05), ("p99", 0.10))
}
CPU = "CPU"
FLEETS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("configs/quickstart.yaml", {"enforce_eager": True}),
    "compiled": ("configs/quickstart.yaml", {"enforce_eager": False}),
    "rolling": ("configs/rolling.yaml", {"enforce_eager": True}),
}


class Served(NamedTuple):
    """Requests, and what became of them on the live fleet, both in order of arrival; by how many seconds the client
    sent them too late (`mean`, `p99`); by how many the client saw first tokens later than the gateway, in the mean; and
    what the fleet had learnt before, and at the end."""

    requests: list[TraceRequest]
    records: list[RequestRecord]
    late: dict[str, float]
    client: float
    before: Profile
    learnt: Profile

    @property
    def summary(self) -> Summary:
        """What the client saw."""
        return summarise(self.records)


class Live(NamedTuple):
    """All that was seen of one fleet: what it was to learn from, and each judged workload as often as it was served."""

    capacity: float
    taught: list[Served]
    judged: dict[str, list[Served]]

    @property
    def client(self) -> float:
        """Seconds that the client adds to a first token, in the mean of a workload: the median of those that were
        served before the judged, since a client that was once held up is no rule."""
        return median(served.client for served in self.taught)


def workload(names: Sequence[str], rate: float, duration: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals, the models' popularity skewed."""
    loads = {m: ModelLoad(r, PROMPT, OUTPUT) for m, r in power_law_rates(list(names), rate, 1.3).items()}
    return list(generate(loads, duration, seed))


def first_requests(names: Sequence[str]) -> list[TraceRequest]:
    """Of each model in turn, so many seconds apart that each is alone on the fleet."""
    models = [names[number % len(names)] for number in range(FIRST)]
    return [TraceRequest(FIRST_APART * i, model, FIRST_INPUT, FIRST_OUTPUT) for i, model in enumerate(models)]


def serve(
    server: Server, names: Sequence[str], requests: list[TraceRequest], folder: Path, lead: float, *more: str
) -> Served:
    """Send them, `lead` seconds after the client has started."""
    before, seen = learnt(server), first_tokens(server)
    requests = [msgspec.structs.replace(each, arrival=each.arrival + lead) for each in requests]
    trace, lines, report = folder / "trace.jsonl", folder / "records.jsonl", folder / "replay.json"
    write_trace(trace, list(names), requests)
    run("replay", "--url", server.url, "--workload", trace, "--records", lines, "-o", report, *more)
    records = msgspec.json.decode(_array(lines), type=list[RequestRecord])
    late: Any = summary_of(report).extra["client"]
    seconds, count = (now - then for now, then in zip(first_tokens(server), seen, strict=True))
    ttfts = [record.ttft for record in records if record.ttft is not None]
    return Served(
        sorted(requests, key=lambda request: request.arrival),
        # They are written as they end.
        sorted(records, key=lambda record: record.arrival),
        {key: round(late["lateness"][key], 5) for key in ("mean", "p99")},
        sum(ttfts) / len(ttfts) - seconds / count,
        before,
        learnt(server),
    )


def first_tokens(server: Server) -> tuple[float, float]:
    """Of all requests so far: seconds to the first token that the gateway measured, summed up, and how many."""
    families = text_string_to_metric_families(server.metrics())
    samples = [sample for family in families if family.name == FIRST_TOKENS for sample in family.samples]
    seconds, count = (
        sum(sample.value for sample in samples if sample.name == f"{FIRST_TOKENS}_{what}") for what in ("sum", "count")
    )
    return seconds, count


def _array(lines: Path) -> bytes:
    """JSON Lines as one JSON array."""
    return b"[" + b",".join(lines.read_bytes().splitlines()) + b"]"


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

        def loaded(part: float, seed: int, seconds: float = options.duration) -> Served:
            return serve(server, names, workload(names, part * capacity, seconds, seed), folder, LEAD)

        taught = [loaded(part, options.seed + 1, options.learn_for) for part in options.learn_at]
        judged: dict[str, list[Served]] = {f"{part:g}": [] for part in options.parts}
        for _ in range(options.times):
            for part in options.parts:
                judged[f"{part:g}"].append(loaded(part, options.seed))
    return Live(capacity, taught, judged)


def learnt(server: Server) -> Profile:
    """What the fleet has learnt so far, as `muxserve profile --from-fleet` writes it; without that command's process,
    whose start would be a part of what is learnt."""
    with urllib.request.urlopen(f"{server.url}/fleet/profile", timeout=30) as answer:
        return msgspec.json.decode(answer.read(), type=Profile)


class Played:
    """The simulation of a fleet file under a profile. The client sees tokens `client` seconds later than the
    gateway."""

    def __init__(self, file: Path, profile: Profile, client: float) -> None:
        self._client = client
        self._latency = ProfileModel(profile, beyond=Roofline())
        self._pace = profile.pace.get(CPU)
        placed = places_of(file, None, None, None, None, self._latency).placed("muxserve")
        mode = mode_of("muxserve")
        self._units, self._rules = placed.units(mode), placed.rules_of(mode)

    def records(self, requests: list[TraceRequest], known: Overheads, seed: int) -> list[RequestRecord]:
        """What becomes of the requests, with the random numbers of that `seed`."""
        costs, delays = with_front_end(self._latency, known), ControlDelays.live(known)
        options = Options(delays, pace=self._pace, seed=seed)
        records = simulate(self._units, requests, costs, options, self._rules).records
        return [seen_later(record, self._client) for record in records]


def seen_later(record: RequestRecord, seconds: float) -> RequestRecord:
    """By a client that sees all tokens so much later."""
    times = {"first_token": record.first_token, "finish": record.finish}
    later = {name: at + seconds for name, at in times.items() if at is not None}
    return msgspec.structs.replace(record, **later)


def remains(live: Sequence[RequestRecord], simulated: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Medians of how much later the first token came live, in ms, by thirds of the requests."""
    pairs = [(a, b) for a, b in zip(live, simulated, strict=True) if a.ttft is not None and b.ttft is not None]
    under_way = [sum(1 for o in live if o.finish is not None and o.arrival < a.arrival < o.finish) for a, _ in pairs]

    def thirds(keys: Sequence[float]) -> list[float]:
        late = [a.ttft - b.ttft for a, b in pairs if a.ttft is not None and b.ttft is not None]
        ordered = [late[i] for i in sorted(range(len(late)), key=lambda i: keys[i])]
        size = -(-len(ordered) // 3)
        parts = [ordered[i : i + size] for i in range(0, len(ordered), max(1, size))]
        return [round(1e3 * median(part), 2) for part in parts]

    return {"by_prompt": thirds([a.prompt_tokens for a, _ in pairs]), "by_under_way": thirds(under_way)}


def in_the_mean(live: Summary, drawn: Sequence[Summary]) -> dict[str, dict[str, float]]:
    """`compared` with the mean of what was drawn."""
    each = [compared(live, summary) for summary in drawn]
    rows = {}
    for name, row in each[0].items():
        simulated = sum(rows_of[name]["simulated"] for rows_of in each) / len(each)
        rows[name] = {"live": row["live"], "simulated": simulated, "error": simulated / row["live"] - 1}
    return rows


def held_against(runs: Sequence[Served], simulated: Sequence[Sequence[Summary]]) -> dict[str, dict[str, float]]:
    """`compared` with the mean of all live runs, with the lowest and the highest of them. Of each run there are the
    simulations that were drawn."""
    each = [in_the_mean(run.summary, drawn) for run, drawn in zip(runs, simulated, strict=True)]
    rows: dict[str, dict[str, float]] = {}
    for name in each[0]:
        lives = [rows_of[name]["live"] for rows_of in each]
        live, simulation = (sum(rows_of[name][key] for rows_of in each) / len(each) for key in ("live", "simulated"))
        rows[name] = {
            "live": round(live, 5),
            "lowest": min(lives),
            "highest": max(lives),
            "spread": round(max(lives) / min(lives) - 1, 4),
            "simulated": round(simulation, 5),
            "error": round(simulation / live - 1, 4),
            "nearest": round(min((simulation / each_live - 1 for each_live in lives), key=abs), 4),
        }
    return rows


def predicted(pairs: Sequence[tuple[Summary, Sequence[Summary]]]) -> tuple[int, int]:
    """Of pairs of a live run and what is said of it: how many figures are within their bars, of how many."""
    rows = [in_the_mean(*pair) for pair in pairs]
    errors = [(row["error"], bar) for each in rows for name, row in each.items() if (bar := BARS.get(name))]
    return sum(abs(error) <= bar for error, bar in errors), len(errors)


def misses(rows: dict[str, dict[str, float]], error: str = "nearest") -> list[str]:
    """The figures that are further than their bar from every live run; or, by their `error`, from the mean of all."""
    return [name for name, bar in BARS.items() if abs(rows[name][error]) > bar]


def misses_of_the_middle(rows: dict[str, dict[str, float]]) -> list[str]:
    """The figures of which the mean of the live runs is further than their bar from every one."""
    return [
        name
        for name, bar in BARS.items()
        if min(abs(rows[name]["live"] / rows[name][end] - 1) for end in ("lowest", "highest")) > bar
    ]


def judge(live: Live, file: Path, given: Profile | None, draws: int) -> dict[str, Any]:
    """Simulate what was served with costs of each kind, with so many seeds."""
    found: dict[str, Any] = {
        "capacity": round(live.capacity, 2),
        "client": round(live.client, 5),
        "predicted": {},
        "ways": {},
    }
    again = [(a.summary, [b.summary]) for runs in live.judged.values() for a in runs for b in runs if a is not b]
    if again:
        found["predicted"]["live"] = predicted(again)
    ways: dict[str, Callable[[Served], tuple[Profile, Overheads]]] = {
        "steps": lambda run: (run.before, Overheads(request=TURN_SECONDS / 2)),
        "before": lambda run: (run.before, _overheads(run.before)),
        "served": lambda run: (run.learnt, _overheads(run.learnt)),
    }
    if given is not None:
        ways["profiled"] = lambda run: (given, _overheads(run.before))
    for way, told in ways.items():
        rows: dict[str, Any] = {}
        pairs: list[tuple[Summary, list[Summary]]] = []
        for part, runs in live.judged.items():
            first: list[RequestRecord] = []
            summaries = []
            for served in runs:
                profile, known = told(served)
                played = Played(file, profile, live.client)
                drawn = [played.records(served.requests, known, seed) for seed in range(draws)]
                summaries.append([summarise(each) for each in drawn])
                first = first or drawn[0]
            pairs += zip((run.summary for run in runs), summaries, strict=True)
            row: dict[str, Any] = dict(held_against(runs, summaries))
            show(f"{part} of capacity, {way}", runs[0].summary, row)
            rows[part] = {
                **row,
                "misses": misses(row),
                "misses_mean": misses(row, "error"),
                "misses_middle": misses_of_the_middle(row),
                "remains": remains(runs[0].records, first),
                "client_late": [run.late for run in runs],
                "friction": [_frictions(run.learnt) for run in runs],
                "overheads": [_rounded(msgspec.structs.asdict(told(run)[1])) for run in runs],
            }
            print(f"  misses: {', '.join(rows[part]['misses']) or 'none'}; {rows[part]['remains']}", flush=True)
        found["predicted"][way] = predicted(pairs)
        found["ways"][way] = {"parts": rows}
    return found


def _overheads(profile: Profile) -> Overheads:
    """What was learnt beside steps."""
    return profile.overheads.get(CPU, Overheads())


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 7) for key, value in seconds.items()}


def _frictions(profile: Profile) -> dict[str, list[float]]:
    """What neighbours were found to cost prefill and decode steps, by model."""
    return {each.model: [round(each.prefill_friction, 3), round(each.decode_friction, 3)] for each in profile.engines}


def main() -> int:
    """Run everything; exit code 1 if no way of costs is within the bars everywhere."""
    parser = argparse.ArgumentParser(description="The simulator against this machine.")
    parser.add_argument("--fleets", nargs="+", choices=[*FLEETS], default=[*FLEETS])
    parser.add_argument("--parts", nargs="+", type=float, default=[0.3, 0.6, 0.9], help="of the capacity")
    parser.add_argument(
        "--learn-at",
        nargs="+",
        type=float,
        default=[0.3, 0.5, 0.7],
        help="parts of the capacity that are served before the judged ones",
    )
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--learn-for", type=float, default=30.0, help="seconds of each workload to learn from")
    parser.add_argument("--times", type=int, default=2, help="that each judged workload is served")
    parser.add_argument("--draws", type=int, default=5, help="simulations of each run, each with a seed of its own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="of the quickstart fleet, measured just before on this machine")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/sim_vs_live.json")
    options = parser.parse_args()
    end_cleanly()
    report: dict[str, Any] = {
        "machine": machine(),
        **{key: getattr(options, key) for key in ("duration", "times", "draws", "seed", "learn_at", "learn_for")},
        "fleets": {},
    }
    given = load_profile(options.profile) if options.profile else None
    try:
        for name in options.fleets:
            print(f"\n=== {name}", flush=True)
            source, engine_args = FLEETS[name]
            names = [m.name for m in sorted(load_fleet(ROOT / source).models, key=lambda model: -model.rate)]
            with tempfile.TemporaryDirectory() as directory:
                folder = Path(directory)
                file = fleet_with(ROOT / source, folder / "fleet.yaml", engine_args=engine_args)
                live = measure(file, names, options, folder)
                report["fleets"][name] = judge(live, file, given if name == "eager" else None, options.draws)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    for counted, listed in (("missed", "misses"), ("missed_mean", "misses_mean")):
        missed: Counter[str] = Counter()
        for fleet in report["fleets"].values():
            for way in ("steps", "before", "served"):
                missed[way] += sum(len(row[listed]) for row in fleet["ways"][way]["parts"].values())
        report[counted] = dict(missed)
    report["missed_middle"] = sum(
        len(row["misses_middle"])
        for fleet in report["fleets"].values()
        for row in fleet["ways"]["served"]["parts"].values()
    )
    report["predicted"] = {
        way: [sum(fleet["predicted"][way][i] for fleet in report["fleets"].values()) for i in (0, 1)]
        for way in ("live", "steps", "before", "served")
        if all(way in fleet["predicted"] for fleet in report["fleets"].values())
    }
    report["within_bars"] = not min(report["missed"].values())
    write_report(options.out, report)
    return 0 if report["within_bars"] else 1


if __name__ == "__main__":
    sys.exit(main())
