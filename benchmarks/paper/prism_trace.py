"""Prism's 18 models on its own trace (arXiv:2505.04021), simulated: who keeps its objectives on how many GPUs.

    python benchmarks/paper/prism_trace.py TRACE [--gpus 8 2] [--speeds 1 5] [--out FILE]

TRACE is `benchmark/multi-model/real_trace.pkl` of github.com/Multi-LLM/prism-research, which is read where it is. Its
requests are those of 27 adapters within ten minutes. As the authors' benchmark has it, each of 18 models gets those of
one adapter; where several models get the same, each later one is 10 s earlier or later. `speeds` are how many times as
fast they come (the authors' script has 5). Objectives are five times the authors' table, each model's time to first
token and between tokens alone (p99).

The published configuration has Llama-3.2-1B for every model; what each was in the paper it does not say. `mixed` has 8B
where the table has more than 8 ms between tokens, 3B above 6.5, else 1B.

- deployed: `memory:` as `muxserve deploy` serves it, with turns.
- all awake: the models of each GPU share its KV cache, with quotas that follow the load (MuxServe).
- static: they share the GPU, each with one engine and a fixed part of the KV cache.
- swapping: a GPU has one model at a time, with one engine, and answers end before the next one is woken.

All set aside for each engine what `muxserve deploy` does. Requests of models without room count as late. docs/field.md
discusses the result.
"""

from __future__ import annotations

import argparse
import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deployed import Served, deployed, serve
from prism import DEVICE, ROOT, SHAPES, WAKE_SECONDS, Mesh, architecture, unit
from report import machine, percentiles, write_report

from muxserve.simulator import SimUnit, adapt, mode_of
from muxserve.workload.trace import TraceRequest
from placement.demand import Demand
from placement.memory import MemoryRules, model_bytes

SCALE = 5.0
# By model: its adapter, and alone the seconds to its first token and the milliseconds between tokens.
MODELS = {
    "model_1": (5, 0.03867427111, 6.938047111),
    "model_2": (10, 0.03222719193, 6.70813661),
    "model_3": (4, 0.03141047955, 6.111749992),
    "model_4": (17, 0.05097425461, 10.81588957),
    "model_5": (2, 0.03247243166, 6.990488146),
    "model_6": (10, 0.03926961422, 6.845023713),
    "model_7": (23, 0.04668841362, 12.60465384),
    "model_8": (2, 0.04194666147, 6.939990897),
    "model_9": (10, 0.03449705124, 7.523151769),
    "model_10": (14, 0.0606341815, 6.19979826),
    "model_11": (19, 0.04554865837, 10.21128654),
    "model_12": (14, 0.05023122549, 5.780082814),
    "model_13": (18, 0.03568530083, 7.62432434),
    "model_14": (14, 0.03531268835, 5.667404957),
    "model_15": (21, 0.04233850479, 8.504742742),
    "model_16": (2, 0.02106617689, 5.001050144),
    "model_17": (6, 0.03062166691, 5.441103017),
    "model_18": (19, 0.04841831684, 8.66446155),
}
EARLIER, LATER, SHIFT_SECONDS = (14, 19), (2, 10), 10.0
SYSTEMS = ("deployed", "all awake", "static", "swapping")


@dataclass
class Published:
    """A request of the trace, as it was pickled."""

    adapter_dir: str = ""
    prompt_len: int = 0
    output_len: int = 0
    req_time: float = 0.0


