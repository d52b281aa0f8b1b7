from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.beside import begin, output


def pytest_collection_finish(session: pytest.Session) -> None:
    begin(session, "served", Path(__file__).parent, "tests.engine_cuda.serve_on_cpu")


@pytest.fixture(scope="session")
def served(pytestconfig: pytest.Config) -> Path:
    """What `serve_on_cpu` has written, while other tests ran."""
    return output(pytestconfig, "served")


@pytest.fixture
def reference_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention in plain torch, in the places where vLLM has its kernels."""
    from vllm.v1.attention.backends import fa_utils

    from tests.engine_cuda import paged_reference

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", paged_reference.flash_attn_varlen_func, raising=False)
