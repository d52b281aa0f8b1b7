"""Triton's side of the kernels, without a GPU: interpreted against plain torch, and compiled for GPUs.

Triton is not in the environment of vLLM for CPU, which would take it for a sign of a GPU. Put it beside:

    pip install --no-deps --target build/triton -r requirements/kernels.txt
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def run(script: str, tmp_path: Path, **environment: str) -> str:
    beside = ROOT / "build" / "triton"
    if importlib.util.find_spec("triton") is None and not beside.is_dir():
        pytest.skip(f"no Triton: pip install --no-deps --target {beside.relative_to(ROOT)} -r requirements/kernels.txt")
    path = os.pathsep.join([str(ROOT), str(beside)])
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
def test_interpreted_kernels_do_as_plain_torch(tmp_path: Path) -> None:
    assert run("interpreted.py", tmp_path, TRITON_INTERPRET="1").split() == ["equal"]


@pytest.mark.thorough
def test_kernels_compile_to_machine_code(tmp_path: Path) -> None:
    lines = run("compiled.py", tmp_path).splitlines()
    for name in ("fold_requests", "gather_tables", "store_kv", "scatter_rows", "delta_rule_step", "state_space_step"):
        for capability in (80, 90):
            assert any(line.startswith(f"sm_{capability} {name}") for line in lines), (name, capability)
