"""What a request and a token cost `muxserve replay`, and how late it is: the load at which it begins to measure itself.

    python benchmarks/replay.py

A server of its own process streams ready-made answers as fast as they are read, so nearly all time is the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path

from report import machine, write_report

from muxserve.metrics import RequestRecord
from muxserve.metrics.summary import Summariser
from muxserve.replay.endpoint import Endpoint
from muxserve.replay.prompts import Prompts
from muxserve.replay.run import Lateness, Replay
from muxserve.workload import open_workload

RESULTS = Path(__file__).parent / "results" / "replay.json"
SERVER = r"""
import asyncio, json, sys

def event(data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"

PIECE = event({"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000, "model": "m",
               "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}], "usage": None})
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)

async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            writer.write(HEAD)
            for _ in range(body["max_tokens"]):
                writer.write(chunk(PIECE))
                await asyncio.sleep(STEP)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            writer.write(chunk(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

STEP = float(sys.argv[1])
asyncio.run(main())
"""


async def measure(url: str, rate: float, seconds: float, prompt: int, output: int) -> dict[str, object]:
    """One load: CPU seconds of this process per request and per token, lateness, and what it measured."""
    workload = open_workload(f"poisson:rate={rate},duration={seconds},prompt={prompt},output={output},models=m,seed=1")
    collected = Summariser()
    async with Endpoint(url) as endpoint:
        prompts = Prompts(0)
        dialect = await endpoint.probe("m", prompts)
        records: list[RequestRecord] = []
        running = Replay(endpoint, {"m": dialect}, prompts, records.append)
        began, wall = time.process_time(), time.perf_counter()
        await running.run(workload)
        spent, wall = time.process_time() - began, time.perf_counter() - wall
    for record in records:
        collected.add(record)
    figures = collected.summary().overall
    late = Lateness.of(running.counts.lateness)
    return {
        "requests_per_second": rate,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_second": round(figures.output_tokens_per_second or 0.0, 1),
        "requests": figures.requests,
        "failed": figures.failed,
        "client_cpu_share": round(spent / wall, 4),
        "client_cpu_us_per_output_token": round(spent * 1e6 / max(figures.output_tokens, 1), 2),
        "lateness_ms": {"mean": round(late.mean * 1e3, 3), "p99": round(late.p99 * 1e3, 3)},
        "ttft_ms_p50": round(figures.ttft.p50 * 1e3, 3) if figures.ttft else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step", type=float, default=0.01, help="seconds between the server's tokens")
    options = parser.parse_args()
    runs = []
    command = [sys.executable, "-c", SERVER, str(options.step)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for rate, prompt, output in ((10, 512, 100), (50, 512, 100), (100, 512, 100), (200, 512, 10), (10, 8192, 100)):
            runs.append(asyncio.run(measure(url, rate, options.seconds, prompt, output)))
            print(runs[-1])
    write_report(RESULTS, {"machine": machine(), "server_seconds_per_token": options.step, "runs": runs})


if __name__ == "__main__":
    main()
