"""Which operator of a prefill computes otherwise with fewer SMs.

    python -m tests.gpu.trial.operators record DIR MODEL ...    with all SMs: calls of prefill steps, their results
    python -m tests.gpu.trial.operators replay DIR FILE.json    under a percentage: the same calls on the same inputs

Every call that reaches torch's dispatcher below a model's step is kept with its inputs, its results and what it wrote
into its arguments. The replay makes it on the recorded inputs, so that a difference is that operator's own and not one
of those before it. Tensors keep their strides. Products of matrices are also compared with float64: which of two
different results is the wrong one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from muxserve.gpu.sm import PERCENTAGE
from tests.gpu import stock
from tests.gpu.trial.runner import finding

# Bytes of a tensor that is kept; larger ones are weights' and caches' of models that are none of ours.
LARGEST = 64 << 20
# So few blocks that a whole cache is kept with each call.
CACHE = {"num_gpu_blocks_override": 600, "kv_cache_memory_bytes": 256 << 20}
# Their results are not determined, or are memory that nobody has written.
WITHOUT_RESULT = (
    "aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten._pin_memory", "aten.is_pinned", "aten.random",
    "aten.exponential", "aten._local_scalar_dense", "aten.set_",
)  # fmt: skip
# Their arguments are handles of the process that recorded them.
NOT_ELSEWHERE = ("onednn", "cpu_attn", "cpu_attention", "c10d.", "prims.")
PRODUCTS = ("aten.mm", "aten.bmm", "aten.linear")
MOST_ROWS = 60
# A report is of use before the last call was made.
WRITE_SECONDS = 5.0


@dataclass(frozen=True)
class KeptTensor:
    """A tensor in the host's memory, and the kind of device that it was on."""

    values: torch.Tensor
    device: str


@dataclass(frozen=True)
class NotKept:
    """What is too large to be kept, or has no value: a call with one cannot be made again."""

    why: str


def kept(value: Any) -> Any:
    """A value of a call, as it is written down."""
    if isinstance(value, torch.Generator):
        return NotKept("generator")
    if not isinstance(value, torch.Tensor):
        return value
    if max(value.untyped_storage().nbytes(), value.numel() * value.element_size()) > LARGEST:
        return NotKept(f"{tuple(value.shape)} {value.dtype}")
    # Several elements of an expanded tensor are one number, into which nothing can be copied.
    expanded = any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    strides = torch.empty(value.shape, device="meta").stride() if expanded else value.stride()
    host = torch.empty_strided(value.shape, strides, dtype=value.dtype)
    return KeptTensor(host.copy_(value.detach()), value.device.type)


@dataclass(frozen=True)
class Call:
    """One call of an operator. `written` are values of its arguments afterwards, by their places."""

    name: str
    arguments: tuple[list[Any], dict[str, Any]]
    results: list[Any]
    written: dict[int, Any]


