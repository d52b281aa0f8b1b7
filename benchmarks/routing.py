"""What the gateway's own layer adds to a request before vLLM's application sees it: routing, key, body, admission.

python benchmarks/routing.py [--requests N]

The application behind it is one that reads the body and answers at once, called through the endpoint and directly; the
difference is the overhead. Writes benchmarks/results/routing.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from muxserve.deployment import ModelDeployment
from muxserve.gateway.admission import Keys
from muxserve.gateway.app import Endpoint
from muxserve.gateway.errors import App, Message, Receive, Scope, Send
from muxserve.gateway.measure import Measures
from muxserve.gateway.turnstile import Turnstile

RESULTS = Path(__file__).parent / "results" / "routing.json"
SIZES = {"200 B": 200, "4 KiB": 4096, "64 KiB": 65536, "1 MiB": 1 << 20}


def endpoint(models: int, keys: list[str]) -> Endpoint:
    """An endpoint of that many models, all behind `answer`."""
    deployed = [
        ModelDeployment(
            name=f"model-{n}", path="", pool="main", dtype="float32", layers=1, kv_heads=1, head_dim=64,
            block_tokens=64, num_blocks=1, quota_pages=1, floor_pages=0, max_len=1024, rate=1.0, max_num_seqs=1,
            max_num_batched_tokens=1, prefix_caching=True, threads=1, prefill_share=0.5, decode_share=0.5,
            max_concurrency=256, max_queue=1024,
        )
        for n in range(models)
    ]  # fmt: skip
    measures = Measures(deployed, CollectorRegistry())
    return Endpoint(
        apps={model.name: answer for model in deployed},
        cards={model.name: {} for model in deployed},
        keys=Keys(keys),
        turnstile=Turnstile(deployed, measures),
        measures=measures,
        pages={},
        open_pages=frozenset(),
        max_body_bytes=4 << 20,
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
    RESULTS.parent.mkdir(exist_ok=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
        "models": 16,
        "keys": 2,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
