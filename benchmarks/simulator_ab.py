"""The simulator's speed in two checkouts, on one machine at one time.

    git worktree add OLD COMMIT
    python benchmarks/simulator_ab.py OLD . [--requests 4000] [--repeats 3] [--out FILE]

Runs of the workloads of `simulator.py` alternate between the checkouts, each in a process of its own. What is compared
is the least processor time of the repeats, since others at work on the machine only ever make it longer; where the
two do not simulate the same, to the last bit (`the_same`), for each engine step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from report import machine, write_report

RUNS = [("muxserve", 10.0), ("muxserve", 40.0), ("temporal", 10.0), ("temporal", 40.0), ("spatial", 40.0), ("one", 3.0)]
SAME = ("engine_steps", "simulated_seconds", "completed", "preemptions", "digest")
# The installed package is this checkout's, whatever the directory; and `benchmarks/placement.py` is not `placement`.
CHILD = """
import json, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.append("benchmarks")
import simulator as s
name, total, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
models, layout = s.fleet()
if name == "one":
    rate = {next(iter(models)): total}
    placed = tuple(s.PlacedModel(model, total, 0.6, 0.4) for model in rate)
    unit = s.PlacedUnit("unit0", s.DEVICE, (0,), placed, 50 * s.GIB)
    placement, mode = s.Placement(s.Cluster((s.Node(s.DEVICE, 1),)), (unit,)), s.mode_of("muxserve")
else:
    rate, mode = s.rates(list(models), total), s.mode_of(name)
    placement = s.apart(models, rate) if mode.placement == "spatial" else s.colocated(models, layout, rate)
print(json.dumps(s.measure(s.units_of(placement, models, mode), s.load(rate, count), False)))
"""


def run(tree: Path, name: str, total: float, requests: int) -> dict[str, float]:
    """One run in a checkout."""
    command = [sys.executable, "-c", CHILD, name, str(total), str(requests)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, object] = {}
    for name, total in RUNS:
        runs: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
        for _ in range(args.repeats):
            runs["old"].append(run(args.old, name, total, args.requests))
            runs["new"].append(run(args.new, name, total, args.requests))
        best = {side: min(each, key=lambda figures: figures["cpu_seconds"]) for side, each in runs.items()}
        same = all(best["old"].get(key) == best["new"].get(key) for key in SAME)
        # Where they do not simulate the same, one has more steps to take than the other.
        old, new = (each["cpu_seconds"] / (1 if same else each["engine_steps"]) for each in best.values())
        ratio = old / new
        kept = ("cpu_seconds", "steps_per_second", "turns", "looks")
        report[f"{name} at {total:g} requests/s"] = {
            "times_as_fast": round(ratio, 2),
            "the_same": same,
            **{side: {key: figures[key] for key in kept} for side, figures in best.items()},
        }
        print(f"{name} at {total:g} requests/s: {ratio:.2f} times as fast, {best}", flush=True)
    if args.out:
        write_report(args.out, {"machine": machine(), "requests": args.requests, "runs": report})


if __name__ == "__main__":
    main()
