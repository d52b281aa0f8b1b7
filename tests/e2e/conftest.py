"""What several modules share: stock vLLM's answers, which are made while other tests run, and a quickstart fleet."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import ROOT, Fleet, fleet_file, running
from tests.e2e.reference import MODELS
from tests.support.beside import beside, wanted

_STOCK = pytest.StashKey[tuple[tempfile.TemporaryDirectory[str], Future[str]]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if wanted(session, "reference", Path(__file__).parent):
        directory = tempfile.TemporaryDirectory(prefix="mux-reference-")
        models = [str(ROOT / "configs/models" / model) for model in MODELS]
        command = [sys.executable, "-m", "tests.e2e.reference", directory.name, *models]
        session.config.stash[_STOCK] = directory, beside(session.config).add(command)


@pytest.fixture(scope="session")
def reference(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    """Stock vLLM's answers by model, in the order of `requests_for`."""
    directory, done = pytestconfig.stash[_STOCK]
    with directory:
        done.result()
        yield {model: json.loads((Path(directory.name) / f"{model}.json").read_text()) for model in MODELS}


@pytest.fixture(scope="package")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The quickstart fleet. Whoever kills parts of it waits until it is whole again."""
    with running(fleet_file(tmp_path_factory.mktemp("quickstart"))) as deployed:
        yield deployed
