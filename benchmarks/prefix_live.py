"""Dispatch by prefix against dispatch by freeness, live on this machine's CPU, in one run.

    python benchmarks/prefix_live.py [--rates 3 5] [--duration 40] [--seeds 3]

Three replicas of one model get the turns of conversations, each of whose prompts begins with the one before. Both ways
get the very same requests. What was cached shows in the time to the first token, and in the processor time that the
fleet took. Requests stay where they are.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from load import Call, closed_loop, open_loop
from report import machine, percentiles, write_report
from servers import ROOT, Server, ServerError, end_cleanly, muxserve_fleet

sys.path.insert(0, str(ROOT))

from muxserve.workload import open_workload
from tests.support.tiny_checkpoint import tiny_checkpoint

MODEL, LAST_TOKEN = "tiny", 255
LENGTHS = "prompt=lognormal/160/0.6/32/600,output=lognormal/24/0.5/8/60,max_prompt=1900"
SPEC = f"conversations:turns=6,think=4,system=0,{LENGTHS}"


def make_calls(rate: float, seconds: float, seed: int) -> list[Call]:
    """The turns; one of a conversation has the tokens of those before it in front."""
    turns = open_workload(f"{SPEC},rate={rate:g},duration={seconds:g},seed={seed}", [MODEL])
    return [
        Call(
            MODEL,
            turn.prompt_tokens,
            turn.output_tokens,
            _talk(turn.content[0][0], seed),
            turn.arrival,
            last_token=LAST_TOKEN,
        )
        for turn in turns
    ]


def _talk(name: str, seed: int) -> int:
    """A number for a conversation of a seed."""
    place, number = name.rsplit("/", 1)[1].split(".")
    return (seed * 1_000_000 + int(place)) * 100 + int(number)


def drive(server: Server, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """All seeds at one rate."""
    cpu, found, means = server.cpu_seconds(), [], []
    for seed in range(1, options.seeds + 1):
        outcomes = asyncio.run(open_loop({MODEL: server.url}, make_calls(rate, options.duration, seed)))
        found += outcomes
        means.append(round(statistics.fmean(o.ttft for o in outcomes if o.ok) * 1e3, 1))
    ok = [outcome for outcome in found if outcome.ok]
    return {
        "requests": len(found),
        "failed": len(found) - len(ok),
        "ttft_ms": percentiles([outcome.ttft * 1e3 for outcome in ok]),
        "ttft_ms_mean_by_seed": means,
        "latency_ms": percentiles([outcome.e2e * 1e3 for outcome in ok]),
        "server_cpu_seconds": round(server.cpu_seconds() - cpu, 1),
    }


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=[3.0, 5.0], help="requests/s")
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of load at each rate, for each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/prefix_live.json")
    return parser.parse_args(given)


def main() -> int:
    """Run everything; exit code 1 if a fleet does not come up."""
    options = parse()
    end_cleanly()
    checkpoint = tiny_checkpoint("llama", 8, 8, 4, 64, max_len=2048)
    model = {
        "name": MODEL,
        "path": str(checkpoint),
        "dtype": "float32",
        "replicas": 3,
        "threads": 1,
        "max_len": 2048,
        "max_num_batched_tokens": 512,
        "limits": {"max_wait": "none"},
    }
    report: dict[str, Any] = {"machine": machine(), "workload": SPEC, "results": {}}
    try:
        for dispatch in ("freest", "prefix"):
            fleet = {"kv_pool": {"size": "256MiB"}, "migration": "off", "dispatch": dispatch, "models": [model]}
            rows: dict[str, Any] = {}
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "fleet.yaml"
                file.write_text(yaml.safe_dump(fleet, sort_keys=False))
                with muxserve_fleet(file) as server:
                    warm = [Call(MODEL, 16 + 40 * n, 16, seed=-1 - n, last_token=LAST_TOKEN) for n in range(12)]
                    asyncio.run(closed_loop(server.url, warm, 4))
                    for rate in options.rates:
                        row = rows[str(rate)] = drive(server, rate, options)
                        print(f"{dispatch:7} {rate:g}/s {row}", flush=True)
            report["results"][dispatch] = rows
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    write_report(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