class Recorder(TorchDispatchMode):
    """Keeps every call that is made meanwhile and computes something."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema)
        if views or str(func).startswith(WITHOUT_RESULT):
            return func(*args, **kwargs)
        before = tree_map(kept, (list(args), dict(kwargs)))
        result = func(*args, **kwargs)
        written = {place: kept(argument_at(func, place, args, kwargs)) for place in written_by(func)}
        self._calls.append(Call(str(func), before, [kept(each) for each in as_list(result)], written))
        if isinstance(result, list):
            # FlashAttention 3 without splits answers undefined tensors in a list: None here, which cannot go back.
            return [torch.empty(0) if each is None else each for each in result]
        return result


def written_by(func: Any) -> list[int]:
    """Places of the arguments that an operator writes into."""
    schema = func._schema.arguments
    return [place for place, each in enumerate(schema) if each.alias_info is not None and each.alias_info.is_write]


def argument_at(func: Any, place: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An argument by its place, however it was passed."""
    return args[place] if place < len(args) else kwargs.get(func._schema.arguments[place].name)


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def record(directory: Path, model: str) -> None:
    """Keep the calls of prefill steps of one short prompt, one long one, four and all, each with its first token."""
    llm, prompts, params = stock.engine(
        stock.checkpoint(model), enable_prefix_caching=False, async_scheduling=False, **CACHE
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for layer in runner.compilation_config.static_forward_context.values():
        if hasattr(layer, "use_direct_call"):
            layer.use_direct_call = True  # what is inside attention is seen then
    params.max_tokens = 2
    llm.generate(prompts[:1], params, use_tqdm=False)
    stages = {name: getattr(runner, name) for name in ("execute_model", "sample_tokens")}
    longest = max(prompts, key=lambda each: len(each["prompt_token_ids"]))
    for number, chosen in enumerate((prompts[:1], [longest], prompts[:4], prompts)):
        calls: list[Call] = []
        first = [True]

        def recorded(name: str, calls: list[Call] = calls, first: list[bool] = first) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not first[0]:
                    return stages[name](*args, **kwargs)
                with Recorder(calls):
                    result = stages[name](*args, **kwargs)
                first[0] = name != "sample_tokens"
                return result

            return call

        for name in stages:
            setattr(runner, name, recorded(name))
        llm.generate(chosen, params, use_tqdm=False)
        for name, stage in stages.items():
            setattr(runner, name, stage)
        torch.save(calls, directory / f"{model}-{number}.pt")
        print(model, f"{len(chosen)} prompts, {len(calls)} calls", flush=True)


def there(value: Any, device: str) -> Any:
    """What was kept, on a device.

    Raises:
        LookupError: it was not kept.
    """
    if isinstance(value, NotKept):
        raise LookupError(value.why)
    if isinstance(value, torch.device):
        return value if value.type == "cpu" else torch.device(device)
    if not isinstance(value, KeptTensor):
        return value
    if value.device == "cpu":
        return value.values.clone()
    made = torch.empty_strided(value.values.shape, value.values.stride(), dtype=value.values.dtype, device=device)
    return made.copy_(value.values)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a part of the largest value; of whole numbers, how many differ."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if found.shape != expected.shape:
        return float("inf")
    if not found.is_floating_point():
        return float((found != expected).sum())
    found, expected = found.double(), expected.double()
    same = (found.isnan() & expected.isnan()) | (found == expected)
    if bool(same.all()):
        return 0.0
    # Not a number in one of them only must not be lost.
    apart = torch.where(same, 0.0, (found - expected).abs()).nan_to_num(nan=1e30, posinf=1e30)
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    return float(apart.max()) / max(largest, 1e-30)


class Replay:
    """The calls of files again, and what differs."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.calls = 0
        self.left_out: Counter[str] = Counter()
        self.operators: dict[str, dict[str, float]] = {}
        self.different: list[dict[str, Any]] = []

    def again(self, call: Call, where: str) -> None:
        """Make a call again, and compare."""
        if any(word in call.name for word in NOT_ELSEWHERE):
            self.left_out[call.name] += 1
            return
        try:
            func: Any = torch.ops
            for part in call.name.split("."):
                func = getattr(func, part)
            args, kwargs = tree_map(lambda value: there(value, self._device), call.arguments)
            with torch.inference_mode():
                results = as_list(func(*args, **kwargs))
            if self._device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            self.left_out[f"{call.name}: {type(error).__name__} {str(error)[:60]}"] += 1
            return
        self.calls += 1
        pairs = [*zip(results, call.results, strict=True)]
        pairs += [(argument_at(func, place, args, kwargs), each) for place, each in call.written.items()]
        worst = max(
            (difference(a, b.values) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, KeptTensor)),
            default=0.0,
        )
        row = self.operators.setdefault(call.name, {"calls": 0, "different": 0, "largest": 0.0})
        row["calls"] += 1
        row["different"] += worst > 0
        row["largest"] = max(row["largest"], worst)
        if worst > 0:
            shapes = [list(each.values.shape) for each in call.arguments[0] if isinstance(each, KeptTensor)]
            exact = against_float64(call, args, results[0])
            self.different.append({"where": where, "operator": call.name, "by": worst, "shapes": shapes, **exact})

    def report(self) -> dict[str, Any]:
        """What differs, the largest differences first, and the first one of each file."""
        first: dict[str, dict[str, Any]] = {}
        for each in self.different:
            first.setdefault(each["where"].rpartition(":")[0], each)
        return {
            "calls": self.calls,
            "left_out": dict(self.left_out),
            "operators": self.operators,
            "first": first,
            "largest": sorted(self.different, key=lambda each: -each["by"])[:MOST_ROWS],
        }


def against_float64(call: Call, args: list[Any], result: Any) -> dict[str, float]:
    """How far a product of matrices, now and as recorded, is from the same in float64, which the host computes; nothing
    for other operators."""
    if not call.name.startswith(PRODUCTS) or len(args) < 2:
        return {}
    left, right = args[0].cpu().double(), args[1].cpu().double()
    exact = left @ (right.transpose(-1, -2) if call.name.startswith("aten.linear") else right)
    return {
        "from_float64": difference(result, exact),
        "recorded_from_float64": difference(call.results[0].values, exact),
    }


def replay(directory: Path, out: Path) -> None:
    """Make all calls of a directory again, and write what differs."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        import vllm.vllm_flash_attn  # noqa: F401 -- registers its operators
    sms = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 0
    about = {"sms": sms, "percentage": os.environ.get(PERCENTAGE, "")}
    made, written = Replay(device), time.monotonic()
    for file in sorted(directory.glob("*.pt")):
        for place, call in enumerate(torch.load(file, weights_only=False)):
            made.again(call, f"{file.stem}:{place}")
            if time.monotonic() > written + WRITE_SECONDS:
                out.write_text(json.dumps({**about, **made.report()}, indent=1))
                written = time.monotonic()
    report = {**about, **made.report()}
    out.write_text(json.dumps(report, indent=1))
    print(
        f"{made.calls} calls on {sms} SMs, {len(made.different)} differ; {sum(made.left_out.values())} not made again"
    )
    for where, each in report["first"].items():
        words = f"{each['operator']} {each['shapes']}, by {each['by']:.2g}"
        finding(f"{where}: the first operator with another result on {sms} SMs is {words}")
    if not report["first"]:
        finding(f"every operator computes the same with {sms} SMs")


def main() -> None:
    parser = argparse.ArgumentParser(description="Operators of a prefill with all SMs and with some of them.")
    parser.add_argument("what", choices=["record", "replay"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="+", help="models to record, or the file for what differs")
    options = parser.parse_args()
    if options.what == "replay":
        replay(options.directory, Path(options.names[0]))
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    stock.choose_runner()
    for model in options.names:
        record(options.directory, model)


if __name__ == "__main__":
    # Not as `__main__`, so that another process can read what this one has written.
    from tests.gpu.trial.operators import main as run

    run()
