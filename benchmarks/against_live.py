"""What the benchmarks have in common that hold a simulation against a served fleet: requests are replayed on the fleet,
the same ones are simulated, and figures are compared. What gateway and engines take beside their steps is learnt from
lone requests before that, and the simulator is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from muxserve.costs.profile import Overheads
from muxserve.metrics.report import read_json
from muxserve.metrics.summary import Distribution, Summary
from muxserve.workload.trace import TraceRequest, write_trace

MUXSERVE = Path(sys.executable).parent / "muxserve"
JUDGED = ("requests_per_second", "output_tokens_per_second", "ttft_mean", "tpot_mean", "latency_mean")
STATISTICS = ("mean", "p50", "p90", "p99")


def run(*words: str | Path) -> None:
    """A command of MuxServe."""
    subprocess.run([str(MUXSERVE), *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def summary_of(file: Path) -> Summary:
    """The only run of a report."""
    (summary,) = read_json(file).runs.values()
    return summary


def replayed(url: str, models: Sequence[str], requests: Sequence[TraceRequest], folder: Path) -> Summary:
    """Send the requests to a fleet that serves these models; what the client measured."""
    trace, report = folder / "trace.jsonl", folder / "live.json"
    write_trace(trace, list(models), requests)
    run("replay", "--url", url, "--workload", trace, "-o", report)
    return summary_of(report)


def overheads(live: Summary, simulate: Callable[[Overheads], Summary], known: Overheads) -> Overheads:
    """`known` with what lone requests took beyond what the simulator makes of them: a later token (`between`), then the
    first (`request`), in the median, since one that a machine has let wait would count for all. `simulate` plays the
    same requests under given overheads."""
    known = msgspec.structs.replace(known, between=0.0, request=0.0)
    between = max(0.0, _median(live, "tpot") - _median(simulate(known), "tpot"))
    known = msgspec.structs.replace(known, between=between)
    beyond = max(0.0, _median(live, "ttft") - _median(simulate(known), "ttft"))
    return msgspec.structs.replace(known, request=beyond)


def _median(summary: Summary, figure: str) -> float:
    found: Distribution | None = getattr(summary.overall, figure)
    assert found is not None, "lone requests are answered"
    return found.p50


def compared(live: Summary, simulated: Summary) -> dict[str, dict[str, float]]:
    """Live, simulated and the relative error of each figure."""
    rows: dict[str, dict[str, float]] = {}

    def row(name: str, was: float, is_: float) -> None:
        rows[name] = {"live": round(was, 5), "simulated": round(is_, 5), "error": round(is_ / was - 1, 4)}

    a, b = live.overall, simulated.overall
    for name in JUDGED[:2]:
        row(name, getattr(a, name), getattr(b, name))
    for name in ("ttft", "tpot", "latency"):
        for statistic in STATISTICS:
            row(f"{name}_{statistic}", getattr(getattr(a, name), statistic), getattr(getattr(b, name), statistic))
    return rows


def show(title: str, live: Summary, rows: dict[str, dict[str, float]]) -> None:
    """Print them."""
    print(f"\n{title}: {live.overall.requests} requests, {live.overall.failed} failed")
    for key, row in rows.items():
        print(f"  {key:26s} live {row['live']:9.4f}  simulated {row['simulated']:9.4f}  {row['error']:+.1%}")


def worst_error(rates: dict[str, dict[str, Any]]) -> float:
    """The largest error of throughput and means, at any rate."""
    return max(abs(rows[key]["error"]) for rows in rates.values() for key in JUDGED)
