"""vLLM's CUDA build on stand-ins of the driver and of NVML: nothing initialises CUDA before processes are forked.

    make cuda-stub

installs that build and runs this; elsewhere it is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.cuda_stub.stand_ins import ROOT, WHEELS, Environment
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.skipif(not (WHEELS / ".installed").exists(), reason="needs vLLM's CUDA build: make cuda-stub")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory, without_gpus: Environment) -> dict[str, dict[str, Any]]:
    """What `tests.cuda_stub.configure` has said, by step."""
    directory = tmp_path_factory.mktemp("cuda-stub")
    environ = {**without_gpus, "CUDA_STUB_LOG": str(directory / "initialised")}
    command = [sys.executable, "-m", "tests.cuda_stub.configure", str(directory)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=20 * PATIENCE
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["step"]: each for each in said}


@pytest.mark.parametrize("step", ["imported", "looked at"])
def test_imports_of_the_warm_parent_initialise_nothing(steps: dict[str, dict[str, Any]], step: str) -> None:
    assert steps[step]["initialised"] == 0


@pytest.mark.parametrize("model", ["dense", "experts", "FP8", "state spaces", "delta nets"])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_configurations_of_engines_and_holders_initialise_nothing(
    steps: dict[str, dict[str, Any]], model: str, ranks: int, stages: int
) -> None:
    step = steps[f"{model}, {ranks} ranks, {stages} stages"]
    assert "error" not in step, step["error"]
    assert (step["initialised"], step["device"], step["world"]) == (0, "cuda", ranks)


def test_what_would_initialise_cuda_is_seen(steps: dict[str, dict[str, Any]]) -> None:
    """In a process in which torch does."""
    assert steps["initialised by torch"]["initialised"] > 0
