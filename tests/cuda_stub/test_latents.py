"""vLLM's Triton kernel of latent attention, in Triton's interpreter, on the pages of the pool: a GPU is needed to see
how fast it is, not what it computes.

    make cuda-stub
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cuda_stub.stand_ins import ROOT, WHEELS, Environment
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.skipif(not (WHEELS / ".installed").exists(), reason="needs vLLM's CUDA build: make cuda-stub")

# Blocks of 32 and 64 tokens; contexts of less than a block, of several, and of a whole number of them.
SCRIPT = """
import torch
from tests.engine_cuda.latent_step import decoded_from_latents

for block in (32, 64):
    found = decoded_from_latents((100, 1, 64), heads=16, layers=2, block=block, dtype=torch.float16, device="cpu")
    print(float((found[0].float() - found[1]).abs().max()))
"""


def test_the_kernel_reads_the_pages_of_each_layer(with_a_gpu: Environment) -> None:
    command = [sys.executable, "-c", SCRIPT]
    environment = {**with_a_gpu, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    differences = [float(line) for line in done.stdout.split()]
    assert len(differences) == 2
    assert max(differences) < 2e-3
