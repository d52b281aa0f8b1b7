"""Start-up of fleets, from `muxserve deploy` to ready, and the memory of all their processes; beside a stock server.

    python benchmarks/startup.py [--runs N] [--out FILE]

The quickstart's three models; twenty models that are all awake, with an engine per phase (forty engines) and with one
engine each; twenty of which seventeen sleep, and how soon each answers when it is asked. PSS counts a page shared by n
processes as 1/n page in each, so that the sum is what a fleet takes from the machine. Twenty models are the
quickstart's checkpoints under twenty names: small weights, so that what is measured is processes, pools and schedulers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

import yaml
from load import Call, closed_loop
from report import machine, percentiles, write_report
from servers import ROOT, Server, end_cleanly, muxserve_fleet
from stock_vllm import StockSettings, stock_server

QUICKSTART = ROOT / "configs/quickstart.yaml"
CHECKPOINTS = ("arithmetic", "atlas", "frontdesk")
MODELS = 20
AWAKE = 3


def fleet_of_twenty(target: Path, engines: str, asleep: bool = False) -> Path:
    """A fleet file with the quickstart's checkpoints under twenty names and with `engines` of that shape; with `asleep`
    all but three start without a replica."""
    models = []
    for number in range(MODELS):
        model: dict[str, object] = {
            "name": f"model-{number:02d}",
            "path": str(ROOT / "configs/models" / CHECKPOINTS[number % len(CHECKPOINTS)]),
            "dtype": "float32",
            "engines": engines,
            "rate": 1,
            "limits": {"max_wait": "none"},
        }
        if asleep and number >= AWAKE:
            model["replicas"] = {"min": 0, "start": 0, "max": 1, "idle": "1h"}
        models.append(model)
    target.write_text(yaml.safe_dump({"kv_pool": {"size": "512MiB"}, "models": models}, sort_keys=False))
    return target


def footprint(server: Server) -> dict[str, object]:
    """Seconds until ready, and memory now."""
    parts = server.pss_by_part()
    return {"seconds_to_ready": round(server.start_seconds, 2), "pss_gib": round(sum(parts.values()) / 1024, 2)}


async def first_answers(server: Server, numbers: range) -> list[float]:
    """Seconds to the first token of each of these models, one after the other."""
    seconds = []
    for number in numbers:
        (outcome,) = await closed_loop(server.url, [Call(f"model-{number:02d}", 16, 4, seed=number)], 1)
        if outcome.error:
            raise SystemExit(f"model-{number:02d}: {outcome.error}")
        seconds.append(outcome.ttft)
    return seconds


def show(name: str, found: dict[str, object]) -> None:
    """One line of progress."""
    print(f"{name:32s} ready after {found['seconds_to_ready']:5} s, PSS {found['pss_gib']} GiB", flush=True)


def main() -> None:
    """Run everything in turns and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind of start")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/startup.json")
    args = parser.parse_args()
    end_cleanly()
    runs: dict[str, list[dict[str, object]]] = {}
    woken: list[float] = []
    parts: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        fleets = {
            "quickstart": QUICKSTART,
            "twenty awake, split": fleet_of_twenty(Path(folder) / "split.yaml", "split"),
            "twenty awake, one engine each": fleet_of_twenty(Path(folder) / "one.yaml", "one"),
            "seventeen asleep": fleet_of_twenty(Path(folder) / "asleep.yaml", "one", asleep=True),
        }
        for _ in range(args.runs):
            for name, fleet in fleets.items():
                with muxserve_fleet(fleet) as server:
                    runs.setdefault(name, []).append(footprint(server))
                    show(name, runs[name][-1])
                    if name == "quickstart":
                        parts = server.pss_by_part()
                    if name == "seventeen asleep":
                        woken += asyncio.run(first_answers(server, range(AWAKE, MODELS)))
            with stock_server(ROOT / "configs/models/atlas", "atlas", StockSettings()) as server:
                runs.setdefault("stock, one model", []).append(footprint(server))
                show("stock, one model", runs["stock, one model"][-1])
    wakes = {**percentiles([seconds * 1e3 for seconds in woken]), "max": round(max(woken) * 1e3, 3)}
    print(f"first answer of a sleeping model: p50 {wakes['p50']:.0f} ms, max {wakes['max']:.0f} ms")
    write_report(
        args.out,
        {
            "machine": machine(),
            "median_seconds": {
                name: statistics.median(r["seconds_to_ready"] for r in each) for name, each in runs.items()
            },
            "pss_gib": {name: statistics.median(r["pss_gib"] for r in each) for name, each in runs.items()},
            "first_answer_of_a_sleeping_model_ms": wakes,
            "runs": runs,
            "pss_mib_by_part": {name: round(mib) for name, mib in sorted(parts.items())},
        },
    )


if __name__ == "__main__":
    main()
