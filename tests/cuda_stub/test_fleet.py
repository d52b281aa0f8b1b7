"""Whole fleets in vLLM's CUDA build on a stand-in for two GPUs: `muxserve deploy`, requests, and what dies.

    make cuda-stub

Kernels are not launched, so that answers mean nothing: only that all of their tokens come.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.cuda_stub.conftest import ROOT, WHEELS, Environment
from tests.e2e.fleet import Fleet, running
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.skipif(not (WHEELS / ".installed").exists(), reason="needs vLLM's CUDA build: make cuda-stub")

TOKENS = 300
# Graphs are not captured here.
SIZES = {"rate": 2, "max_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 512,
         "engine_args": {"enforce_eager": True}}  # fmt: skip

Start = Callable[..., AbstractContextManager[Fleet]]


def model(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": str(ROOT / "configs/models" / name), **SIZES, **more}


@pytest.fixture
def deploy(tmp_path: Path, with_a_gpu: Environment) -> Start:
    """Deploys a fleet on the stand-in, with a stand-in of MPS whose notes are below `mps`."""
    control = tmp_path / "mps" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    script = shlex.quote(str(ROOT / "tests/gpu_control/fake_mps_control.py"))
    control.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    control.chmod(0o755)
    environment = {
        **with_a_gpu,
        "PATH": f"{control.parent}:{with_a_gpu['PATH']}",
        "FAKE_MPS": str(control.parent),
        "FAKE_CUDA_MEMORY": str(32 << 30),
        # Compiles with the CUDA toolkit when it is used first.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    del environment["CUDA_VISIBLE_DEVICES"]

    @contextmanager
    def start(*models: dict[str, Any], **cluster: Any) -> Iterator[Fleet]:
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump({"cluster": {"gpu_memory": 0.05, **cluster}, "models": list(models)}))
        # The sockets of MPS want a short path.
        with (
            tempfile.TemporaryDirectory(prefix="m") as short,
            running(path, 10 * PATIENCE, {**environment, "XDG_RUNTIME_DIR": short}) as fleet,
        ):
            yield fleet

    return start


def stream(fleet: Fleet, name: str, tokens: int = TOKENS) -> openai.Stream[Any]:
    return fleet.client.completions.create(
        model=name,
        prompt="What the kernels would compute, nobody knows",
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


def length(answer: openai.Stream[Any]) -> int:
    """How many tokens the rest of it brings the answer to."""
    *_, last = answer
    return int(last.usage.completion_tokens)


def through(fleet: Fleet, name: str, death: Callable[[], object]) -> int:
    """The tokens of an answer during which something dies."""
    answer = stream(fleet, name)
    next(answer)
    death()
    return length(answer)


def said(fleet: Fleet, what: str) -> int:
    """How often the controller has said it."""
    return (fleet.directory / "deploy.log").read_text().count(what)


def test_two_models_on_a_gpu_lose_nothing_to_deaths(deploy: Start) -> None:
    with deploy(model("atlas"), model("frontdesk"), gpus=1, mps="off") as fleet:
        assert length(stream(fleet, "atlas")) == length(stream(fleet, "frontdesk")) == TOKENS
        for words in (("atlas/decode",), ("atlas/prefill",), ("muxserve-memory-manager", "--socket")):
            assert through(fleet, "atlas", lambda words=words: fleet.kill(*words)) == TOKENS
            fleet.wait_healthy()
        assert length(stream(fleet, "frontdesk")) == TOKENS
        assert said(fleet, "weights of atlas: loading weights") == 1, "they were kept"


def test_two_ranks_go_on_when_the_mps_server_is_in_fault(deploy: Start) -> None:
    """Engines end, since they cannot compute any more; weights and pool are outside MPS and stay."""
    with deploy(model("atlas"), gpus=2, mps="on") as fleet:
        assert length(stream(fleet, "atlas")) == TOKENS
        fault = fleet.directory / "mps" / "fault"

        def fail() -> None:
            fault.touch()
            fleet.wait(lambda: said(fleet, "ended with the MPS server"), PATIENCE, "told of the fault")
            fault.unlink()

        assert through(fleet, "atlas", fail) == TOKENS
        fleet.wait_healthy()
        assert said(fleet, "weights of atlas: loading weights") == 1
        assert said(fleet, "memory manager: starting") == 1
        # A worker of one rank takes its engine along.
        assert through(fleet, "atlas", lambda: fleet.kill("worker atlas/decode rank 1")) == TOKENS


def test_a_pipeline_of_two_stages(deploy: Start) -> None:
    with deploy(model("atlas", phases="pipelined", stages=2), gpus=2, mps="off") as fleet:
        assert through(fleet, "atlas", lambda: fleet.kill("worker atlas", "rank 1")) == TOKENS
        assert length(stream(fleet, "atlas")) == TOKENS
