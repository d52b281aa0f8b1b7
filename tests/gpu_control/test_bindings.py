"""NVIDIA's own bindings: green contexts and shared memory over a driver without a GPU, and no driver at all."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_stub.stand_ins import make_driver

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ROOT / "build/triton"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None and not (BESIDE / "cuda").is_dir(),
    reason="no cuda.bindings: pip install --no-deps --target build/triton -r requirements/kernels.txt",
)


def run(*arguments: str, driver: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{BESIDE}", "FAKE_CUDA_MEMORY": str(1 << 30)}
    if driver is not None:
        environment["LD_LIBRARY_PATH"] = str(driver)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_over_a_driver_without_a_gpu(tmp_path: Path) -> None:
    make_driver(tmp_path)
    ended = run("-m", "tests.gpu_control.real_bindings", driver=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_without_a_driver() -> None:
    said = run("-c", "from muxserve.gpu import green; green.load()")
    last = said.stderr.splitlines()[-1]
    assert last.startswith("muxserve.gpu.green.GreenContextError: cuInit cannot be called: ")
    assert "driver" in last
