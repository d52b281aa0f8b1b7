from __future__ import annotations

import os

import pytest

# Before vLLM is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


@pytest.fixture
def reference_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention in plain torch, in the places where vLLM has its kernels."""
    from vllm.v1.attention.backends import fa_utils

    from tests.engine_cuda import paged_reference

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", paged_reference.flash_attn_varlen_func, raising=False)
