"""A wheel has everything that must be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.thorough
def test_a_wheel_works_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = ["-C", f"build-dir={tmp_path}/build", "-C", "cmake.define.MUXSERVE_COMPILE=OFF"]
    subprocess.run(
        [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, *options, ROOT],
        env={**os.environ, "PATH": tools}, check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == (("cp312", "abi3") if sys.version_info >= (3, 12) else ("cp311", "cp311"))
    assert platform == f"linux_{os.uname().machine}"
    place = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", place, wheel], check=True)
    # -S: without the editable install of this checkout.
    paths = os.pathsep.join([str(place), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "tests/support/installed.py"],
        env={"PYTHONPATH": paths, "PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(place)
