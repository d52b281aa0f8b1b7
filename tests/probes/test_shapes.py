"""Models' shapes on a CPU, with FlashAttention in plain torch: right ones, and a kernel that is wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from muxserve.probes import shapes
from muxserve.probes.shape import AttentionShape
from tests.engine_cuda import paged_reference

SHAPE = AttentionShape(6, 2, 64, 192, 448, 1024)


@pytest.fixture(autouse=True)
def attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", paged_reference.flash_attn_varlen_func, raising=False)


@pytest.mark.slow
def test_a_shape_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shapes.errors_of(SHAPE, "cpu", torch.float32)
    assert found.attention < 1e-5
    assert found.products < 1e-5
    wrong = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = wrong(x, weight)
        if weight.shape == (192, 448) and len(x) == 111:
            result[-1] = 0.0
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert shapes.errors_of(SHAPE, "cpu", torch.float32).products > 0.1
