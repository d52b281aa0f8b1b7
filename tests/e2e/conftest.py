"""What several modules share: stock vLLM's answers, which are made while other tests run, and a quickstart fleet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import ROOT, Fleet, fleet_file, running
from tests.e2e.pooling_reference import KINDS
from tests.e2e.reference import MODELS
from tests.support.beside import begin, output


def pytest_collection_finish(session: pytest.Session) -> None:
    models = [str(ROOT / "configs/models" / model) for model in MODELS]
    here = Path(__file__).parent
    begin(session, "reference", here, "tests.e2e.reference", *models)
    begin(session, "pooled", here, "tests.e2e.pooling_reference", *KINDS)


@pytest.fixture(scope="session")
def reference(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Stock vLLM's answers by model, in the order of `requests_for`."""
    directory = output(pytestconfig, "reference")
    return {model: json.loads((directory / f"{model}.json").read_text()) for model in MODELS}


@pytest.fixture(scope="package")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The quickstart fleet. Whoever kills or stops parts of it waits until it is whole again."""
    watchdog = {"suspect": "1s", "hung": "8s"}
    with running(fleet_file(tmp_path_factory.mktemp("quickstart"), watchdog=watchdog)) as deployed:
        yield deployed