class _Requests(pickle.Unpickler):
    """Makes requests, and nothing else that a pickle may name."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) != ("trace", "Request"):
            raise pickle.UnpicklingError(f"{module}.{name} is no request")
        return Published


def workload(file: Path, speed: float) -> list[TraceRequest]:
    """The requests of the 18 models."""
    _, requests = _Requests(io.BytesIO(file.read_bytes())).load()
    sharing: dict[int, list[str]] = {}
    for model, (adapter, *_) in MODELS.items():
        sharing.setdefault(adapter, []).append(model)
    found = []
    for each in requests:
        adapter = int(each.adapter_dir.rpartition("-")[2])
        sign = (adapter in LATER) - (adapter in EARLIER)
        for place, model in enumerate(sharing.get(adapter, ())):
            at = max(0.0, each.req_time / speed + sign * SHIFT_SECONDS * place)
            found.append(TraceRequest(at, model, max(1, each.prompt_len), max(1, each.output_len)))
    return sorted(found, key=lambda each: each.arrival)


def size_of(model: str, sizes: str) -> str:
    """The size of the model, a key of `SHAPES`."""
    tpot = MODELS[model][2]
    return "1b" if sizes == "published" or tpot < 6.5 else "3b" if tpot < 8.0 else "8b"


def units_of(system: str, gpus: int, sizes: str, load: Sequence[TraceRequest]) -> list[SimUnit]:
    """The models as that system serves them."""
    seconds = load[-1].arrival
    counts = {name: sum(each.model == name for each in load) for name in MODELS}
    demands = [
        Demand(
            name,
            architecture(size_of(name, sizes)),
            rate=max(1, counts[name]) / seconds,
            dtype="bfloat16",
            max_num_seqs=128,
            slo_ttft=SCALE * ttft,
            slo_tpot=SCALE * tpot / 1000,
        )
        for name, (_, ttft, tpot) in MODELS.items()
    ]
    if system == "deployed":
        return deployed(fleet(demands, gpus, sizes), {size: config(size) for size in SHAPES})
    rules = MemoryRules.served() if system == "all awake" else MemoryRules.served().of_one_engine()
    way = "one at a time" if system == "swapping" else "awake"
    units = [unit(each, way, WAKE_SECONDS, SCALE * 0.04, rules)[0] for each in meshes(demands, gpus, rules)]
    mode = mode_of("slack" if system == "all awake" else "spatial")
    return [adapt(each, mode) for each in units if each is not None]


def meshes(demands: Sequence[Demand], gpus: int, rules: MemoryRules) -> list[Mesh]:
    """Single GPUs. The largest models first, each goes where the weights are fewest."""
    there: list[list[Demand]] = [[] for _ in range(gpus)]
    for each in sorted(demands, key=lambda each: -each.architecture.weight_bytes(each.dtype)):
        min(there, key=lambda models: sum(model_bytes(model, 1, rules) for model in models)).append(each)
    return [Mesh((number,), tuple(models)) for number, models in enumerate(there) if models]


def fleet(demands: Sequence[Demand], gpus: int, sizes: str) -> dict[str, Any]:
    """The fleet file."""
    return {
        "cluster": {"gpus": gpus, "gpu_type": DEVICE},
        "memory": {"limit": "auto"},
        "models": [
            {
                "name": each.name,
                "architecture": f"{size_of(each.name, sizes)}.json",
                "rate": each.rate,
                "slo": {
                    "ttft_ms": round(1000 * (each.slo_ttft or 0)),
                    "tpot_ms": round(1000 * (each.slo_tpot or 0), 1),
                },
            }
            for each in demands
        ],
    }


def config(size: str) -> dict[str, Any]:
    """A model's config.json."""
    a = architecture(size)
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.max_len,
        "head_dim": a.head_dim,
        "dtype": a.dtype,
        "tie_word_embeddings": a.tied_embeddings,
    }


def attempt(system: str, gpus: int, sizes: str, load: Sequence[TraceRequest]) -> dict[str, Any]:
    """Serve the requests so, and what came of them."""
    runs = serve(units_of(system, gpus, sizes, load), load)
    served = [each for run in runs for each in run.requests]
    ttfts = [each.tokens[0] for each in served if each.tokens]
    first = [bool(each.tokens) and each.tokens[0] < SCALE * MODELS[each.model][1] for each in served]
    pace = [bool(each.tokens) and _tpot(each) < SCALE * MODELS[each.model][2] / 1000 for each in served]
    both = [a and b for a, b in zip(first, pace, strict=True)]
    ours = [each.in_time(SCALE * MODELS[each.model][1], SCALE * MODELS[each.model][2] / 1000) for each in served]
    count = len(load)
    return {
        "requests": count,
        "not_served": count - sum(bool(each.tokens) for each in served),
        "ttft_kept": round(sum(first) / count, 4),
        "tpot_kept": round(sum(pace) / count, 4),
        "both_kept": round(sum(both) / count, 4),
        "in_time": round(sum(ours) / count, 4),
        "ttft_seconds": percentiles(ttfts) if ttfts else None,
        "wakes": sum(run.wakes for run in runs),
        "switches": sum(run.switches for run in runs),
    }


def _tpot(served: Served) -> float:
    return (served.tokens[-1] - served.tokens[0]) / max(1, len(served.tokens) - 1)


def main() -> None:
    """Simulate all and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the authors' real_trace.pkl")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--sizes", nargs="+", default=["published", "mixed"], choices=("published", "mixed"))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/paper_prism_trace.json")
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "objectives": f"{SCALE:g} times alone", "runs": []}
    for sizes in args.sizes:
        for gpus in args.gpus:
            for speed in args.speeds:
                load = workload(args.trace, speed)
                for system in args.systems:
                    found = attempt(system, gpus, sizes, load)
                    report["runs"].append({"sizes": sizes, "gpus": gpus, "speed": speed, "system": system, **found})
                    shown = {name: found[name] for name in ("both_kept", "in_time", "not_served", "wakes")}
                    print(f"{sizes}, {gpus} GPUs, {speed:g}x, {system}: {shown}", flush=True)
                write_report(args.out, report)


if __name__ == "__main__":
    main()
