"""Fifteen minutes on a GPU: `python -m tests.gpu.trial [--minutes 14] [--resume] [--list] [--out FILE]`.

Steps run one after another, most decisive first, each with a limit of its own. The results of all are in one JSON file,
written as they come. `--resume` goes on with those that are not done.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from tests.gpu.run import ROOT, about
from tests.gpu.trial.needs import missing
from tests.gpu.trial.runner import Trial, listing, summary
from tests.gpu.trial.steps import STEPS


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--minutes", type=float, default=14.0, help="for all steps together")
    parser.add_argument("--resume", action="store_true", help="go on with what the file does not have as done")
    parser.add_argument(
        "--list", action="store_true", help="print the steps, and what is missing for them; run nothing"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP")
    parser.add_argument("--rehearse", action="store_true", help="over stand-ins of the driver, with little work")
    default = Path(os.environ.get("OUT", ROOT / "benchmarks/results/gpu")) / "trial.json"
    parser.add_argument("--out", type=Path, default=default)
    return parser.parse_args()


def main() -> int:
    """Exit code 0 if all steps are done, or there is no GPU; 1 if not all are; 2 if the file is another one."""
    options = parse()
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    lacking = missing({need for step in steps for need in step.needs})
    machine = {} if options.list or "gpu" in lacking else about()
    command = "make gpu-trial-stub" if options.rehearse else "make gpu-trial"
    trial = Trial(
        options.out.resolve(), {**machine, "command": command}, options.minutes * 60, lacking, options.rehearse
    )
    if options.resume:
        try:
            trial.resume()
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    print("\n".join(listing(steps, lacking, trial.results)))
    for name, why in lacking.items():
        print(f"missing, {name}: {why}")
    if options.list:
        return 0
    if "gpu" in lacking:
        print("nothing was tried")
        return 0
    if not options.resume:
        trial.begin()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        complete = trial.run(steps)
    except KeyboardInterrupt:
        complete = False
    print("\n".join(summary(trial.results)))
    print(f"written to {trial.file}" + ("" if complete else "; --resume goes on with what is not done"))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
