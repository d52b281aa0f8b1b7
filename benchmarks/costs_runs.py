"""How far predicted steps are from whole runs of today's engines on GPUs, by the roofline and by kernel tables.

    pip install --no-deps --target build/plan -r requirements/plan.txt
    PYTHONPATH=$PWD:$PWD/build/plan python benchmarks/costs_runs.py --out benchmarks/results/costs_runs.json

The cells are the package's own (`silicon_sample.csv` of aiconfigurator-core): time per output token of vLLM, SGLang and
TensorRT-LLM under a constant number of requests. Taken are those of A100, H100 and H200 with one engine for both phases
and tensor parallelism only. A cell is predicted as a steady state: while a request is answered, every other request's
prompt is computed once, in chunks beside the decoding sequences.

Nothing was fitted to these cells. Errors are `predicted / measured - 1`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import percentile, write_report
from muxserve.costs.architecture import ModelArchitecture, read_architecture
from muxserve.costs.calibration import GPU
from muxserve.costs.devices import device
from muxserve.costs.kernels import SYSTEMS, KernelModel
from muxserve.costs.language_models import language_model
from muxserve.costs.latency import CostError, EngineShape, LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.step_costs import StepCosts, StepWork

DEVICES = {system: name for name, system in SYSTEMS.items() if name.startswith(("A100", "H100", "H200"))}
# Names of the cells for which the package has the config.json under another one.
SAME = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
# Prompt tokens of a step at most: vLLM's `max_num_batched_tokens` for an API server on these GPUs.
CHUNK = 8192
# These engines schedule a step while the device computes the one before.
HIDDEN = replace(GPU, host_step=0.0, host_sequence=0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """A cell: `batch` requests at a time of `prompt` and `answer` tokens, on `tp` devices; seconds per output token."""

    model: str
    device: str
    backend: str
    tp: int
    batch: int
    prompt: int
    answer: int
    precision: str
    seconds: float
    architecture: ModelArchitecture

    @property
    def family(self) -> str:
        """The model without its maker."""
        return SAME.get(self.model, self.model).rpartition("/")[2]

    @property
    def fits(self) -> bool:
        """Whether the devices have room for that many requests; where they have not, some of them wait."""
        a = self.architecture
        tokens = self.batch * (self.prompt + self.answer // 2)
        seen = tokens - a.windowed_layers / a.layers * max(0, tokens - self.batch * a.window)
        held = a.weight_bytes("bfloat16") + seen * a.kv_bytes_per_token("bfloat16")
        return held < 0.9 * self.tp * device(self.device).memory_bytes

    @property
    def shape(self) -> EngineShape:
        """The engine."""
        return EngineShape(self.device, self.tp, 1.0, "bfloat16", "full")

    def predicted(self, latency: LatencyModel) -> float:
        """Seconds per output token."""
        costs = StepCosts(latency.engine(self.architecture, self.shape))
        context = self.batch * (self.prompt + self.answer // 2)
        alone = costs.seconds(StepWork(decode=self.batch, context=context))
        chunk = min(CHUNK, self.prompt)
        # Prompts meanwhile, in steps of whole chunks, at most one for each token; beyond that steps get longer.
        steps = self.batch * self.prompt / chunk
        most = max(1.0, steps / self.answer)
        work = StepWork(decode=self.batch, context=context)
        for _ in range(round(most)):
            work.add_prompt(chunk, (self.prompt - chunk) // 2)
        mixed = min(steps / round(most), float(self.answer))
        return (mixed * costs.seconds(work) + (self.answer - mixed) * alone) / self.answer


def package() -> Path:
    """Where the package's files are."""
    import aiconfigurator_core

    return Path(aiconfigurator_core.__file__).parent


