"""Units on Ray, with real raylets: two nodes of this machine, one of which is killed.

Needs Ray beside the environment, which `make unit` installs:

    pip install --no-deps --target build/ray -r requirements/ray.txt
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = ROOT / "build" / "ray"


def run(module: str, timeout: float = 150) -> str:
    if importlib.util.find_spec("ray") is None and not BESIDE.is_dir():
        pytest.skip(f"no Ray: pip install --no-deps --target {BESIDE.relative_to(ROOT)} -r requirements/ray.txt")
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(BESIDE)])},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_units_on_two_nodes_are_started_moved_and_ended() -> None:
    said = run("tests.ray.scenario")
    for step in (
        "a controller that dies takes its units along",
        "two units on two nodes",
        "commands and replies",
        "refusals in words",
        "an actor that was killed is back at its addresses",
        "the unit of a node that was killed is on the other one",
        "a host that failed is told with its reason",
        "stopped, started again, killed",
    ):
        assert step in said, said[-6000:]
