"""Programs with Ray importable. Those that the chosen tests need run beside each other: mostly they wait for Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = ROOT / "build" / "ray"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "program(name): the module of this package that the test runs")


class Programs:
    """Modules of this package that run as programs, by name; each prints what it has done."""

    def __init__(self, names: set[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(BESIDE)])}
        self._said: dict[str, IO[bytes]] = {name: tempfile.TemporaryFile() for name in sorted(names)}  # noqa: SIM115
        self._running = {
            name: subprocess.Popen(
                [sys.executable, "-m", f"tests.ray.{name}"],
                env=environment,
                cwd=ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            for name, said in self._said.items()
        }

    def said(self, name: str, seconds: float) -> str:
        """All that a program has said, when it has ended well."""
        code: int | None = None
        try:
            code = self._running[name].wait(seconds)
        finally:
            self._said[name].seek(0)
            text = self._said[name].read().decode()
            assert code == 0, text[-6000:]
        return text

    def close(self) -> None:
        """End what still runs; Ray's processes end with what started them."""
        for process in self._running.values():
            process.kill()
            process.wait()
        for said in self._said.values():
            said.close()


@pytest.fixture(scope="package")
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    if importlib.util.find_spec("ray") is None and not BESIDE.is_dir():
        pytest.skip(f"no Ray: pip install --no-deps --target {BESIDE.relative_to(ROOT)} -r requirements/ray.txt")
    marks = [item.get_closest_marker("program") for item in request.session.items]
    running = Programs({str(mark.args[0]) for mark in marks if mark is not None})
    yield running
    running.close()
