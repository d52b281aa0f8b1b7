"""How far the roofline is from step times measured on A100s.

    export MUXSERVE_A100_PROFILE=muxserve_a100_profile.json
    python benchmarks/costs.py [--fit] [--out benchmarks/results/costs.json]

The file is the one that MuxServe's authors published with their placement code (LLaMA 7B to 65B in float16, A100-80GB,
tensor parallel over 1 to 8, 30 to 100 % of the SMs). The constants of `muxserve.costs.calibration.GPU` were fitted to
its 7B and 30B (steps of up to 16,384 tokens); 13B and 65B were held out. `--fit` fits them again and prints them (needs
SciPy). Reported are relative errors, `|roofline / measured - 1|`, without the cells shown to be outliers, and beside
them with every cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import percentile, write_report
from muxserve.costs.calibration import GPU, Calibration
from muxserve.costs.llama_tables import read_llama_tables
from muxserve.costs.measured import ProfileModel
from muxserve.costs.outliers import Outlier
from muxserve.costs.profile import EngineProfile, PrefillCell
from muxserve.costs.roofline import Roofline

VARIABLE = "MUXSERVE_A100_PROFILE"
FITTED_ON = ("llama-7b", "llama-30b")
# Larger prefill steps are slower by half on several GPUs than smaller ones suggest; no engine that is kept responsive
# runs them (vLLM's default is 2,048 to 8,192 tokens).
LARGEST_STEP = 16384
TARGET_MEDIAN = 0.15
FIT = (
    "compute_efficiency",
    "bandwidth_efficiency",
    "kv_efficiency",
    "link_efficiency",
    "compute_shape",
    "bandwidth_shape",
    "overlap",
    "prefill_launch",
    "decode_launch",
    "prefill_launch_tp",
    "decode_launch_tp",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One cell."""

    engine: EngineProfile
    phase: str
    place: tuple[int, ...]
    seconds: float
    outlier: bool

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.place[0] * self.place[1] if self.phase == "prefill" else self.place[0]

    def roofline(self, model: Roofline) -> float:
        """Seconds."""
        costs = model.engine(self.engine.shape.architecture(self.engine.model), self.engine.where)
        if self.phase == "prefill":
            cell = PrefillCell(*self.place, seconds=0.0)
            return costs.prefill(cell.total, cell.pairs, cell.sequences)
        batch, context = self.place
        return costs.decode(batch, batch * context).seconds(batch * context)


def cells_of(model: ProfileModel) -> list[Measured]:
    """Every measured cell, outliers marked."""
    bad = {(o.engine, o.phase, o.place) for o in model.outliers}
    return [
        Measured(engine, phase, cell.place, cell.seconds, (str(engine), phase, cell.place) in bad)
        for engine in model.profile.engines
        for phase, cells in (("prefill", engine.prefill), ("decode", engine.decode))
        for cell in cells
    ]


def fit(cells: Iterable[Measured]) -> Calibration:
    """Constants that explain the cells best, by robust least squares of the logarithms."""
    import numpy as np
    from scipy.optimize import least_squares

    train = [c for c in cells if not c.outlier and c.engine.model in FITTED_ON and c.tokens <= LARGEST_STEP]

    def build(logs: Iterable[float]) -> Calibration:
        values = [float(np.exp(value)) for value in logs]
        return dataclasses.replace(GPU, **dict(zip(FIT, values, strict=True)))

    def errors(logs: Iterable[float]) -> list[float]:
        model = Roofline(build(logs))
        return [math.log(cell.roofline(model) / cell.seconds) for cell in train]

    start = [math.log(getattr(GPU, name)) for name in FIT]
    found = least_squares(errors, start, loss="soft_l1", f_scale=0.1, diff_step=1e-3, max_nfev=40)
    return build(found.x)


def summary(errors: list[float]) -> dict[str, float]:
    """Median and p90."""
    return {"cells": len(errors), "median": round(percentile(errors, 0.5), 4), "p90": round(percentile(errors, 0.9), 4)}


def by(cells: list[Measured], model: Roofline, name: Callable[[Measured], str]) -> dict[str, dict[str, object]]:
    """Errors by name and phase."""
    errors: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        errors[name(cell)][cell.phase].append(abs(cell.roofline(model) / cell.seconds - 1))
    return {key: {phase: summary(values) for phase, values in phases.items()} for key, phases in errors.items()}


def shown(outlier: Outlier) -> dict[str, object]:
    """One outlier for the report."""
    return {
        "engine": outlier.engine,
        "phase": outlier.phase,
        "place": outlier.place,
        "measured_ms": round(outlier.seconds * 1e3, 1),
        "expected_ms": round(outlier.expected * 1e3, 1),
        "why": outlier.why,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and use these")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    path = os.environ.get(VARIABLE)
    if not path:
        print(f"set {VARIABLE} to the path of MuxServe's A100 profile", file=sys.stderr)
        return 2
    profile = ProfileModel(read_llama_tables(path))
    cells = cells_of(profile)
    calibration = GPU
    if args.fit:
        calibration = fit(cells)
        print(calibration)
    model = Roofline(calibration)
    good = [cell for cell in cells if not cell.outlier]
    usual = [cell for cell in good if cell.tokens <= LARGEST_STEP]

    def held_out(cell: Measured) -> str:
        return "fitted on: 7B, 30B" if cell.engine.model in FITTED_ON else "held out: 13B, 65B"

    views: dict[str, dict[str, dict[str, object]]] = {
        "all": by(good, model, lambda cell: "all"),
        "by_part": by(good, model, held_out),
        "by_part_up_to_16384_tokens": by(usual, model, held_out),
        "by_model": by(good, model, lambda cell: cell.engine.model),
        "by_tp": by(good, model, lambda cell: str(cell.engine.tp)),
        "by_share": by(good, model, lambda cell: f"{cell.engine.share:.1f}"),
        "by_model_and_tp": by(good, model, lambda cell: f"{cell.engine.model} tp{cell.engine.tp}"),
        "with_outliers": by(cells, model, lambda cell: "all"),
    }
    for view, rows in views.items():
        print(view)
        for key, phases in sorted(rows.items()):
            cols = [f"{p}: median {v['median']:.1%}, p90 {v['p90']:.1%} of {v['cells']}" for p, v in phases.items()]  # type: ignore[index]
            print(f"  {key:22s} {'   '.join(cols)}")
    print(f"outliers: {len(profile.outliers)} of {len(cells)}")
    if args.out:
        write_report(
            args.out,
            {
                "data": "MuxServe, examples/placement: LLaMA 7B, 13B, 30B, 65B in float16 on A100-80GB",
                "target_median": TARGET_MEDIAN,
                "constants": dataclasses.asdict(calibration),
                **views,
                "outliers": [shown(outlier) for outlier in profile.outliers],
            },
        )
    worst = max(v["median"] for phases in views["by_model_and_tp"].values() for v in phases.values())  # type: ignore[index]
    print(f"largest median of any model and TP: {worst:.1%} (target: {TARGET_MEDIAN:.0%})")
    return 0 if worst <= TARGET_MEDIAN else 1


if __name__ == "__main__":
    sys.exit(main())
