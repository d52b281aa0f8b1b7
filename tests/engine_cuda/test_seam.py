"""The installed vLLM is the one that the CUDA engine was written for, as far as its Python sources tell."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from muxserve.vllm import cuda_internals
from muxserve.vllm.pin import differences


def test_vllm_s_internals_are_as_expected() -> None:
    assert cuda_internals.problems() == []


def test_a_difference_is_told_in_words() -> None:
    moved = [("vllm.v1.worker.gpu_worker", "Worker.gone", ()), ("vllm.v1.worker.gpu_worker", "request_memory", ("x",))]
    assert differences(moved) == [
        "vllm.v1.worker.gpu_worker.Worker.gone is gone",
        "vllm.v1.worker.gpu_worker.request_memory no longer has x",
    ]
