"""The steps that processes compute side by side, on a CPU with FlashAttention in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from muxserve.probes.beside import BLOCK, DIM, TOLERANCE, same_steps
from tests.engine_cuda import paged_reference

PAGES = 1500


@pytest.mark.slow
def test_steps_are_right_and_what_another_process_writes_into_their_pages_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", paged_reference.flash_attn_varlen_func, raising=False)
    pool = torch.zeros((10 + PAGES, 1, BLOCK, 2 * DIM))
    steps = same_steps("decode", pool, 10, "cpu", torch.float32)
    assert steps.error < 1e-5
    assert steps.difference() == 0.0
    assert not pool[:10].any(), "pages of others are left alone"
    pool[10:].normal_()
    assert steps.difference() > TOLERANCE
