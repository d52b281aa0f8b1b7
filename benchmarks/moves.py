"""What it brings that models move between units: the same requests with moves and without, in one run.

    python benchmarks/moves.py [--settings cpu simulated] [--seeds 2] [--seconds 60]

The fleet of `configs/moves.yaml`: unit u0 serves three models, u1 a second replica of the third. Each model has clients
that send one request after the other, so that the KV cache that is asked for hangs little on how fast the machine is.
At first, as control, both units have room: nothing should move. Then the popularity of models shifts: nearly all
clients are of the two models that u0 alone serves. Its pool is too small for them, and requests queue, while u1 has
little to do. With `migration: { models: ... }` one of the two moves; with `models: off` none does.

In the setting `cpu` the checkpoints of `configs/models` are computed on this machine's CPU, in pools that are small.
Its units share the cores, so that its figures mean something on a quiet machine only: look at the control first. In
`simulated` (`deploy --simulated`) engines only sleep for as long as models of 30 million weights would take on this
CPU, by the roofline.

A client's requests are the same with moves and without. Latencies are compared of those requests that were sent and
answered in both, requests/s of all within the time. A fleet is deployed anew for each seed, with moves first and
without first in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from load import Call, Outcome, client, closed_loop, send
from report import machine, percentiles, write_report
from servers import ROOT, Server, ServerError, end_cleanly, fleet_with, muxserve_fleet
from simulated_deploy import shape

from muxserve.workload import LogNormalLengths

FLEET = ROOT / "configs/moves.yaml"
FIRST, SECOND, REPLICATED = "atlas", "frontdesk", "arithmetic"
MODELS = (FIRST, SECOND, REPLICATED)
MOVES = {"period": "8s", "residence": "4s"}
ON, OFF = "on", "off"
CONTROL, SHIFTED = "control", "shifted"
PROMPT = LogNormalLengths(96, 0.4, 32, 192)


@dataclass(frozen=True)
class Setting:
    """What engines are, and the load. `pool` is the KV pool of each unit; `output` are tokens of the answers of each
    model; `control` and `shifted` are clients of each model."""

    options: tuple[str, ...]
    max_len: int
    pool: str
    output: dict[str, LogNormalLengths]
    control: dict[str, int]
    shifted: dict[str, int]

    def calls(self, model: str, number: int, seed: int) -> Iterator[Call]:
        """The requests of a client, endless."""
        rng = random.Random(f"{seed}/{model}/{number}")
        while True:
            yield Call(model, PROMPT.sample(rng), self.output[model].sample(rng), rng.getrandbits(60))


LONG = LogNormalLengths(500, 0.3, 200, 800)
MIDDLE = LogNormalLengths(250, 0.3, 100, 300)
SETTINGS = {
    # A token of the third model takes twice as much KV as one of the others.
    "cpu": Setting(
        options=(),
        max_len=1024,
        pool="16MiB",
        output={FIRST: LONG, SECOND: LONG, REPLICATED: LogNormalLengths(100, 0.3, 50, 150)},
        control={FIRST: 3, SECOND: 3, REPLICATED: 8},
        shifted={FIRST: 14, SECOND: 14, REPLICATED: 1},
    ),
    "simulated": Setting(
        options=("--simulated",),
        max_len=512,
        pool="28MiB",
        output=dict.fromkeys(MODELS, MIDDLE),
        control={FIRST: 3, SECOND: 3, REPLICATED: 4},
        shifted={FIRST: 10, SECOND: 10, REPLICATED: 1},
    ),
}


def fleet_file(folder: Path, setting: Setting, moves: str) -> Path:
    """The example, with moves or without."""
    rules = {"models": MOVES if moves == ON else "off"}
    file = fleet_with(FLEET, folder / "fleet.yaml", migration=rules, kv_pool={"size": setting.pool})
    fleet = yaml.safe_load(file.read_text())
    for model in fleet["models"]:
        model["max_len"] = setting.max_len
        if setting.options:
            path = folder / model["name"]
            shutil.copytree(ROOT / "configs/models/atlas", path, ignore=shutil.ignore_patterns("*.safetensors"))
            config = json.loads((path / "config.json").read_text()) | shape(512, 1408, 8, 8, 4)
            (path / "config.json").write_text(json.dumps(config))
            model |= {"path": str(path), "engine_args": {"load_format": "dummy"}}
    file.write_text(yaml.safe_dump(fleet, sort_keys=False))
    return file


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def counted(server: Server) -> dict[str, int]:
    """Preemptions and moves so far."""
    fleet = json.loads(_get(f"{server.url}/fleet"))
    moves = fleet["moves"] or {"moved": 0, "failed": 0}
    lines = _get(f"{server.url}/metrics").splitlines()
    preempted = sum(float(line.split()[-1]) for line in lines if line.startswith("muxserve_requests_preempted_total{"))
    return {"preemptions": round(preempted), "moved": moves["moved"], "failed_moves": moves["failed"]}


@dataclass(frozen=True)
class Run:
    """One load of one fleet. It lasted `seconds`, until clients sent no more requests. `pressures` are means of each
    unit (nobody measures them without moves), `reasons` those of the moves."""

    outcomes: list[Outcome]
    seconds: float
    counts: dict[str, int]
    pressures: dict[str, float]
    reasons: list[str]

    @property
    def done(self) -> dict[tuple[str, int], Outcome]:
        """Answers, by the request."""
        return {(each.call.model, each.call.seed): each for each in self.outcomes if each.ok}


async def clients(url: str, setting: Setting, numbers: dict[str, int], seconds: float, seed: int) -> list[Outcome]:
    """Send requests for so long, and wait for the answers."""
    outcomes: list[Outcome] = []
    async with client() as session:

        async def ask(calls: Iterator[Call], until: float) -> None:
            while time.perf_counter() < until:
                outcomes.append(await send(session, url, next(calls)))

        end = time.perf_counter() + seconds
        work = [ask(setting.calls(model, n, seed), end) for model, number in numbers.items() for n in range(number)]
        await asyncio.gather(*work)
    return outcomes


async def watched(url: str, seconds: float) -> list[dict[str, Any]]:
    """What the fleet says of its moves, once a second."""
    found = []
    for _ in range(round(seconds)):
        fleet = json.loads(await asyncio.to_thread(_get, f"{url}/fleet"))
        if fleet["moves"] is not None:
            found.append(fleet["moves"])
        await asyncio.sleep(1.0)
    return found


def load(server: Server, setting: Setting, numbers: dict[str, int], seconds: float, seed: int) -> Run:
    """A load of so many clients."""
    before = counted(server)
    outcomes, seen = asyncio.run(_load(server.url, setting, numbers, seconds, seed))
    sums: dict[str, float] = {}
    for moves in seen:
        for unit, pools in moves["pressures"].items():
            sums[unit] = sums.get(unit, 0.0) + max(pools.values())
    lasts = [moves["last"] for moves in seen if moves["last"] is not None and moves["moved"] > before["moved"]]
    return Run(
        outcomes,
        seconds,
        {key: value - before[key] for key, value in counted(server).items()},
        {unit: round(total / len(seen), 3) for unit, total in sums.items()},
        list(dict.fromkeys(f"{last['model']} to {last['destination']}: {last['reason']}" for last in lasts)),
    )


async def _load(url: str, setting: Setting, *load: Any) -> tuple[list[Outcome], list[dict[str, Any]]]:
    outcomes, seen = await asyncio.gather(clients(url, setting, *load), watched(url, load[1]))
    return outcomes, seen


def one_fleet(setting: Setting, moves: str, seconds: float, seed: int) -> dict[str, Run]:
    """The control, and the load after the shift.

    Raises:
        ServerError: the fleet does not come up.
    """
    with tempfile.TemporaryDirectory() as name:
        file = fleet_file(Path(name), setting, moves)
        with muxserve_fleet(file, options=setting.options) as server:
            warm = [Call(model, 40, 16, seed=-1 - n) for n in range(4) for model in MODELS]
            asyncio.run(closed_loop(server.url, warm, 3))
            found = {CONTROL: load(server, setting, setting.control, seconds, seed)}
            found[SHIFTED] = load(server, setting, setting.shifted, seconds, 1000 + seed)
            return found


def summary(runs: Sequence[Run], which: Sequence[set[tuple[str, int]]]) -> dict[str, Any]:
    """Of all seeds; times are of the requests `which`, by seed. Requests/s are of what ended before clients stopped."""
    shown = [[run.done[key] for key in keys] for run, keys in zip(runs, which, strict=True)]
    outcomes = [outcome for part in shown for outcome in part]
    in_time = sum(
        each.last <= min(o.sent for o in run.outcomes) + run.seconds for run in runs for each in run.done.values()
    )
    return {
        "requests": sum(len(run.outcomes) for run in runs),
        "failed": sum(len(run.outcomes) - len(run.done) for run in runs),
        "errors": sorted({each.error for run in runs for each in run.outcomes if each.error})[:5],
        **{key: sum(run.counts[key] for run in runs) for key in runs[0].counts},
        "pressures_by_seed": [run.pressures for run in runs],
        "moves": [run.reasons for run in runs],
        "requests_per_second": round(in_time / sum(run.seconds for run in runs), 3),
        "compared": len(outcomes),
        "ttft_ms": percentiles([outcome.ttft * 1e3 for outcome in outcomes]),
        "latency_ms": percentiles([outcome.e2e * 1e3 for outcome in outcomes]),
        "ttft_ms_mean_by_seed": [round(statistics.fmean(o.ttft for o in part) * 1e3, 1) for part in shown],
        "latency_ms_mean_by_seed": [round(statistics.fmean(o.e2e for o in part) * 1e3, 1) for part in shown],
    }


def ratios(on: dict[str, Any], off: dict[str, Any]) -> dict[str, float]:
    """With moves to without: times are shorter below 1, requests/s more above 1."""
    found = {
        f"{what}_{which}": round(on[f"{what}_ms"][which] / off[f"{what}_ms"][which], 3)
        for what in ("ttft", "latency")
        for which in ("mean", "p50", "p99")
    }
    return found | {"requests_per_second": round(on["requests_per_second"] / off["requests_per_second"], 3)}


def measure(setting: Setting, seeds: int, seconds: float) -> dict[str, Any]:
    """All seeds of a setting."""
    runs: dict[str, dict[str, list[Run]]] = {what: {ON: [], OFF: []} for what in (CONTROL, SHIFTED)}
    for seed in range(1, seeds + 1):
        for moves in (ON, OFF) if seed % 2 else (OFF, ON):
            for what, run in one_fleet(setting, moves, seconds, seed).items():
                runs[what][moves].append(run)
                print(f"  seed {seed}, moves {moves:3}, {what:8} {summary([run], [set(run.done)])}", flush=True)
    rows: dict[str, Any] = {
        "pool": setting.pool,
        "clients": {CONTROL: setting.control, SHIFTED: setting.shifted},
    }
    for what, by in runs.items():
        both = [on.done.keys() & off.done.keys() for on, off in zip(by[ON], by[OFF], strict=True)]
        on, off = summary(by[ON], both), summary(by[OFF], both)
        rows[what] = {ON: on, OFF: off, "ratios": ratios(on, off)}
        print(f"  {what:8} {rows[what]['ratios']}", flush=True)
    return rows


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which clients send requests, in either load")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/moves.json")
    return parser.parse_args(given)


def main() -> int:
    """Run everything; exit code 1 if a fleet does not come up."""
    options = parse()
    end_cleanly()
    report: dict[str, Any] = {
        "machine": machine(),
        "seconds": options.seconds,
        "seeds": options.seeds,
        "rules": MOVES,
        "settings": {},
    }
    try:
        for name in options.settings:
            print(name, flush=True)
            report["settings"][name] = measure(SETTINGS[name], options.seeds, options.seconds)
            write_report(options.out, report)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
