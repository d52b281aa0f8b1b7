"""What the tests of engines share: the answers of stock vLLM, which are made while other tests run."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import MODELS
from tests.support.beside import beside, wanted

_STOCK = pytest.StashKey[tuple[tempfile.TemporaryDirectory[str], Future[str]]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if wanted(session, "stock", Path(__file__).parent):
        directory = tempfile.TemporaryDirectory(prefix="mux-stock-")
        command = [sys.executable, "-m", "tests.engine.stock", directory.name, *map(str, MODELS.values())]
        session.config.stash[_STOCK] = directory, beside(session.config).add(command)


@pytest.fixture(scope="session")
def stock(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    """Stock vLLM's answers to all cases, by model and case."""
    directory, done = pytestconfig.stash[_STOCK]
    with directory:
        done.result()
        found = {name: Path(directory.name) / f"{path.name}.json" for name, path in MODELS.items()}
        yield {name: json.loads(file.read_text()) for name, file in found.items()}
