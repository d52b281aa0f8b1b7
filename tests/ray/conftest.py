"""Programs of this package, with Ray importable, which run while other tests do: mostly they wait for Ray."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.beside import ROOT, Program, beside, wanted

BESIDE = ROOT / "build" / "ray"
_PROGRAMS = pytest.StashKey[dict[str, Program]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "program(name): the module of this package that the test runs")


def _there() -> bool:
    return importlib.util.find_spec("ray") is not None or BESIDE.is_dir()


def pytest_collection_finish(session: pytest.Session) -> None:
    if wanted(session, "said", Path(__file__).parent) is None or not _there():
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(BESIDE)])}
    programs: dict[str, Program] = {}
    for turn, item in enumerate(session.items):
        mark = item.get_closest_marker("program")
        if mark is not None and (name := str(mark.args[0])) not in programs:
            command = [sys.executable, "-m", f"tests.ray.{name}"]
            programs[name] = beside(session.config).add(command, turn, environment)
    session.config.stash[_PROGRAMS] = programs


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Callable[[float], str]:
    """Waits for so many seconds for the test's program; answers all that it has said, when it has ended well."""
    if not _there():
        pytest.skip(f"no Ray: pip install --no-deps --target {BESIDE.relative_to(ROOT)} -r requirements/ray.txt")
    program = request.node.get_closest_marker("program").args[0]
    return request.config.stash[_PROGRAMS][program].result
