"""What the gateway's own layers cost per request.

python benchmarks/routing.py [--requests N]

`rows`: before vLLM's application sees the request: key, routing by model, levels, body, admission. The application is
one that reads the body and answers at once, called through the endpoint and directly; the difference is the overhead.
`units`: behind vLLM's application: from its submission to its last of 32 tokens, each in a message of its own, with one
unit, with four among which the gateway chooses, and with four among which the global scheduler does. Messages are
encoded but not sent, and the scheduler answers at once, so that it is the gateway's own time.
Writes benchmarks/results/routing.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from muxserve.gateway.http.app import Access, GatewayApp
from muxserve.gateway.http.errors import App, Message, Receive, Scope, Send
from muxserve.gateway.http.own_paths import OwnPaths
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.limits.admission import ApiKeys
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.limits.priorities import Priorities
from muxserve.gateway.limits.tenants import Tenancy
from muxserve.gateway.routing.requests import RequestTable, Tracked
from muxserve.gateway.routing.router import Router
from muxserve.gateway.status.measure import Measures
from muxserve.gateway.status.tracing import Tracing
from muxserve.replicas.priorities import DEFAULT_LEVELS, NORMAL, Levels
from muxserve.spec import FleetSpec, GatewaySpec, HttpSpec, ModelSpec, TenantSpec
from muxserve.wire import Place, Placed, RequestSpec, encode

RESULTS = Path(__file__).parent / "results" / "routing.json"
SIZES = {"200 B": 200, "4 KiB": 4096, "64 KiB": 65536, "1 MiB": 1 << 20}


def endpoint(
    models: int,
    keys: list[str],
    tenants: Sequence[TenantSpec] = (),
    access_log: bool = False,
    tracing: Tracing | None = None,
    usage_file: str = "",
) -> GatewayApp:
    """An endpoint of that many models, all behind `answer`."""
    deployed = [
        ModelSpec(
            name=f"model-{n}", path="", pool="main", dtype="float32", layers=1, kv_heads=1, head_dim=64,
            block_tokens=64, num_blocks=1, quota_pages=1, floor_pages=0, max_len=1024, rate=1.0, max_num_seqs=1,
            max_num_batched_tokens=1, prefix_caching=True, threads=1, prefill_share=0.5, decode_share=0.5,
            max_concurrency=256, max_queue=1024,
        )
        for n in range(models)
    ]  # fmt: skip
    measures = Measures(deployed, CollectorRegistry())
    settings = GatewaySpec("127.0.0.1", 0, http=HttpSpec(access_log=access_log))
    fleet = FleetSpec("", settings, deployed, [], tenants=tuple(tenants), usage_file=usage_file)
    return GatewayApp(
        models={model.name: ServedApp(answer, {model.name: {}}) for model in deployed},
        access=Access(
            ApiKeys(keys, None, tenants),
            Priorities(Levels(DEFAULT_LEVELS, NORMAL)),
            Tenancy(fleet, 0, CollectorRegistry()),
        ),
        own=OwnPaths(),
        limiter=ConcurrencyLimiter(deployed, 0, 1, measures),
        measures=measures,
        settings=settings,
        tracing=tracing,
    )


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for vLLM's application."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def seconds(app: App, body: bytes, requests: int) -> list[float]:
    """How long each request takes."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"host", b"localhost"), (b"authorization", b"Bearer key"), (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()), (b"user-agent", b"benchmark")],
    }  # fmt: skip

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(_: Message) -> None:
        return None

    taken = []
    for _ in range(requests):
        began = time.perf_counter()
        await app(dict(scope), receive, send)
        taken.append(time.perf_counter() - began)
    return taken


@dataclass
class Tokens:
    """Stands for vLLM's `EngineCoreOutput`."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: None = None
    new_prompt_logprobs_tensors: None = None
    new_sampling_mask: None = None
    prefill_stats: None = None
    pooling_output: None = None
    finish_reason: int | None = None


OUTPUT_TOKENS = 32
IN_FLIGHT = 64


def through_units(units: int, scheduler: bool, requests: int) -> list[float]:
    """Seconds that each request costs, with `IN_FLIGHT` of them at a time."""
    table = RequestTable("gateway")
    router = Router(table)
    names = [f"u{n}" for n in range(units)]
    router.learn({name: ["m"] for name in names}, ["m"] if scheduler else [], ["m"], 0.0)
    for name in names:
        router.unit_up(name, "1", 0.0)
    if scheduler:
        router.placing.scheduler_connected(0.0)
    body = b"x" * 2000

    def flush() -> None:
        out = router.out
        for message in out.scheduler:
            encode(message)
            if isinstance(message, Place):
                router.placing.placed(Placed(message.request_id, names[hash(message.request_id) % units]), 0.0)
        out.scheduler.clear()
        for _, message in out.units:
            encode(message)
        out.units.clear()

    taken = []
    for start in range(0, requests, IN_FLIGHT):
        began = time.perf_counter()
        batch = []
        for n in range(start, start + IN_FLIGHT):
            request = Tracked(table.new_id(), f"front-{n}", RequestSpec("m", body, 500, OUTPUT_TOKENS), 0.0)
            batch.append(request)
            router.submit(request, 0.0)
            flush()
        for token in range(OUTPUT_TOKENS):
            for request in batch:
                last = token == OUTPUT_TOKENS - 1
                output: Any = Tokens(request.request_id, [token], finish_reason=0 if last else None)
                for done, _ in table.outputs([(request.request_id, 0, token)], [output], 0.0).ready:
                    if last:
                        router.finished(done)
                flush()
        taken.append((time.perf_counter() - began) / IN_FLIGHT)
        assert not len(table)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args()
    app = endpoint(models=16, keys=["other", "key"])
    rows = []
    for name, size in SIZES.items():
        body = json.dumps(
            {"messages": [{"role": "user", "content": "x" * size}], "temperature": 0.5, "model": "model-7"}
        ).encode()
        requests = max(200, args.requests * 200 // max(200, size // 20))
        asyncio.run(seconds(app, body, 200))
        direct = asyncio.run(seconds(answer, body, requests))
        routed = asyncio.run(seconds(app, body, requests))
        quantiles = statistics.quantiles(routed, n=100)
        row = {
            "body": name,
            "requests": requests,
            "direct_median_us": round(statistics.median(direct) * 1e6, 2),
            "routed_median_us": round(statistics.median(routed) * 1e6, 2),
            "routed_p99_us": round(quantiles[98] * 1e6, 2),
        }
        row["overhead_median_us"] = round(row["routed_median_us"] - row["direct_median_us"], 2)  # type: ignore[operator]
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    fleets = []
    for units, scheduler in ((1, False), (4, False), (4, True)):
        taken = through_units(units, scheduler, args.requests)
        fleet = {
            "units": units,
            "scheduler": scheduler,
            "requests": args.requests,
            "median_us": round(statistics.median(taken) * 1e6, 2),
        }
        fleets.append(fleet)
        print("  ".join(f"{key} {value}" for key, value in fleet.items()))
    RESULTS.parent.mkdir(exist_ok=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
        "models": 16,
        "keys": 2,
        "rows": rows,
        "units": fleets,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
