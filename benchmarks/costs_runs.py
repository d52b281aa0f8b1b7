"""How far predicted steps are from whole runs of today's engines on GPUs, by the roofline and by kernel tables.

    pip install --no-deps --target build/plan -r requirements/plan.txt
    PYTHONPATH=$PWD:$PWD/build/plan python benchmarks/costs_runs.py --out benchmarks/results/costs_runs.json

The cells are the package's own (`silicon_sample.csv` of aiconfigurator-core): mean time to the first token (TTFT) and
per output token (TPOT) of vLLM, SGLang and TensorRT-LLM under a constant number of requests. Taken are those of the
GPUs that have kernel tables, with one engine for both phases and tensor parallelism only.

TPOT is predicted as a steady state: while a request is answered, every other request's prompt is computed once, in
chunks beside the decoding sequences. TTFT is predicted by a replay, since requests wait for each other: all come at
once, each that is answered is followed by another one, until there were ten times as many.

SGLang, TensorRT-LLM and vLLM from 0.14 on schedule a step while the device computes the one before; in older versions
of vLLM the device waits for the host.

Nothing was fitted to these cells. Errors are `predicted / measured - 1`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import percentile, write_report
from muxserve.costs.architecture import ModelArchitecture, read_architecture
from muxserve.costs.devices import device
from muxserve.costs.kernels import SYSTEMS, KernelModel
from muxserve.costs.language_models import language_model
from muxserve.costs.latency import EngineShape, LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.step_costs import StepCosts, StepWork

DEVICES = {system: name for name, system in SYSTEMS.items()}
# Names of the cells for which the package has the config.json under another one.
SAME = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
# Prompt tokens of a step at most: vLLM's `max_num_batched_tokens` for an API server on these GPUs.
CHUNK = 8192
# Requests of a run for each that is served at a time.
ROUNDS = 10
# The first version of vLLM that schedules ahead unless it is told otherwise (its pull request 27614).
AHEAD = (0, 14)


@dataclass(frozen=True, slots=True)
class Run:
    """A cell: `batch` requests at a time of `prompt` and `answer` tokens, on `tp` devices, and seconds."""

    model: str
    device: str
    backend: str
    version: str
    tp: int
    batch: int
    prompt: int
    answer: int
    ttft: float
    tpot: float
    architecture: ModelArchitecture

    @property
    def family(self) -> str:
        """The model without its maker."""
        return SAME.get(self.model, self.model).rpartition("/")[2]

    @property
    def kind(self) -> str:
        """The kind of the model's layers, as the tables of errors name it."""
        a = self.architecture
        return "latent attention" if a.latent else "mixture of experts" if a.experts > 1 else "dense"

    @property
    def ahead(self) -> bool:
        """Whether the engine schedules a step ahead. Cells without a version are of late 2025."""
        found = tuple(int(each) for each in self.version.split(".")[:2] if each.isdigit())
        return self.backend != "vllm" or found >= AHEAD

    @property
    def fits(self) -> bool:
        """Whether the devices have room for that many requests; where they have not, some of them wait."""
        a = self.architecture
        tokens = self.batch * (self.prompt + self.answer // 2)
        seen = tokens - a.windowed_layers / a.layers * max(0, tokens - self.batch * a.window)
        held = a.weight_bytes("bfloat16") + seen * a.kv_bytes_per_token("bfloat16")
        return held < 0.9 * self.tp * device(self.device).memory_bytes

    @property
    def was_served(self) -> bool:
        """Whether that many requests were really served at a time: others waited for longer than they were answered."""
        return self.ttft <= self.answer * self.tpot

    @property
    def shape(self) -> EngineShape:
        """The engine."""
        return EngineShape(self.device, self.tp, 1.0, "bfloat16", "full", ahead=self.ahead)

    def predicted_ttft(self, latency: LatencyModel) -> float:
        """Mean seconds to the first token: prompts are computed in order, beside the sequences that decode."""
        costs = StepCosts(latency.engine(self.architecture, self.shape))
        waiting = deque((0.0, self.prompt) for _ in range(self.batch))  # arrival, and tokens to compute
        running: list[int] = []  # the step after which each sequence has ended
        came, step, now, context, waits = self.batch, 0, 0.0, 0, 0.0
        while waiting or running:
            if waiting:
                work, room = StepWork(decode=len(running), context=context), CHUNK - len(running)
                through = []
                while waiting and room > 0:
                    arrival, left = waiting.popleft()
                    chunk = min(room, left)
                    work.add_prompt(chunk, self.prompt - left)
                    room -= chunk
                    if chunk < left:
                        waiting.appendleft((arrival, left - chunk))
                    else:
                        through.append(arrival)
                now, step, context = now + costs.seconds(work), step + 1, context + len(running)
                waits += sum(now - arrival for arrival in through)
                for _ in through:
                    heappush(running, step + self.answer - 1)
                context += len(through) * self.prompt
            else:
                steps, batch = running[0] - step, len(running)
                middle = context + batch * steps // 2
                now += steps * costs.seconds(StepWork(decode=batch, context=middle))
                step, context = step + steps, context + batch * steps
            while running and running[0] <= step:
                heappop(running)
                context -= self.prompt + self.answer - 1
                if came < ROUNDS * self.batch:
                    came += 1
                    waiting.append((now, self.prompt))
        return waits / came

    def predicted_tpot(self, latency: LatencyModel) -> float:
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
            if row["moe_quant_mode"] and int(float(row["moe_tp_size"] or tp)) not in (1, tp):
                continue  # experts are over more devices than attention, of which there are several copies
            checkpoint = (row["model_path"], row["gemm_quant_mode"])
            if checkpoint not in known:
                known[checkpoint] = architecture_of(*checkpoint)
            architecture = known[checkpoint]
            if architecture is None:
                continue
            batch, prompt, answer = (int(float(row[key])) for key in ("batch_size", "isl", "osl"))
            ttft, tpot = (float(row[key]) / 1e3 for key in ("silicon_ttft_ms", "silicon_tpot_ms"))
            engine = row["backend"], row["backend_version"]
            yield Run(row["model_path"], name, *engine, tp, batch, prompt, answer, ttft, tpot, architecture)


def architecture_of(model: str, gemm: str) -> ModelArchitecture | None:
    """None: the package has no config.json of that name."""
    file = package() / "model_configs" / f"{SAME.get(model, model).replace('/', '--')}_config.json"
    if not file.is_file():
        return None
    config = quantised(json.loads(file.read_text()), gemm)
    return replace(read_architecture(language_model(config) or config), config=json.dumps(config))


def figures(errors: Iterable[float]) -> dict[str, float]:
    """How many relative errors there are, and the mean, the median and the 90th percentile of their size."""
    found = list(errors)
    sizes = sorted(abs(each) for each in found)
    return {
        "cells": len(found),
        "bias": sum(found) / len(found),
        "median": median(sizes),
        "p90": percentile(sizes, 0.9),
    }


def main() -> None:
    """Predict every cell by both kinds of costs, and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    roofline = Roofline()
    kernels = {backend: KernelModel(backend=backend) for backend in ("vllm", "sglang", "trtllm")}
    found: defaultdict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    unknown: defaultdict[str, int] = defaultdict(int)
    for run in runs():
        if not run.fits:
            unknown["more requests than there is memory for"] += 1
            continue
        if not run.was_served:
            unknown["requests that waited for longer than they were answered"] += 1
            continue
        if why := kernels[run.backend].why_not(run.architecture, run.shape):
            unknown[f"{run.family} on {run.device}, {run.backend}: {why}"] += 1
            continue
        hopper = run.device.startswith(("H100", "H200"))
        groups = [(run.device, "all"), (run.device, run.kind), (run.device, run.backend)]
        if hopper:
            groups += [("Hopper", "all"), ("Hopper", run.backend), ("Hopper", run.kind), ("Hopper", run.family)]
            groups.append(("Hopper", "steps ahead" if run.ahead else "host waited for"))
            groups += [("Hopper", "8 requests at most")] * (run.batch <= 8)
        models: dict[str, LatencyModel] = {"roofline": roofline, "kernels": kernels[run.backend]}
        for costs, latency in models.items():
            tpot = run.predicted_tpot(latency) / run.tpot - 1
            ttft = run.predicted_ttft(latency) / run.ttft - 1
            for on, of in groups:
                found[on, of, "TPOT", costs].append(tpot)
                found[on, of, "TTFT", costs].append(ttft)
    rows = [
        {"on": on, "of": of, "phase": phase, "costs": costs, **figures(errors)}
        for (on, of, phase, costs), errors in sorted(found.items())
    ]
    words = "{on:14} {of:24} {phase} {costs:9} {cells:5} bias {bias:+.1%} median {median:.1%} p90 {p90:.1%}"
    for row in rows:
        print(words.format(**row))
    for why, count in unknown.items():
        print(f"{count} cells are unknown: {why}")
    if out is not None:
        write_report(out, {"version": kernels["vllm"].version("H100-80GB"), "rows": rows, "unknown": dict(unknown)})


if __name__ == "__main__":
    main()
