"""vLLM's CUDA build on a stand-in for a GPU: engines map weights that a process which has ended has loaded, whatever
vLLM makes of them. Kernels are not launched, so nothing is computed; see `tests.cuda_stub.share`.

    make cuda-stub
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.cuda_stub.share import MODELS
from tests.cuda_stub.stand_ins import ROOT, WHEELS, Environment
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.skipif(not (WHEELS / ".installed").exists(), reason="needs vLLM's CUDA build: make cuda-stub")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, with_a_gpu: Environment) -> dict[str, dict[str, Any]]:
    """What `tests.cuda_stub.share` has said, by model."""
    directory = tmp_path_factory.mktemp("share")
    command = [sys.executable, "-m", "tests.cuda_stub.share", str(directory)]
    done = subprocess.run(
        command, cwd=ROOT, env=with_a_gpu, stdout=subprocess.PIPE, text=True, check=True, timeout=40 * PATIENCE
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["model"]: each for each in said}


@pytest.mark.parametrize("model", MODELS)
def test_engines_compute_with_what_was_loaded(shared: dict[str, dict[str, Any]], model: str) -> None:
    """Every tensor that can be reached, of parameters and of kernels, has the bytes that its like was filled with; also
    when the weights were copied back from the host's memory, in an engine that had rested and in another one."""
    said = shared[model]
    assert "error" not in said, said["error"]
    assert said["different"] == []
    assert said["tensors"] > 20
    # What an engine that rested had let go of.
    assert said["released"] >= said["weights"] > 1 << 20


def test_kernels_of_quantised_models_keep_more_than_parameters(shared: dict[str, dict[str, Any]]) -> None:
    assert shared["dense"]["state"] == 0
    assert shared["int4"]["state"] > 0
    assert shared["experts, gptq"]["state"] > 0
