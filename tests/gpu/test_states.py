"""A step of states on pages of the GPU, against vLLM's kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.engine_cuda.stepped import LAYERS
from tests.support.patience import PATIENCE


@pytest.mark.parametrize("layer", LAYERS)
def test_a_step_on_pages_is_that_of_vllm_s_kernels(layer: str) -> None:
    for part, (ours, theirs) in LAYERS[layer](torch.device("cuda")).items():
        # What comes out is in bfloat16, and is rounded at other places.
        rounding = 2e-2 if part == "out" else 1e-4
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=rounding, atol=rounding, msg=part)


# What vLLM's kernels have settled when they are imported.
SETTLED = """
import json, sys
if "by NVML" in sys.argv:
    from muxserve.engine.cuda.states import import_kernels

    import torch

    import_kernels()
    assert not torch.cuda.is_initialized()
from vllm.third_party.flash_linear_attention.ops import chunk_o, cumsum, utils
print(json.dumps([chunk_o.BKV_LIST, chunk_o.NUM_WARPS, cumsum.BS_LIST, utils.is_nvidia_hopper, utils.device_platform]))
"""


def settled(*how: str) -> list[object]:
    done = subprocess.run([sys.executable, "-c", SETTLED, *how], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_nvml_answers_what_cuda_would() -> None:
    """When vLLM's kernels are imported, which must not initialise CUDA before forks."""
    assert settled("by NVML") == settled()
