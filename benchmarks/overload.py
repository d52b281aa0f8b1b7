"""Five times what a fleet can do, for a while: what becomes of every connection, how long those wait who are let in,
and what the fleet's processes take in memory before, meanwhile and after.

    python benchmarks/overload.py [--seconds 60] [--times 5] [--out benchmarks/results/overload.json]

Sides, one after the other, each a fleet of its own in the same run: as the baseline `queue` (`max_wait: none`: whoever
finds a place in the queue is let in), and `predicted` (the default rule, with the fleet file's objectives). Capacity is
that of the first side in a closed loop of as many clients as keep it busy. Every request has a connection of its own,
and is sent when its time has come, whatever became of those before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from load import Call
from report import machine, percentiles, write_report
from servers import ROOT, Server, end_cleanly, fleet_with, free_port, muxserve_fleet

RESULTS = ROOT / "benchmarks/results/overload.json"
# A client that has had no answer for so long has none.
PATIENCE = 240.0
MIB = 1 << 20
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)
SIDES = {"predicted": "auto", "queue": "none"}


@dataclass
class Seen:
    """What clients saw: how many of each outcome, and the waits of those with an answer, in seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    refusal: list[float] = field(default_factory=list)
    without_retry_after: int = 0

    def report(self) -> dict[str, object]:
        """For the result file."""
        return {
            "outcomes": dict(sorted(self.outcomes.items())),
            "refusals_without_retry_after": self.without_retry_after,
            "ttft_ms": percentiles([1e3 * each for each in self.ttft]) if self.ttft else None,
            "refusal_ms": percentiles([1e3 * each for each in self.refusal]) if self.refusal else None,
        }


async def ask(host: str, port: int, body: bytes, seen: Seen) -> None:
    """One request on a connection of its own, to the end of the connection."""
    sent = time.monotonic()
    stage, status = "no connection", 0
    writer = None
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port)
            stage = "no answer"
            writer.write(HEAD % len(body) + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(lines.split(b" ", 2)[1])
            stage = "cut off"
            if status == 200:
                first = None
                tail = b""
                while chunk := await reader.read(1 << 16):
                    if first is None and b"data: " in chunk:
                        first = time.monotonic() - sent
                    tail = (tail + chunk)[-64:]
                if first is None or b"[DONE]" not in tail:
                    raise ConnectionError("the stream ended early")
                seen.ttft.append(first)
            else:
                await reader.read()
                seen.refusal.append(time.monotonic() - sent)
                seen.without_retry_after += b"\r\nretry-after:" not in lines
        seen.outcomes[str(status)] += 1
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
        seen.outcomes[f"{stage}: {type(error).__name__}"] += 1
    finally:
        if writer is not None:
            writer.close()


def bodies(models: list[str], seed: int) -> Iterator[bytes]:
    """Requests of all models with prompts of many lengths, without end."""
    rng = random.Random(seed)
    number = 0
    while True:
        number += 1
        call = Call(rng.choice(models), int(2 ** rng.uniform(3, 8)), rng.randint(8, 24), seed=number)
        yield json.dumps(call.body()).encode()


async def closed(port: int, models: list[str], clients: int, seconds: float) -> float:
    """Requests per second of a closed loop."""
    seen, ends = Seen(), time.monotonic() + seconds
    requests = bodies(models, 1)

    async def client() -> None:
        while time.monotonic() < ends:
            await ask("127.0.0.1", port, next(requests), seen)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    if not seen.outcomes["200"] or not set(seen.outcomes) <= {"200", "429"}:
        raise RuntimeError(f"not all were answered: {dict(seen.outcomes)}")
    return seen.outcomes["200"] / (time.monotonic() - began)


async def open_loop(port: int, models: list[str], rate: float, seconds: float) -> Seen:
    """Poisson arrivals at `rate` requests per second."""
    seen, rng, requests = Seen(), random.Random(2), bodies(models, 3)
    asking: set[asyncio.Task[None]] = set()
    at = time.monotonic()
    ends = at + seconds
    while (at := at + rng.expovariate(rate)) < ends:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        task = asyncio.ensure_future(ask("127.0.0.1", port, next(requests), seen))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await asyncio.gather(*asking)
    return seen


def pss(server: Server) -> dict[str, float]:
    """MiB by kind of process: engines by phase, gateways, and the rest."""
    found: Counter[str] = Counter()
    root = psutil.Process(server.pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            name, size = " ".join(process.cmdline()), process.memory_full_info().pss
        except psutil.Error:
            continue
        kind = "other"
        if "muxserve engine" in name:
            kind = f"{name.rsplit('/', 1)[-1].strip()} engines"
        elif "muxserve gateway" in name:
            kind = "gateways"
        found[kind] += size / MIB
    return {"total": round(sum(found.values())), **{kind: round(size) for kind, size in sorted(found.items())}}


async def overloaded(server: Server, models: list[str], rate: float, seconds: float, rest: float) -> dict[str, object]:
    """One side's figures."""
    port = int(server.url.rsplit(":", 1)[1])
    memory = {"before": await asyncio.to_thread(pss, server)}
    load = asyncio.ensure_future(open_loop(port, models, rate, seconds))
    for part in (0.5, 1.0):
        await asyncio.sleep(seconds / 2)
        memory[f"after {part * seconds:g} s of load"] = await asyncio.to_thread(pss, server)
    seen = await load
    await asyncio.sleep(rest)
    memory[f"{rest:g} s after the last answer"] = await asyncio.to_thread(pss, server)
    return {"rate": round(rate, 1), **seen.report(), "pss_mib": memory}


def main() -> None:
    """Run both sides and write the report."""
    parser = argparse.ArgumentParser(description="A fleet at several times its capacity.")
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--times", type=float, default=5.0, help="how many times the capacity")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rest", type=float, default=20.0, help="seconds before memory is looked at again")
    parser.add_argument("--clients", type=int, default=48, help="clients of the closed loop that measures the capacity")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["queue", "predicted"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    end_cleanly()
    models = [model["name"] for model in yaml.safe_load(options.fleet.read_text())["models"]]
    results: dict[str, object] = {}
    capacity = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for side in options.sides:
            file = fleet_with(options.fleet, Path(folder) / f"{side}.yaml")
            fleet = yaml.safe_load(file.read_text())
            for model in fleet["models"]:
                model["limits"]["max_wait"] = SIDES[side]
            file.write_text(yaml.safe_dump(fleet))
            with muxserve_fleet(file, free_port()) as server:
                port = int(server.url.rsplit(":", 1)[1])
                found = asyncio.run(closed(port, models, options.clients, 10.0))
                capacity = capacity or found
                figures = asyncio.run(
                    overloaded(server, models, options.times * capacity, options.seconds, options.rest)
                )
            results[side] = {"closed_loop_requests_per_second": round(found, 1), **figures}
            print(side, json.dumps(results[side], indent=2), flush=True)
    write_report(options.out, {"machine": machine(), "capacity": round(capacity, 1), **results})


if __name__ == "__main__":
    main()
