"""What limits, fairness, an access log and traces cost per request, beside none of them, in one run.

    python benchmarks/sharing.py [--requests N]

`sharing`: a request of 200 bytes before vLLM's application sees it, as in `routing.py`: with a key alone, for a tenant
with three limits, with an access log, and with traces whose spans are dropped where they would be sent. `fairness`: a
request through a unit's queue in which 64 wait, of one tenant or of more. Writes benchmarks/results/sharing.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from report import machine, write_report
from routing import IN_FLIGHT, endpoint, seconds

from muxserve.gateway.status.tracing import Tracing
from muxserve.scheduling.fairness import TenantCounters
from muxserve.scheduling.state import RequestQueue
from muxserve.spec import TenantLimits, TenantSpec

RESULTS = Path(__file__).parent / "results" / "sharing.json"


class Dropped(SpanExporter):
    """Takes spans, and sends them nowhere."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def sharing(requests: int, usage_file: str) -> list[dict[str, object]]:
    """What limits, an access log and traces add to a request of 200 bytes; all take turns, ten times."""
    many = 1 << 30  # no request is refused
    hashes = (sha256(b"key").hexdigest(),)
    tenant = TenantSpec("team", hashes, limits=TenantLimits(many, many, many))
    access = logging.getLogger("muxserve.access")
    access.propagate = False
    access.setLevel(logging.INFO)
    access.addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115
    apps = {
        "key": endpoint(16, ["other", "key"]),
        "tenant with limits": endpoint(16, ["other"], [tenant], usage_file=usage_file),
        "access log": endpoint(16, ["other", "key"], access_log=True),
        "traces": endpoint(16, ["other", "key"], tracing=Tracing(BatchSpanProcessor(Dropped()))),
    }
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 200}], "model": "model-7"}).encode()
    taken: dict[str, list[float]] = {name: [] for name in apps}
    for _ in range(10):
        for name, app in apps.items():
            taken[name] += asyncio.run(seconds(app, body, requests // 10))
    medians = {name: statistics.median(each) * 1e6 for name, each in taken.items()}
    return [
        {"with": name, "median_us": round(median, 2), "ratio": round(median / medians["key"], 3)}
        for name, median in medians.items()
    ]


@dataclass(eq=False)
class Waiting:
    """Stands for a unit's `LiveRequest` in its queue."""

    tenant: str
    arrival: float
    priority: int = 0
    weight: float = 1.0
    group: str = ""
    blocks: int = 1
    resumed: bool = False
    key: Any = None


def through_queue(tenants: int, requests: int) -> float:
    """Seconds that a request costs in a queue in which `IN_FLIGHT` wait: enter, be the next one, leave."""
    queue = RequestQueue(TenantCounters(lambda: 0.0))
    for n in range(IN_FLIGHT):
        queue.add(Waiting(f"t{n % tenants}", float(n)))  # type: ignore[arg-type]
    began = time.perf_counter()
    for n in range(requests):
        queue.add(Waiting(f"t{n % tenants}", float(IN_FLIGHT + n)))  # type: ignore[arg-type]
        queue.remove(queue.head())
    return (time.perf_counter() - began) / requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shared = sharing(args.requests, f"{folder}/usage.sqlite")
    queues = [
        {"tenants": tenants, "us": round(min(through_queue(tenants, args.requests) for _ in range(5)) * 1e6, 2)}
        for tenants in (1, 2, 8, 64)
    ]
    for each in (*shared, *queues):
        print("  ".join(f"{key} {value}" for key, value in each.items()))
    write_report(RESULTS, {"machine": machine(), "sharing": shared, "fairness": queues})


if __name__ == "__main__":
    main()
