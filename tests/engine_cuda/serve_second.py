"""Answers of an engine on the CUDA engine's runner over vLLM's second one: `python serve_second.py SERVED OUT`.

The same requests as `serve_on_cpu` serves, which has written the answers of stock vLLM to SERVED. vLLM's kernels of
that runner are Triton's, and interpreted (TRITON_INTERPRET=1): a process of its own, since Triton must not be
importable where vLLM for CPU is otherwise.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.engine.stock import SETTINGS, prepare_forks
from tests.engine_cuda import serve_on_cpu
from tests.engine_cuda.serve_on_cpu import OTHERS, TOKENS, in_a_fork, ours


class Driver:
    """As far as vLLM asks Triton's driver for CPUs."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu", arch="cpu", warp_size=1)


def interpret_triton() -> None:
    """Have vLLM for CPUs take the Triton that is there for one that has a backend for them."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)  # type: ignore[assignment]


def prompts_of(answers: Path) -> list[list[int]]:
    return [
        tokens[: len(tokens) - count] for tokens, count in zip(json.loads(answers.read_text()), TOKENS, strict=True)
    ]


def main() -> None:
    os.environ.update({**SETTINGS, "VLLM_USE_V2_MODEL_RUNNER": "1"})
    interpret_triton()
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    prepare_forks()
    serve_on_cpu.WORKER = "tests.engine_cuda.second_stand_in.SecondWorker"
    served, out, *kinds = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    jobs: dict[str, Any] = {
        "ours": lambda: ours(prompts_of(served / "stock.json")),
        "ahead": lambda: ours(prompts_of(served / "stock.json"), ahead=True),
    }
    for kind in OTHERS:
        made = json.loads((served / f"checkpoint-{kind}.json").read_text())
        jobs[kind] = lambda kind=kind, made=made: ours(prompts_of(served / f"stock-{kind}.json"), checkpoint=Path(made))
    for name in kinds or jobs:
        in_a_fork(jobs[name], out / f"{name}.json")


if __name__ == "__main__":
    main()
