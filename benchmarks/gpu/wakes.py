"""How long a sleeping model on a GPU takes to answer: its engines stayed, or have ended.

    python benchmarks/gpu/wakes.py [--models 6] [--shape llama-1b] [--limit 30GiB] [--rounds 3] [--out FILE]

A fleet with `memory:`, in which some of the models have room, is asked in turn, one model at a time, so that nearly
every question wakes its model. First with `resting_engines`, then without, and with so much less memory. Only questions
that waited for a wake count, and not those of the first round: by then each has been loaded. What the policy has learnt
of how long an idle model takes to sleep is written down, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import machine, write_report
from servers import ROOT, ServerError, end_cleanly, muxserve_fleet
from wakes import asked, summary

from gpu import checkpoints
from muxserve.cli.http import get_json
from muxserve.config.values import parse_size
from muxserve.gpu import nvml
from tests.gpu.run import STAND_INS
from tests.gpu.trial.runner import finding

START_SECONDS = 900.0


def fleet_file(folder: Path, system: str, paths: dict[str, Path], limit: int, resting: int | str, eager: bool) -> Path:
    """A fleet of these models on one GPU."""
    models = [
        {
            "name": name,
            "path": str(path),
            "max_len": 2048,
            "max_num_seqs": 32,
            "limits": {"max_wait": "none"},
            "engine_args": {"load_format": "dummy", "enforce_eager": eager},
        }
        for name, path in paths.items()
    ]
    memory = {"limit": limit, "min_residence": 0, "resting_engines": resting}
    path = folder / f"{system}.yaml"
    path.write_text(yaml.safe_dump({"cluster": {"gpus": 1}, "memory": memory, "models": models}, sort_keys=False))
    return path


def main() -> int:
    """Exit code 1 if a fleet does not come up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--shape", default="llama-1b", help="name in configs/gpu, or a checkpoint's directory")
    parser.add_argument("--limit", type=parse_size, default="30GiB", help="memory of everything on the GPU")
    parser.add_argument("--resting", type=parse_size, default="12GiB", help="memory that engines which rest may take")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    default = Path(os.environ.get("OUT", ROOT / "benchmarks/results/gpu"))
    parser.add_argument("--out", type=Path, default=default / "wakes.json")
    options = parser.parse_args()
    found = nvml.visible(nvml.machine(), os.environ)
    if not found.gpus:
        print(f"nothing was measured: {found.why_none or 'no GPU is visible'}")
        return 0
    end_cleanly()
    report: dict[str, Any] = {
        "machine": machine(),
        "gpus": [gpu.name for gpu in found.gpus],
        "stand_ins": STAND_INS,
        "systems": {},
    }
    with tempfile.TemporaryDirectory(prefix="wakes-") as name:
        folder, given = Path(name), Path(options.shape)
        names = [f"m{number}" for number in range(options.models)]
        paths = {n: given.resolve() if given.is_dir() else checkpoints.make(folder, n, options.shape) for n in names}
        try:
            # As many models have room either way.
            fleets = {"stayed": (options.limit, options.resting), "ended": (options.limit - options.resting, "off")}
            for system, (limit, resting) in fleets.items():
                file = fleet_file(folder, system, paths, limit, resting, options.eager)
                with muxserve_fleet(file, timeout=START_SECONDS) as server:
                    questions = asyncio.run(asked(server.url, server.pid, names, 1, options.rounds))
                    sleep_seconds = get_json(server.url, "/fleet")[1]["memory"]["sleep_seconds"]
                later = [each for each in questions if not each["first_wakes"] and each["round"]]
                report["systems"][system] = {
                    "later": summary(later),
                    "learnt_sleep_seconds": sleep_seconds,
                    "questions": questions,
                }
                words = (
                    f"later wakes {json.dumps(summary(later))}; an idle model's memory is free after {sleep_seconds} s"
                )
                finding(f"engines {system}: {words}")
                write_report(options.out, report)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
