"""Aegaeon's figures 11 to 13 (SOSP'25) on its own traces, simulated: how many models 16 GPUs serve.

    python benchmarks/paper/aegaeon.py DATA [--figures 11 12 13] [--step 16] [--ways deployed ...] [--out FILE]

DATA is the directory `aegaeon/sim/simdata` of the artifact (github.com/MachineLearningSystem/25SOSP-Aegaeon), whose
files `synth-MODELS-RATE-INPUT-OUTPUT.csv` are read where they are: two minutes of Poisson arrivals at 0.1 requests/s
for each model, one at other rates, lengths as in ShareGPT, times INPUT and OUTPUT. Of ten models six are Qwen2.5-7B,
two Yi-1.5-9B and two Llama-2-13B. The authors' machines are two with 8 H100 each. Here each has a fleet with half of
the models, as `muxserve deploy` serves it with `memory:`.

Figure 11: 16 to 80 models at 0.1 requests/s each, 16 to 54 at 0.5, and 40 models at 0.05 to 0.7. Figure 12: inputs
or outputs twice as long. Figure 13: half of the objectives, and 0.3 of them.

- deployed: wakes take what `muxserve plan` assumes.
- published wakes: they take what the artifact's simulator of ServerlessLLM assumes, weights at 16 GB/s.
- slower steps: each step takes 5.4 ms more. So much longer than ours are decode steps of Yi-1.5-9B in the artifact's
  profiles of an H100 (median of nine sizes; 2.7 ms for Qwen2.5-7B, 1.4 ms for Llama-2-13B, and prefill 0 to 1.8 ms).
- without turns: `memory: {turns: false}`, so that models finish what runs before they sleep.

Figures 12 and 13 have the first way only.

docs/field.md discusses the result.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deployed import Served, UnitRun, deployed, serve, with_wakes
from report import machine, percentiles, write_report

from muxserve.workload.trace import TraceRequest

ROOT = Path(__file__).resolve().parent.parent.parent
TTFT, TPOT = 10.0, 0.1
MACHINES, GPUS, DEVICE = 2, 8, "H100-80GB"
PUBLISHED_BANDWIDTH = 16e9
SLOWER_SECONDS = 0.0054
WAYS = ("deployed", "published wakes", "slower steps", "without turns")
# Architectures of ten models in a row, and the longest sequence of each, tokens.
ARCHITECTURES = ("qwen2.5-7b",) * 6 + ("yi-1.5-9b.json",) * 2 + ("llama-2-13b",) * 2
CONTEXTS = {"qwen2.5-7b": 32768, "yi-1.5-9b.json": 4096, "llama-2-13b": 4096}
# As in its public checkpoint.
YI = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "head_dim": 128,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Point:
    """One point of a figure. `slo` is the part of the objectives that holds."""

    models: int
    rate: str
    longer_input: str = "1.0"
    longer_output: str = "1.0"
    slo: float = 1.0

    @property
    def file(self) -> str:
        """Its trace."""
        return f"synth-{self.models}-{self.rate}-{self.longer_input}-{self.longer_output}.csv"


def points(figure: int, step: int) -> Iterator[Point]:
    """The points of a figure, each `step` models."""
    many, fewer = range(16, 81, step), range(16, 55, step)
    if figure == 11:
        yield from (Point(models, "0.1") for models in many)
        yield from (Point(models, "0.5") for models in fewer)
        yield from (Point(40, f"{number * 0.05:.2f}".rstrip("0")) for number in range(1, 15, max(1, step // 4)))
    elif figure == 12:
        for scales in (("2.0", "1.0"), ("1.0", "2.0")):
            yield from (Point(models, "0.1", *scales) for models in many)
            yield from (Point(models, "0.5", *scales) for models in fewer)
    else:
        yield from (Point(models, "0.1", slo=slo) for slo in (0.5, 0.3) for models in many)


def kind(model: str) -> str:
    """The architecture of that model of the trace."""
    return ARCHITECTURES[int(model.rpartition("_")[2]) % 10]


def workload(file: Path) -> list[TraceRequest]:
    """The requests of a trace. The longest prompts are cut to what their model takes, as the authors' engines do."""
    found = []
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            hours, minutes, seconds = map(float, row["Request Time"].split(":"))
            model, output = row["Model Name"], max(1, int(row["Output Length"]))
            prompt = min(int(row["Input Length"]), CONTEXTS[kind(model)] - output)
            found.append(TraceRequest(3600 * hours + 60 * minutes + seconds, model, max(1, prompt), output))
    return sorted(found, key=lambda each: each.arrival)