def quantised(config: dict[str, object], gemm: str) -> dict[str, object]:
    """A config.json as a checkpoint has it that is quantised that way; its own quantisation stays."""
    inner = config.get("text_config")
    if "quantization_config" in config or (isinstance(inner, dict) and "quantization_config" in inner):
        return config
    if gemm == "fp8_block":
        return {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    return {**config, "quantization_config": {"quant_method": "fp8"}} if gemm == "fp8" else config


def runs() -> Iterator[Run]:
    """The cells."""
    known: dict[tuple[str, str], ModelArchitecture | None] = {}
    with (package() / "systems/silicon_sample.csv").open() as lines:
        for row in csv.DictReader(lines):
            name = DEVICES.get(row["system"])
            numbers = [int(float(row[key] or 1)) for key in ("pp_size", "attention_dp_size", "tp_size")]
            stages, ranks, tp = numbers
            if name is None or row["mode"] != "agg" or stages > 1 or ranks > 1 or not row["silicon_tpot_ms"]:
                continue
            if tp > 8 or not row["batch_size"] or int(float(row["moe_ep_size"] or 1)) > 1:
                continue
            checkpoint = (row["model_path"], row["gemm_quant_mode"])
            if checkpoint not in known:
                known[checkpoint] = architecture_of(*checkpoint)
            architecture = known[checkpoint]
            if architecture is None:
                continue
            batch, prompt, answer = (int(float(row[key])) for key in ("batch_size", "isl", "osl"))
            seconds = float(row["silicon_tpot_ms"]) / 1e3
            model = row["model_path"]
            yield Run(model, name, row["backend"], tp, batch, prompt, answer, row["precision"], seconds, architecture)


def architecture_of(model: str, gemm: str) -> ModelArchitecture | None:
    """None: the package has no config.json of that name."""
    file = package() / "model_configs" / f"{SAME.get(model, model).replace('/', '--')}_config.json"
    if not file.is_file():
        return None
    config = quantised(json.loads(file.read_text()), gemm)
    return replace(read_architecture(language_model(config) or config), config=json.dumps(config))


def figures(errors: Iterable[float]) -> dict[str, float]:
    """Of relative errors: how many, the mean, the median and the 90th percentile of their size."""
    found = list(errors)
    sizes = sorted(abs(each) for each in found)
    return {
        "cells": len(found),
        "bias": sum(found) / len(found),
        "median": median(sizes),
        "p90": percentile(sizes, 0.9),
    }


def main() -> None:
    """Predict every cell twice, and print the errors by backend and model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    roofline = Roofline(HIDDEN)
    kernels = {backend: KernelModel(backend=backend, calibration=HIDDEN) for backend in ("vllm", "sglang", "trtllm")}
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    unknown: defaultdict[str, int] = defaultdict(int)
    for run in runs():
        if not run.fits:
            unknown["more requests than there is memory for"] += 1
            continue
        try:
            after = run.predicted(kernels[run.backend])
        except CostError as error:
            unknown[f"{run.family} on {run.device}, {run.backend}: {error}"] += 1
            continue
        before = run.predicted(roofline)
        groups = (
            ("all", "all"), ("all", run.backend), (run.family, "all"), (run.family, run.backend),
            (run.device, run.backend), (f"{run.family} {run.device}", run.backend),
        )  # fmt: skip
        for group in groups:
            found[(*group, "roofline")].append(before / run.seconds - 1)
            found[(*group, "kernels")].append(after / run.seconds - 1)
    rows = [
        {"of": of, "backend": backend, "costs": costs, **figures(errors)}
        for (of, backend, costs), errors in sorted(found.items())
    ]
    words = "{of:44} {backend:7} {costs:9} {cells:5} bias {bias:+.1%} median {median:.1%} p90 {p90:.1%}"
    for row in rows:
        print(words.format(**row))
    for why, count in unknown.items():
        print(f"{count} cells are unknown: {why}")
    if out is not None:
        write_report(out, {"version": kernels["vllm"].version("H100-80GB"), "rows": rows, "unknown": dict(unknown)})


if __name__ == "__main__":
    main()
