"""Programs of this package, with Ray importable, which run while other tests do: mostly they wait for Ray."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.support.beside import ROOT, beside, wanted

BESIDE = ROOT / "build" / "ray"
_PROGRAMS = pytest.StashKey[dict[str, Future[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "program(name): the module of this package that the test runs")


def _there() -> bool:
    return importlib.util.find_spec("ray") is not None or BESIDE.is_dir()


def pytest_collection_finish(session: pytest.Session) -> None:
    if not wanted(session, "said", Path(__file__).parent) or not _there():
        return
    marks = [item.get_closest_marker("program") for item in session.items]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(BESIDE)])}
    session.config.stash[_PROGRAMS] = {
        name: beside(session.config).add([sys.executable, "-m", f"tests.ray.{name}"], environment)
        for name in dict.fromkeys(str(mark.args[0]) for mark in marks if mark is not None)
    }


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Callable[[float], str]:
    """Waits for so many seconds for the test's program; answers all that it has said, when it has ended well."""
    if not _there():
        pytest.skip(f"no Ray: pip install --no-deps --target {BESIDE.relative_to(ROOT)} -r requirements/ray.txt")
    program = request.node.get_closest_marker("program").args[0]
    return request.config.stash[_PROGRAMS][program].result
