"""A step of states on pages of the GPU, against vLLM's kernels."""

from __future__ import annotations

import pytest
import torch

from tests.engine_cuda.stepped import LAYERS


@pytest.mark.parametrize("layer", LAYERS)
def test_a_step_on_pages_is_that_of_vllm_s_kernels(layer: str) -> None:
    for part, (ours, theirs) in LAYERS[layer](torch.device("cuda")).items():
        # What comes out is in bfloat16, and is rounded at other places.
        rounding = 2e-2 if part == "out" else 1e-4
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=rounding, atol=rounding, msg=part)
