"""How long a sleeping model takes to answer.

    python benchmarks/wakes.py [--models 8] [--layers 8] [--limit 2500MiB] [--rounds 6] [--out FILE]

A fleet with `memory:`, in which about three of the eight models have room, is asked in turn: one model at a time, then
two at once. So nearly every question wakes its model, and nothing else is going on. Only questions that waited for a
wake count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from density import fleet_file, made
from load import Call, client, send
from report import machine, percentiles, write_report
from servers import ROOT, end_cleanly, muxserve_fleet

from muxserve.cli.http import get_json
from muxserve.config.values import parse_size

# After a report of the controller nothing of an earlier sleep is going on.
PAUSE_SECONDS = 2.5


def cpu_seconds(root: int) -> float:
    """CPU seconds of all processes below `root`, those that have ended included."""
    total = 0.0
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


async def asked(url: str, root: int, names: list[str], together: int, rounds: int) -> list[dict[str, Any]]:
    """What each question that waited for a wake has taken."""
    found = []
    async with client() as session:
        for number in range(rounds):
            for first in range(0, len(names), together):
                await asyncio.sleep(PAUSE_SECONDS)
                group = names[first : first + together]
                before = get_json(url, "/fleet")[1]["memory"]["models"]
                cpu, began = cpu_seconds(root), time.perf_counter()
                calls = [Call(name, 16, 2, seed=number, at=0.0, last_token=200) for name in group]
                outcomes = await asyncio.gather(*(send(session, url, call) for call in calls))
                took = time.perf_counter() - began
                cpu = cpu_seconds(root) - cpu
                after = get_json(url, "/fleet")[1]["memory"]["models"]
                woken = [name for name in group if after[name]["wakes"] > before[name]["wakes"]]
                if any(not each.ok for each in outcomes):
                    raise SystemExit(f"not answered: {[each.error for each in outcomes if not each.ok]}")
                if len(woken) == together:
                    found.append(
                        {
                            "round": number,
                            "models": group,
                            "first_tokens": [round(each.ttft, 4) for each in outcomes],
                            "wakes": [after[name]["last_wake_seconds"] for name in group],
                            "seconds": round(took, 4),
                            "cpu_seconds": round(cpu, 3),
                        }
                    )
    return found


def summary(questions: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Figures of questions that woke their models."""
    if not questions:
        return None
    return {
        "questions": len(questions),
        "ttft_seconds": percentiles([each for question in questions for each in question["first_tokens"]]),
        "wake_seconds": percentiles([each for question in questions for each in question["wakes"]]),
        "cpu_seconds_median": statistics.median(each["cpu_seconds"] for each in questions),
    }


def main() -> None:
    """Ask the fleet and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8, help="layers of each model, of 35 MB each")
    parser.add_argument("--limit", type=parse_size, default="2500MiB")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/wakes.json")
    args = parser.parse_args()
    end_cleanly()
    document: dict[str, Any] = {"machine": machine(), "wakes": {}, "questions": {}}
    with made(args.models, args.layers) as paths, tempfile.TemporaryDirectory(prefix="wakes-") as name:
        document["weights_bytes"] = (next(iter(paths.values())) / "model.safetensors").stat().st_size
        file = fleet_file(Path(name), "wakes", paths, args.limit, 0.0, 5.0)
        with muxserve_fleet(file) as server:
            for together in (1, 2):
                asking = f"{together} at a time"
                questions = asyncio.run(asked(server.url, server.pid, list(paths), together, args.rounds))
                document["questions"][asking] = questions
                document["wakes"][asking] = summary(questions)
                print(f"{asking}: {json.dumps(document['wakes'][asking])}", flush=True)
        write_report(args.out, document)


if __name__ == "__main__":
    main()
