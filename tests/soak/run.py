"""The soak: `python -m tests.soak.run --minutes 60 --seed 1 --out FILE`, or `make soak`.

Deploys real fleets, one topology after the other, keeps requests coming whose every answer is compared with stock
vLLM's, and injects faults. Runs in namespaces of its own (`confined.py`), so that it fills, floods and kills nothing
else. Ctrl-C ends it with a report of what was done so far, as soon as a fleet that is
being started serves; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import machine
from tests.e2e.fleet import ROOT
from tests.e2e.reference import MODELS
from tests.soak.confined import Confined, ConfinedError, inside, run
from tests.soak.report import by_kind, failures, table, totals
from tests.soak.schedule import KINDS, chosen
from tests.soak.soak import Soak
from tests.soak.topologies import TOPOLOGIES

_REFERENCE = ROOT / "build/soak-reference"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all topologies together (60)")
    parser.add_argument("--seed", type=int, default=1, help="decides which fault comes when, and strikes whom (1)")
    parser.add_argument("--only", default="", help="groups or names of faults, separated by commas: " + _groups())
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES), help=f"of {', '.join(TOPOLOGIES)} (all)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each topology has its turn (1)")
    parser.add_argument("--from-step", type=int, default=0, help="begin with this step of each topology")
    parser.add_argument("--steps", type=int, help="do at most so many steps of each topology")
    parser.add_argument("--clients", type=int, default=10, help="clients of the load between which requests pause (10)")
    parser.add_argument("--shared-memory", type=int, default=1024, help="MiB of shared memory (1024)")
    parser.add_argument("--out", type=Path, help="write the report there as JSON")
    parser.add_argument("--work", type=Path, help="where logs go (build/soak/TIME)")
    given = parser.parse_args()
    try:
        chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    if unknown := [name for name in _list(given.topologies) if name not in TOPOLOGIES]:
        parser.error(f"no topology is called {', '.join(unknown)}; there are {', '.join(TOPOLOGIES)}")
    return given


def _groups() -> str:
    return ", ".join(dict.fromkeys(kind.group for kind in KINDS))


def _list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _reference() -> dict[str, list[dict[str, Any]]]:
    """Stock vLLM's answers, made once."""
    if not all((_REFERENCE / f"{model}.json").exists() for model in MODELS):
        print("-- asking stock vLLM for its answers (a minute)", flush=True)
        _REFERENCE.mkdir(parents=True, exist_ok=True)
        paths = [str(ROOT / "configs/models" / model) for model in MODELS]
        with open(_REFERENCE / "log", "wb") as log:
            subprocess.run(
                [sys.executable, "-m", "tests.e2e.reference", str(_REFERENCE), *paths],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )
    return {model: json.loads((_REFERENCE / f"{model}.json").read_text()) for model in MODELS}


def _commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip()


async def _soak(soak: Soak, given: argparse.Namespace) -> bool:
    """Whether it came to its end."""
    # As `asyncio.run` does with Ctrl-C: the first cancels, the second ends at once.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    names = _list(given.topologies)
    seconds = given.minutes * 60 / len(names) / given.rounds
    step = dict.fromkeys(names, given.from_step)
    try:
        for _ in range(given.rounds):
            for name in names:
                await soak.topology(TOPOLOGIES[name], seconds, step[name], given.steps)
                step[name] = max((each.number + 1 for each in soak.steps if each.topology == name), default=step[name])
    except asyncio.CancelledError:
        print("-- stopped", flush=True)
        return False
    return True


def _inside(given: argparse.Namespace, place: Confined) -> int:
    work = (given.work or ROOT / "build/soak" / time.strftime("%Y%m%d-%H%M%S")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    print(f"-- logs in {work}", flush=True)
    before, began = machine(), time.time()
    soak = Soak(place, _reference(), given.only, given.seed, work, given.clients)
    complete = False
    try:
        with contextlib.suppress(KeyboardInterrupt):
            complete = asyncio.run(_soak(soak, given))
    finally:
        kinds = by_kind([step for step in soak.steps if step.kind != "stop"])
        found = failures(soak.steps, given.seed, given.only)
        report = {
            "command": shlex.join(["python", "-m", "tests.soak.run", *sys.argv[1:]]),
            "commit": _commit(),
            "machine": before,
            "seed": given.seed,
            "complete": complete,
            "minutes": round((time.time() - began) / 60, 1),
            "totals": {"steps": len(soak.steps), **totals(soak.steps)},
            "topologies": {name: soaked.as_json() for name, soaked in soak.soaked.items()},
            "kinds": kinds,
            "failures": found,
        }
        paths = [work / "report.json", *([given.out] if given.out else [])]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n")
        (work / "table.md").write_text(table(kinds) + "\n")
        print(f"-- {report['totals']}; {found['steps']} steps with failures; written to {paths[-1]}", flush=True)
    return 0 if complete and not found["steps"] else 1


def main() -> int:
    given = _arguments()
    place = inside()
    if place is not None:
        return _inside(given, place)
    try:
        return run([sys.executable, "-m", "tests.soak.run", *sys.argv[1:]], given.shared_memory)
    except ConfinedError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
