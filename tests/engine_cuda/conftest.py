from __future__ import annotations

import pytest


@pytest.fixture
def reference_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention in plain torch, in the places where vLLM has its kernels."""
    from vllm.v1.attention.backends import fa_utils

    from tests.engine_cuda import paged_reference

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", paged_reference.flash_attn_varlen_func, raising=False)
