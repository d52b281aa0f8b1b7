"""What several modules share: stock vLLM's answers, which are made while other tests run, and a quickstart fleet."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import ROOT, Fleet, fleet_file, running
from tests.e2e.reference import MODELS


class Stock:
    """A process in which stock vLLM answers one model after the other."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mux-reference-"))
        models = [str(ROOT / "configs/models" / model) for model in MODELS]
        # Politely: what is tested meanwhile goes first.
        command = ["nice", "-n", "5", sys.executable, "-m", "tests.e2e.reference", str(self.directory), *models]
        with open(self.directory / "log", "wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def answers(self) -> dict[str, Any]:
        """By model, in the order of `requests_for`."""
        assert self.process.wait() == 0, (self.directory / "log").read_text()[-3000:]
        return {model: json.loads((self.directory / f"{model}.json").read_text()) for model in MODELS}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory)


STOCK = pytest.StashKey[Stock]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stock vLLM begins as soon as it is known to be needed: it takes half a minute."""
    wanted = any("reference" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        session.config.stash[STOCK] = Stock()


def pytest_unconfigure(config: pytest.Config) -> None:
    if STOCK in config.stash:
        config.stash[STOCK].close()


@pytest.fixture(scope="session")
def reference(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Stock vLLM's answers by model."""
    return pytestconfig.stash[STOCK].answers()


@pytest.fixture(scope="package")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The quickstart fleet. Whoever kills parts of it waits until it is whole again."""
    with running(fleet_file(tmp_path_factory.mktemp("quickstart"))) as deployed:
        yield deployed