def fleet(models: Sequence[str], rate: float, lengths: tuple[int, int], slo: float, way: str) -> dict[str, Any]:
    """The fleet file of one machine."""
    prompt, output = lengths
    return {
        "cluster": {"gpus": GPUS, "gpu_type": DEVICE},
        "memory": {"limit": "auto", "turns": False if way == "without turns" else "auto"},
        "models": [
            {
                "name": model,
                "architecture": kind(model),
                "rate": rate,
                "workload": {"prompt_tokens": prompt, "output_tokens": output},
                "slo": {"ttft_ms": round(1000 * TTFT * slo), "tpot_ms": round(1000 * TPOT * slo)},
            }
            for model in models
        ],
    }


def attempt(data: Path, point: Point, way: str) -> dict[str, Any]:
    """Serve a trace, and what came of it."""
    load = workload(data / point.file)
    models = [f"synth_model_{number:02d}" for number in range(point.models)]
    lengths = (
        round(sum(each.prompt_tokens for each in load) / len(load)),
        round(sum(each.output_tokens for each in load) / len(load)),
    )
    units = []
    for number in range(MACHINES):
        made = deployed(fleet(models[number::MACHINES], float(point.rate), lengths, point.slo, way), {"yi-1.5-9b": YI})
        units += [with_wakes(unit, PUBLISHED_BANDWIDTH) if way == "published wakes" else unit for unit in made]
    runs = serve(units, load, SLOWER_SECONDS if way == "slower steps" else 0.0)
    return summary(runs, TTFT * point.slo, TPOT * point.slo)


def summary(runs: Sequence[UnitRun], ttft: float, tpot: float) -> dict[str, Any]:
    """What came of the requests."""
    served: list[Served] = [each for run in runs for each in run.requests]
    count = len(served)
    return {
        "requests": count,
        "refused": sum(bool(each.error) for each in served),
        "time_within": round(sum(each.time_within(ttft, tpot) for each in served) / count, 4),
        "in_time": round(sum(each.in_time(ttft, tpot) for each in served) / count, 4),
        "first_in_time": round(sum(each.first_in_time(ttft) for each in served) / count, 4),
        "ttft_seconds": percentiles([each.tokens[0] for each in served if each.tokens]),
        "wakes": sum(run.wakes for run in runs),
        "switches": sum(run.switches for run in runs),
    }


def main() -> None:
    """Simulate all and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the artifact's aegaeon/sim/simdata")
    parser.add_argument("--figures", type=int, nargs="+", default=[11, 12, 13], choices=(11, 12, 13))
    parser.add_argument("--step", type=int, default=16, help="models from one point to the next")
    parser.add_argument("--models", type=int, nargs="+", help="only points of so many models")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/paper_aegaeon.json")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "machine": machine(),
        "slo": {"ttft_seconds": TTFT, "tpot_seconds": TPOT},
        "published_bytes_per_second": PUBLISHED_BANDWIDTH,
        "figures": {},
    }
    for figure in args.figures:
        rows = report["figures"][str(figure)] = []
        for point in points(figure, args.step):
            if args.models and point.models not in args.models:
                continue
            for way in args.ways if figure == 11 else args.ways[:1]:
                began = time.monotonic()
                found = attempt(args.data, point, way)
                rows.append({"trace": point.file, "slo": point.slo, "way": way, **found})
                took = time.monotonic() - began
                shown = {name: found[name] for name in ("time_within", "in_time", "refused", "wakes", "switches")}
                print(f"figure {figure}, {point.file}, slo {point.slo:g}, {way}: {shown} ({took:.0f} s)", flush=True)
        write_report(args.out, report)


if __name__ == "__main__":
    main()
