"""vLLM's Triton kernels for a step of states, in Triton's interpreter, against ours on pages: a GPU is needed to see
how fast they are, not what they compute.

    make cuda-stub
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cuda_stub.stand_ins import ROOT, WHEELS, Environment
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.skipif(not (WHEELS / ".installed").exists(), reason="needs vLLM's CUDA build: make cuda-stub")


def test_a_step_on_pages_is_that_of_vllm_s_kernels(with_a_gpu: Environment) -> None:
    command = [sys.executable, "-m", "tests.engine_cuda.stepped"]
    environment = {**with_a_gpu, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    apart = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines() if line.count(": ") == 1)
    assert {name.split(",")[0] for name in apart} == {"delta net", "state space"}
    for name, part in apart.items():
        # What comes out is in bfloat16, and is rounded at other places.
        assert float(part) < (1e-2 if name.endswith("out") else 1e-5), name
