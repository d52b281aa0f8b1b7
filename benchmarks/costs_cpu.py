"""How far the roofline is from steps of small models that were measured on a CPU.

    python benchmarks/costs_cpu.py [--fit] [--out benchmarks/results/costs_cpu.json]

The steps are those of `benchmarks/results/profile_quickstart_cpu.json` (`muxserve profile configs/quickstart.yaml`).
What a step of such a model takes is mostly the host's: the seconds of `muxserve.costs.calibration.CPU` for each step,
layer and sequence were fitted to two of the models, and the third was held out. `--fit` fits them again and prints them
(needs SciPy). Reported are the factors between
roofline and measurement, the larger over the smaller, without the cells shown to be outliers.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.costs import Measured, cells_of, fitted
from benchmarks.report import percentile, write_report
from muxserve.costs.calibration import CPU, Calibration
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import load_profile
from muxserve.costs.roofline import Roofline

PROFILE = Path(__file__).resolve().parent / "results/profile_quickstart_cpu.json"
HELD_OUT = "frontdesk"
FITTED = ("host_step", "layer_seconds", "host_sequence")


def logs(cells: Sequence[Measured], calibration: Calibration) -> list[float]:
    """Logarithms of roofline over measurement."""
    model = Roofline(calibration)
    return [math.log(cell.roofline(model) / cell.seconds) for cell in cells]


def fit(cells: Sequence[Measured]) -> Calibration:
    """The host's seconds that explain the cells best."""

    def build(values: Sequence[float]) -> Calibration:
        return dataclasses.replace(CPU, **dict(zip(FITTED, values, strict=True)))

    return build(fitted([getattr(CPU, name) for name in FITTED], lambda values: logs(cells, build(values))))


def factors(cells: Sequence[Measured], calibration: Calibration) -> dict[str, float]:
    """Median, p90 and the largest."""
    found = [math.exp(abs(error)) for error in logs(cells, calibration)]
    shares = {"median": percentile(found, 0.5), "p90": percentile(found, 0.9), "max": max(found)}
    return {"cells": len(found), **{name: round(value, 3) for name, value in shares.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constant again, and use that")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="another profile of this fleet")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    cells = [cell for cell in cells_of(ProfileModel(load_profile(args.profile))) if not cell.outlier]
    fitted_on = [cell for cell in cells if cell.engine.model != HELD_OUT]
    held_out = [cell for cell in cells if cell.engine.model == HELD_OUT]
    calibration = fit(fitted_on) if args.fit else CPU
    report: dict[str, object] = {name: getattr(calibration, name) for name in FITTED}
    for name, group in (("fitted", fitted_on), ("held_out", held_out)):
        phases = {phase: [cell for cell in group if cell.phase == phase] for phase in ("prefill", "decode")}
        report[name] = {phase: factors(of, calibration) for phase, of in phases.items()}
        for phase, of in phases.items():
            print(f"{name} {phase}: {factors(of, calibration)}")
    print(", ".join(f"{name} {getattr(calibration, name) * 1e3:.3f} ms" for name in FITTED))
    if args.out is not None:
        write_report(args.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
