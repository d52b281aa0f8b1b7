"""Stock vLLM OpenAI servers to compare with, and which of their settings is best on this machine.

    python benchmarks/stock_vllm.py [--model atlas] [--out benchmarks/results/stock_vllm.json]

On the CPU stock vLLM binds its threads to cores; on two cores that binding stalls it, so `nobind` is given. What
remains to choose is the number of OpenMP threads and whether the model is compiled: run as a script this measures both.

On the CPU stock vLLM's engine and its worker are two processes, each of which looks for the other's messages without a
pause for up to a second. Several servers on few cores take each other's time with that. `polls=False` makes them sleep
for 0.1 ms between two looks instead, by a vLLM plugin: so the part of a difference that is due to this shows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from load import Call, Outcome, closed_loop, summary
from report import machine, write_report
from servers import ROOT, Server, end_cleanly, free_port, server


@dataclass(frozen=True)
class StockSettings:
    """How a stock server runs. `kv_bytes` is the size of its KV cache; `dummy` makes weights up; `polls` says whether
    its processes look for messages without a pause, as they come. vLLM chooses its own `attention_backend` where none
    is given. With `text_of_qwen3_5` it knows the text models of Qwen3.5, whose module it cannot import on CPU."""

    threads: int = 1
    eager: bool = True
    kv_bytes: int = 256 << 20
    max_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    dtype: str = "float32"
    dummy: bool = False
    polls: bool = True
    attention_backend: str = ""
    text_of_qwen3_5: bool = False


_SLEEPING = """
    import time

    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.0001)
"""
_TEXT_OF_QWEN3_5 = """
    from muxserve.vllm.language_models import make_importable
    from vllm.model_executor.models import ModelRegistry

    make_importable()
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
"""


@contextlib.contextmanager
def _plugin(body: str) -> Iterator[dict[str, str]]:
    """Environment of a server each of whose processes executes `body`, the lines of a function, before anything
    else."""
    with tempfile.TemporaryDirectory(prefix="bench-plugin-") as folder:
        described = Path(folder) / "stock_plugin-1.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: stock-plugin\nVersion: 1\n")
        (described / "entry_points.txt").write_text("[vllm.general_plugins]\nstock = stock_plugin:install\n")
        (Path(folder) / "stock_plugin.py").write_text(f"def install():{body}")
        yield {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}


@contextlib.contextmanager
def stock_server(
    model: Path, name: str, settings: StockSettings | None = None, port: int | None = None, timeout: float = 300.0
) -> Iterator[Server]:
    """A stock vLLM OpenAI server of one model for the length of the block; stopped by its pid.

    Raises:
        ServerError: it did not come up within `timeout` seconds.
    """
    settings = settings or StockSettings()
    port = port or free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", name, "--dtype", settings.dtype),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(settings.max_len), "--max-num-seqs", str(settings.max_num_seqs)),
        *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
        *("--kv-cache-memory-bytes", str(settings.kv_bytes)),
        "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching",
        *("--disable-uvicorn-access-log",),
    ]
    if settings.eager:
        command.append("--enforce-eager")
    if settings.dummy:
        command += ["--load-format", "dummy"]
    if settings.attention_backend:
        command += ["--attention-backend", settings.attention_backend]
    env = {
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with contextlib.ExitStack() as stack:
        body = ("" if settings.polls else _SLEEPING) + (_TEXT_OF_QWEN3_5 if settings.text_of_qwen3_5 else "")
        if body:
            env |= stack.enter_context(_plugin(body))
        yield stack.enter_context(server(command, port, env=env, timeout=timeout))


def _calls(model: str, count: int, turn: int) -> list[Call]:
    # Fresh prompts each turn: none may come from the prefix cache.
    return [Call(model=model, prompt_tokens=64, output_tokens=96, seed=turn * 10_000 + i) for i in range(count)]


def main() -> None:
    """Measure the settings beside each other, in rounds, so that a busy moment hits all of them."""
    parser = argparse.ArgumentParser(description="Find the best setting of a stock vLLM server on this machine.")
    parser.add_argument("--model", default="atlas", help="folder under configs/models")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/stock_vllm.json")
    options = parser.parse_args()
    end_cleanly()
    variants = {
        f"threads={threads} {'eager' if eager else 'compiled'}": StockSettings(threads=threads, eager=eager)
        for eager in (True, False)
        for threads in (1, 2)
    }
    results: dict[str, dict[str, object]] = {}
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(stock_server(ROOT / "configs/models" / options.model, options.model, settings))
            for name, settings in variants.items()
        }
        for name, stock in running.items():
            results[name] = {"start_seconds": round(stock.start_seconds, 1)}
            asyncio.run(closed_loop(stock.url, _calls(options.model, 16, 0), 16))
        for concurrency in (1, 16):
            outcomes: dict[str, list[list[Outcome]]] = {name: [] for name in running}
            for turn in range(options.rounds):
                for name, stock in running.items():
                    calls = _calls(options.model, 4 * concurrency + 4, concurrency * 100 + turn)
                    outcomes[name].append(asyncio.run(closed_loop(stock.url, calls, concurrency)))
            for name, rounds in outcomes.items():
                best = max((summary(outcome) for outcome in rounds), key=lambda s: s["output_tokens_per_second"])
                results[name][f"concurrency {concurrency}"] = best
                print(
                    f"{name:22s} concurrency {concurrency:2d}: {best['output_tokens_per_second']:8.1f} tokens/s, "
                    f"TTFT p50 {best['ttft_ms']['p50']:.1f} ms, TPOT p50 {best['tpot_ms']['p50']:.2f} ms"
                )
    write_report(options.out, {"machine": machine(), "best_of_rounds": options.rounds, "settings": results})


if __name__ == "__main__":
    main()
