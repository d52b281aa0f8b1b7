"""Our endpoint against stock vLLM OpenAI servers on the same model, all up at once and measured in turns.

    python benchmarks/gateway.py [--model atlas] [--rounds 9] [--out benchmarks/results/gateway.json]

Concurrency 1 and 16, streamed and not: TTFT and tokens per second, and our ratio to stock (target: at least 0.9).
`stock` and `muxserve` run eagerly; `-compiled` compiles the model (for ours, `engine_args: {enforce_eager: false}` in
the fleet file), which starts more slowly and is faster.
`routing` is what our gateway adds to a request that no engine sees: median latency of `/tokenize` on one open
connection, ours less stock's (target: below 0.5 ms).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import yaml
from load import Call, Outcome, client, closed_loop, summary
from report import machine, percentiles, write_report
from servers import ROOT, ServerError, end_cleanly, fleet_with, muxserve_fleet
from stock_vllm import StockSettings, stock_server

KV_MIB = 256
SIDES = ("stock", "stock-compiled", "muxserve", "muxserve-compiled")
# A stock server polls without a pause for up to a second after its last message. Without this wait the next side in
# turn would share the cores with it.
SETTLE_SECONDS = 1.5


async def tokenize_latencies(url: str, model: str, count: int) -> list[float]:
    """Milliseconds of `count` calls of `/tokenize`, one after the other on one connection."""
    body = {"model": model, "prompt": "The capital of France is"}
    latencies = []
    async with client(limit=1) as session:
        for _ in range(count):
            start = time.perf_counter()
            async with session.post(f"{url}/tokenize", json=body) as answer:
                await answer.read()
                answer.raise_for_status()
            latencies.append((time.perf_counter() - start) * 1e3)
    return latencies


def ratios(ours: dict, other: dict) -> dict[str, float]:
    """Ours divided by the other's: above 1 is more tokens per second, and a longer time to the first token."""
    speed = "output_tokens_per_second"
    result = {speed: round(ours[speed] / other[speed], 3)}
    if "ttft_ms" in ours and "ttft_ms" in other:
        result["ttft_p50"] = round(ours["ttft_ms"]["p50"] / other["ttft_ms"]["p50"], 3)
    return result


def compare(urls: dict[str, str], model: str, rounds: int, concurrency: int, stream: bool, output: int) -> dict:
    """All sides in turns, the order changing each round; the summaries and our ratio to each stock server."""
    outcomes: dict[str, list[list[Outcome]]] = {side: [] for side in urls}
    for turn in range(rounds):
        for side in list(urls) if turn % 2 == 0 else list(urls)[::-1]:
            # Fresh prompts each turn: none may come from the prefix cache.
            first = (((concurrency * 2 + stream) * rounds) + turn) * 1000
            count = max(8, 3 * concurrency)
            calls = [Call(model, 64, output, seed=first + i, stream=stream) for i in range(count)]
            outcomes[side].append(asyncio.run(closed_loop(urls[side], calls, concurrency)))
            time.sleep(SETTLE_SECONDS)
    result: dict = {}
    for side, turns in outcomes.items():
        every = [outcome for turn in turns for outcome in turn]
        figures = summary(every)
        # Throughput is taken within each turn: between turns the other side ran.
        speeds = [summary(turn).get("output_tokens_per_second", 0.0) for turn in turns]
        for key in ("seconds", "requests_per_second"):
            figures.pop(key, None)
        figures["output_tokens_per_second"] = statistics.median(speeds)
        figures["output_tokens_per_second_of_turns"] = speeds
        result[side] = figures
    for ours in (side for side in urls if side.startswith("muxserve")):
        for other in (side for side in urls if side.startswith("stock")):
            if all("e2e_ms" in result[side] for side in (ours, other)):
                result[f"{ours} to {other}"] = ratios(result[ours], result[other])
    return result


def main() -> int:
    """Run everything; exit code 1 if a server does not come up or a request fails."""
    parser = argparse.ArgumentParser(description="Compare the MuxServe endpoint with a stock vLLM server.")
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--model", default="atlas", help="a model of the fleet file with a local path")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=int, default=128, help="output tokens of each request")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gateway.json")
    options = parser.parse_args()
    end_cleanly()
    names = [model["name"] for model in yaml.safe_load(options.fleet.read_text())["models"]]
    if options.model not in names:
        parser.error(f"{options.fleet} has no model {options.model!r}; it has {', '.join(names)}")
    report: dict = {"machine": machine(), "model": options.model, "rounds": options.rounds, "results": {}}
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pool = {"size": f"{KV_MIB}MiB"}
            folder_of = {m["name"]: m["path"] for m in yaml.safe_load(options.fleet.read_text())["models"]}
            path = (options.fleet.parent / folder_of[options.model]).resolve()
            running = {}
            for side in options.sides:
                if side.startswith("muxserve"):
                    file = fleet_with(
                        options.fleet,
                        folder / f"{side}.yaml",
                        models=[options.model],
                        engine_args={"enforce_eager": side == "muxserve"},
                        kv_pool=pool,
                    )
                    running[side] = stack.enter_context(muxserve_fleet(file))
                else:
                    settings = StockSettings(kv_bytes=KV_MIB << 20, eager=side == "stock")
                    running[side] = stack.enter_context(stock_server(path, options.model, settings))
            urls = {side: server.url for side, server in running.items()}
            report["start_seconds"] = {side: round(server.start_seconds, 1) for side, server in running.items()}
            report["pss_mib"] = {side: server.pss_bytes() >> 20 for side, server in running.items()}
            for url in urls.values():
                asyncio.run(closed_loop(url, [Call(options.model, 64, 32, seed=-1 - i) for i in range(32)], 16))
                asyncio.run(tokenize_latencies(url, options.model, 100))
            latencies: dict[str, list[float]] = {side: [] for side in urls}
            for _ in range(options.rounds):
                for side, url in urls.items():
                    latencies[side] += asyncio.run(tokenize_latencies(url, options.model, 200))
            report["routing"] = {"tokenize_ms": {side: percentiles(values) for side, values in latencies.items()}}
            if {"stock", "muxserve"} <= set(urls):
                routing = percentiles(latencies["muxserve"])["p50"] - percentiles(latencies["stock"])["p50"]
                report["routing"]["overhead_ms"] = round(routing, 3)
                print(f"routing overhead {routing:.3f} ms", flush=True)
            for concurrency in (1, 16):
                for stream in (True, False):
                    name = f"concurrency {concurrency}, {'streamed' if stream else 'whole'}"
                    row = compare(urls, options.model, options.rounds, concurrency, stream, options.output)
                    report["results"][name] = row
                    speeds = ", ".join(f"{side} {row[side].get('output_tokens_per_second')}" for side in urls)
                    print(f"{name:26s} tokens/s: {speeds}", flush=True)
                    for key in row.keys() - urls.keys():
                        print(f"{'':26s} {key}: {row[key]}", flush=True)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    write_report(options.out, report)
    failed = sum(row[side]["failed"] for row in report["results"].values() for side in options.sides)
    if failed:
        print(f"{failed} requests failed; the result file says why", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
