"""What oneDNN keeps of the shapes that it has compiled is bounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from muxserve.vllm.args import environment
from tests.support.patience import PATIENCE

# Linear layers as vLLM has them on CPU, with as many lengths of a step as a prefill engine soon meets.
SCRIPT = """
import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform

# The one among vLLM's builds that is for this processor.
current_platform.import_kernels()

def dirty():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) >> 10

layers = [(k, ops.create_onednn_mm(torch.randn(n, k).t(), 32)) for n, k in ((768, 128), (128, 384), (448, 128))]

def step(length):
    for k, layer in layers:
        ops.onednn_mm(layer, torch.zeros(length, k), None)

for length in range(1, 41):
    step(length)
before = dirty()
for length in range(41, 1041, 2):
    step(length)
print(dirty() - before)
"""


@pytest.mark.thorough
def test_prompts_of_ever_new_lengths_take_bounded_memory() -> None:
    env = {**os.environ, **environment()}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    # 1,500 shapes: 73 MiB with the cache as bounded (222 where the machine has much else to do), 430 to 450 MiB with
    # the bound that oneDNN has itself.
    assert int(ran.stdout.split()[-1]) < 320
