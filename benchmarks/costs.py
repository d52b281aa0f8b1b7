"""How far the roofline is from kernels and steps that others measured on GPUs, and the fit of its constants.

    git clone https://github.com/microsoft/vidur        # its data/profiling has kernels of A100, A40 and H100
    export VIDUR_PROFILING=vidur/data/profiling
    export MUXSERVE_A100_PROFILE=muxserve_a100_profile.json
    python benchmarks/costs.py [--fit] [--out benchmarks/results/costs.json]

Neither source is part of this repository. Each gives what it alone can tell, and the rest of it is held out:

- Vidur's `mlp.csv`: everything in a layer but attention and communication, by model, tokens and tensor parallelism.
  Fitted: Llama-2-7B on one A100 and one H100, at most 4,096 tokens (compute, bandwidth, overlap, small kernels).
- Vidur's `all_reduce.csv`: efficiency and latency of NVLink (A100 and H100 of a DGX) and the latency of PCIe.
- MuxServe's step times, an engine of 2023 without CUDA graphs on A100-80GB (LLaMA 7B to 65B, tensor parallel over 1 to
  8, 30 to 100 % of the SMs). From 7B on one whole GPU: how decode grows with its context. From 7B and 30B, steps of up
  to 16,384 tokens: shares, launches, and that engine's own host time, which is no constant of ours.

`--fit` fits again and prints what it finds (needs SciPy). Reported are relative errors, `|roofline / measured - 1|`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import percentile, write_report
from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.calibration import GPU, LINKS, Calibration, Launches
from muxserve.costs.devices import device
from muxserve.costs.kernels import KernelModel, package_version
from muxserve.costs.latency import EngineShape, LatencyModel
from muxserve.costs.llama_tables import read_llama_tables
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import EngineProfile, PrefillCell
from muxserve.costs.roofline import Roofline, RooflineCosts

KERNELS, TABLES = "VIDUR_PROFILING", "MUXSERVE_A100_PROFILE"
FITTED_ON = ("llama-7b", "llama-30b")
# Larger prefill steps are slower by half on several GPUs than smaller ones suggest; no engine that is kept responsive
# runs them (vLLM's default is 2,048 to 8,192 tokens).
LARGEST_STEP = 16384
LARGEST_KERNEL = 4096
TARGET_MEDIAN = 0.15
DEVICES = {"a100": "A100-80GB", "h100": "H100-80GB", "a40": "A40-48GB"}
# Twice in a layer: the additions to the residual stream.
_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
    "add",
)
# The engine that MuxServe's authors measured: everything launched from Python, and more between two steps.
OF_2023 = dataclasses.replace(GPU, host_step=3.15e-3, host_sequence=11e-6)
Fit = Callable[[Sequence[float]], list[float]]
T = TypeVar("T", "Measured", "Kernels")


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One cell of MuxServe's tables."""

    engine: EngineProfile
    phase: str
    place: tuple[int, ...]
    seconds: float
    outlier: bool

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.place[0] * self.place[1] if self.phase == "prefill" else self.place[0]

    def predicted(self, model: LatencyModel) -> float:
        """Seconds, launched kernel by kernel."""
        shape = dataclasses.replace(self.engine.where, graphs="eager")
        costs = model.engine(self.engine.shape.architecture(self.engine.model), shape)
        if self.phase == "prefill":
            cell = PrefillCell(*self.place, seconds=0.0)
            return costs.prefill(cell.total, cell.pairs, cell.sequences)
        batch, context = self.place
        return costs.decode(batch, batch * context).seconds(batch * context)


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """The linear layers and small operators of one layer, for `tokens` tokens."""

    architecture: ModelArchitecture
    device: str
    tp: int
    tokens: int
    seconds: float

    def predicted(self, model: LatencyModel) -> float:
        """Seconds."""
        shape = EngineShape(DEVICES[self.device], self.tp, dtype="float16")
        costs = model.engine(self.architecture, shape)
        assert isinstance(costs, RooflineCosts), "only the roofline knows layers alone"
        return costs.layers(self.tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class AllReduce:
    """One all-reduce of `size` bytes over `ranks` devices on machines of that kind."""

    system: str
    ranks: int
    size: int
    seconds: float

    def predicted(self, efficiency: float, latency: float, bandwidth: float) -> float:
        """Seconds, as `Roofline` has them for two per layer."""
        sent = 2.0 * (self.ranks - 1) / self.ranks * self.size
        return math.log2(self.ranks) * latency + sent / (bandwidth * efficiency)


# Which link the all-reduces of a system cross, and its bytes per second in one direction. Where only pairs have NVLink,
# a ring of four crosses PCIe.
SYSTEMS = {
    ("a100_dgx", (2, 4, 8)): ("nvlink3", 300e9),
    ("h100_dgx", (2, 4, 8)): ("nvlink4", 450e9),
    ("a100_pairwise_nvlink", (4,)): ("pcie", 32e9),
    ("h100_pairwise_nvlink", (4,)): ("pcie", 64e9),
}


def cells_of(model: ProfileModel) -> list[Measured]:
    """Every measured cell, outliers marked."""
    bad = {(o.engine, o.phase, o.place) for o in model.outliers}
    return [
        Measured(engine, phase, cell.place, cell.seconds, (str(engine), phase, cell.place) in bad)
        for engine in model.profile.engines
        for phase, cells in (("prefill", engine.prefill), ("decode", engine.decode))
        for cell in cells
    ]


def read_kernels(folder: Path) -> list[Kernels]:
    """Vidur's `compute/DEVICE/OWNER/MODEL/mlp.csv`, of models with gated MLPs; the median where one was measured
    several times."""
    found = []
    for path in sorted(folder.glob("compute/*/*/*/mlp.csv")):
        name, on = path.parts[-2], path.parts[-4]
        with path.open() as file:
            rows = list(csv.DictReader(file))
        if on not in DEVICES or rows[0]["use_gated_mlp"] != "True":
            continue
        seconds: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for row in rows:
            place = int(row["num_tensor_parallel_workers"]), int(row["num_tokens"])
            seconds[place].append(sum(float(row[f"time_stats.{each}.median"] or 0.0) for each in _OPERATORS) / 1e3)
        heads, kv_heads, hidden, intermediate, vocab = (
            int(rows[0][key]) for key in ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size")
        )
        one = ModelArchitecture(
            name, 1, heads, kv_heads, hidden // heads, hidden, intermediate, vocab, 4096, 4096, "float16"
        )
        found += [Kernels(one, on, tp, tokens, median(times)) for (tp, tokens), times in seconds.items()]
    return found


def read_all_reduces(folder: Path) -> list[AllReduce]:
    """Vidur's `network/SYSTEM/all_reduce.csv` within one machine, 16 KiB and more."""
    found = []
    for system, ranks in SYSTEMS:
        seconds: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        with (folder / "network" / system / "all_reduce.csv").open() as file:
            for row in csv.DictReader(file):
                workers, size = int(row["num_workers"]), int(float(row["size"]))
                if workers in ranks and int(row["devices_per_node"]) == workers and size >= 16384:
                    seconds[workers, size].append(float(row["time_stats.all_reduce.median"]) / 1e3)
        found += [AllReduce(system, workers, size, median(times)) for (workers, size), times in seconds.items()]
    return found


def fitted(start: Sequence[float], errors: Fit) -> list[float]:
    """Positive constants with the least robust squares of `errors` (logarithms)."""
    import numpy as np
    from scipy.optimize import least_squares

    found = least_squares(
        lambda logs: errors([float(np.exp(value)) for value in logs]),
        [math.log(value) for value in start],
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
        max_nfev=60,
    )
    return [float(np.exp(value)) for value in found.x]


def fit_kernels(kernels: Iterable[Kernels]) -> Calibration:
    """What the device does in linear layers."""
    names = ("compute_efficiency", "bandwidth_efficiency", "overlap", "layer_seconds")
    train = [k for k in kernels if fitted_kernel(k)]

    def errors(values: Sequence[float]) -> list[float]:
        model = Roofline(dataclasses.replace(GPU, **dict(zip(names, values, strict=True))))
        return [math.log(k.predicted(model) / k.seconds) for k in train]

    values = fitted([getattr(GPU, name) for name in names], errors)
    return dataclasses.replace(GPU, **dict(zip(names, values, strict=True)))


def fitted_kernel(kernel: Kernels) -> bool:
    """Whether constants were fitted to it."""
    return kernel.architecture.name == "Llama-2-7b-hf" and kernel.tp == 1 and kernel.device in ("a100", "h100")


def kv_efficiency(cells: Iterable[Measured]) -> float:
    """The efficiency of KV by the growth of decode steps with their context: 7B on one whole GPU, batches whose step is
    no launch's."""
    rows: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for cell in cells:
        where = cell.engine.where
        whole = cell.engine.model == "llama-7b" and where.tp == 1 and where.share == 1.0
        if whole and cell.phase == "decode" and not cell.outlier and cell.place[0] >= 64:
            rows[cell.place[0]].append((cell.place[0] * cell.place[1], cell.seconds))
    slopes = []
    for points in rows.values():
        (x0, y0), (x1, y1) = min(points), max(points)
        slopes.append((y1 - y0) / (x1 - x0))
    kv_bytes = 2 * 32 * 4096 * 2
    return kv_bytes / device("A100").bandwidth / median(slopes)


def fit_steps(cells: Iterable[Measured], kernels: Calibration) -> Calibration:
    """Shares, launches and that engine's host time, with what the device does as given."""
    train = [c for c in cells if not c.outlier and c.engine.model in FITTED_ON and c.tokens <= LARGEST_STEP]

    def build(values: Sequence[float]) -> Calibration:
        compute, bandwidth, step, sequence, *launches = values
        return dataclasses.replace(
            kernels,
            compute_shape=compute,
            bandwidth_shape=bandwidth,
            host_step=step,
            host_sequence=sequence,
            launches={"eager": Launches(*launches)},
        )

    def errors(values: Sequence[float]) -> list[float]:
        model = Roofline(build(values))
        return [math.log(cell.predicted(model) / cell.seconds) for cell in train]

    start = OF_2023.compute_shape, OF_2023.bandwidth_shape, OF_2023.host_step, OF_2023.host_sequence
    return build(fitted([*start, *OF_2023.launches["eager"]], errors))


def fit_links(reduces: Iterable[AllReduce]) -> dict[str, tuple[float, float]]:
    """Efficiency and latency by system."""
    found = {}
    for (system, _), (_, bandwidth) in SYSTEMS.items():
        train = [r for r in reduces if r.system == system]

        def errors(values: Sequence[float], train: list[AllReduce] = train, peak: float = bandwidth) -> list[float]:
            return [math.log(r.predicted(values[0], values[1], peak) / r.seconds) for r in train]

        efficiency, latency = fitted([0.6, 1e-5], errors)
        found[system] = efficiency, latency
    return found


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Median and p90 of their sizes, and the median with its sign."""
    sizes = [abs(each) for each in errors]
    shown = {"median": percentile(sizes, 0.5), "p90": percentile(sizes, 0.9), "bias": percentile(errors, 0.5)}
    return {"cells": len(sizes)} | {key: round(value, 4) for key, value in shown.items()}


def by(cells: Iterable[T], model: LatencyModel, name: Callable[[T], str]) -> dict[str, dict[str, float]]:
    """Errors by name."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for cell in cells:
        errors[name(cell)].append(cell.predicted(model) / cell.seconds - 1)
    return {key: summary(values) for key, values in sorted(errors.items())}


def report_kernels(folder: Path, refit: bool) -> dict[str, object]:
    """Linear layers and all-reduces."""
    kernels = [k for k in read_kernels(folder) if k.tokens <= LARGEST_KERNEL]
    reduces = read_all_reduces(folder)
    if refit:
        print(fit_kernels(kernels))
        print(fit_links(reduces))
    model = Roofline()
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for each in reduces:
        link, bandwidth = SYSTEMS[next(key for key in SYSTEMS if key[0] == each.system)]
        use = LINKS[link]
        predicted = each.predicted(use.efficiency, use.latency, bandwidth)
        errors[f"{each.system}, {each.ranks} ranks"].append(predicted / each.seconds - 1)
    return {
        "linear_layers": by(kernels, model, lambda k: f"{k.device} {k.architecture.name}"),
        "linear_layers_by_tp": by(kernels, model, lambda k: f"{k.device} tp{k.tp}"),
        "linear_layers_held_out": by(kernels, model, lambda k: "fitted" if fitted_kernel(k) else "held out"),
        "all_reduces": {key: summary(values) for key, values in sorted(errors.items())},
    }


def report_steps(path: str, refit: bool) -> dict[str, object]:
    """Whole steps of an engine of 2023."""
    profile = ProfileModel(read_llama_tables(path))
    cells = cells_of(profile)
    good = [cell for cell in cells if not cell.outlier]
    if refit:
        print("kv_efficiency", kv_efficiency(cells))
        print(fit_steps(cells, GPU))
    model = Roofline(OF_2023)

    def part(cell: Measured) -> str:
        return "fitted on: 7B, 30B" if cell.engine.model in FITTED_ON else "held out: 13B, 65B"

    whole = [cell for cell in good if cell.engine.share == 1.0]
    by_costs = by(whole, model, lambda c: f"roofline, {c.phase}")
    if package_version():
        by_costs |= by(whole, KernelModel(calibration=OF_2023), lambda c: f"kernels, {c.phase}")
    return {
        "steps_outliers": len(profile.outliers),
        "steps_by_part": by(good, model, lambda c: f"{part(c)}, {c.phase}"),
        "steps_by_model_and_tp": by(good, model, lambda c: f"{c.engine.model} tp{c.engine.tp}, {c.phase}"),
        "steps_on_whole_gpus": by_costs,
        "steps_by_share": by(good, model, lambda c: f"{c.engine.share:.1f}, {c.phase}"),
        "steps_with_outliers": by(cells, model, lambda c: c.phase),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and print them")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    kernels, tables = os.environ.get(KERNELS), os.environ.get(TABLES)
    if not kernels or not tables:
        print(f"set {KERNELS} to Vidur's data/profiling and {TABLES} to MuxServe's A100 profile", file=sys.stderr)
        return 2
    views = report_kernels(Path(kernels), args.fit) | report_steps(tables, args.fit)
    for view, rows in views.items():
        print(view)
        if not isinstance(rows, dict):
            print(f"  {rows}")
            continue
        for key, each in rows.items():
            errors = ", ".join(f"{name} {each[name]:+.1%}" for name in ("median", "p90", "bias"))
            print(f"  {key:36s} {errors} of {each['cells']}")
    if args.out:
        constants: dict[str, object] = {each.name: getattr(GPU, each.name) for each in dataclasses.fields(GPU)}
        constants["launches"] = {graphs: each._asdict() for graphs, each in GPU.launches.items()}
        constants["links"] = {link: use._asdict() for link, use in LINKS.items()}
        write_report(args.out, {"target_median": TARGET_MEDIAN, "constants": constants, **views})
    rows = [views[view] for view in ("linear_layers", "steps_by_model_and_tp")]
    worst = max(each["median"] for row in rows if isinstance(row, dict) for each in row.values())
    print(f"largest median of any device, model and TP: {worst:.1%} (target: {TARGET_MEDIAN:.0%})")
    return 0 if worst <= TARGET_MEDIAN else 1


if __name__ == "__main__":
    sys.exit(main())
