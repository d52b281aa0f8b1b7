"""What several modules share: stock vLLM's answers, which are made while other tests run, and a quickstart fleet."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import ROOT, Fleet, fleet_file, running
from tests.e2e.mixed_reference import CHUNK, GENERATING, KINDS, MAX_LEN, OPTIONS, SEEING, SEES, adapter, checkpoint
from tests.e2e.reference import MODELS
from tests.support import preloaded
from tests.support.beside import begin, output


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that need the answers that take longest to make come last."""
    here = Path(__file__).parent
    mine = [index for index, item in enumerate(items) if here in item.path.parents]
    late = {items[index].path for index in mine if "stock_of_mixed" in getattr(items[index], "fixturenames", ())}
    in_order = sorted((items[index] for index in mine), key=lambda item: item.path in late)
    for index, item in zip(mine, in_order, strict=True):
        items[index] = item


def pytest_collection_finish(session: pytest.Session) -> None:
    models = [str(ROOT / "configs/models" / model) for model in MODELS]
    here = Path(__file__).parent
    begin(session, "reference", here, "tests.e2e.reference", *models, keep=True)
    begin(session, "stock_of_mixed", here, "tests.e2e.mixed_reference", *KINDS, GENERATING, *SEES, keep=True)


@pytest.fixture(scope="session")
def reference(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Stock vLLM's answers by model, in the order of `requests_for`."""
    directory = output(pytestconfig, "reference")
    return {model: json.loads((directory / f"{model}.json").read_text()) for model in MODELS}


@pytest.fixture(scope="package")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The quickstart fleet, started as a user starts it. Whoever kills or stops parts of it waits until it is whole
    again."""
    with running(fleet_file(tmp_path_factory.mktemp("quickstart"))) as deployed:
        yield deployed


@pytest.fixture(scope="session")
def stock_of_mixed(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Stock vLLM's answers of the models of `mixed`."""
    directory = output(pytestconfig, "stock_of_mixed")
    return {model: json.loads((directory / f"{model}.json").read_text()) for model in (*KINDS, GENERATING, *SEES)}


@pytest.fixture(scope="package")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A model that generates, with adapters, one that sees images, and models that answer with vectors. It logs in
    JSON."""
    models: list[dict[str, Any]] = [
        {
            "name": GENERATING,
            "path": str(ROOT / "configs/models" / GENERATING),
            "adapters": {name: str(adapter(name)) for name in ("one", "two")},
            "engines": "split",
        }
    ]
    for name in KINDS:
        models.append({"name": name, "path": str(checkpoint(name)), "engine_args": OPTIONS.get(name, {})})
    sees = {"name": SEEING, "path": str(SEES[SEEING]())}
    models.append({**sees, "engines": "split", "engine_args": {"limit_mm_per_prompt": {"image": 2}}})
    common = {
        "max_len": MAX_LEN,
        "max_num_batched_tokens": CHUNK,
        "dtype": "float32",
        "threads": 1,
        "limits": {"max_wait": "none"},
    }
    path = fleet_file(tmp_path_factory.mktemp("mixed"), models=[common | model for model in models])
    # A place of its own for run directories: commands find the only fleet there.
    with (
        tempfile.TemporaryDirectory(prefix="mx") as runtime,
        running(
            path,
            environment={"XDG_RUNTIME_DIR": runtime},
            start=preloaded.start,
            options=("--log-format", "json"),
        ) as deployed,
    ):
        yield deployed
