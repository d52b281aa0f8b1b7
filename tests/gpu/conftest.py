"""Tests that need a GPU; `make gpu-test` runs them. A plain `pytest` does not look at them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.run import ENABLED

if not os.environ.get(ENABLED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def gpu() -> str:
    """UUID of the GPU that the tests use: the one with the most free memory."""
    from muxserve.gpu import nvml

    (chosen,) = nvml.choose(nvml.visible(nvml.machine(), os.environ), 1)
    return chosen.uuid


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What stock vLLM answers on this GPU, by model; in the directory of `MUXSERVE_GPU_REFERENCE`, where given, it is
    kept for the next run."""
    from tests.gpu.stock import reference_answers

    kept = os.environ.get("MUXSERVE_GPU_REFERENCE")
    return reference_answers(Path(kept) if kept else tmp_path_factory.mktemp("reference"))
