"""What the tests of engines share: the answers of stock vLLM, which are made while other tests run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import MODELS
from tests.support.beside import begin, output

# The model that is split over ranks. One of each kind of case that could go wrong between ranks: chunks, logits
# gathered, sampling on each rank, a grammar.
SPLIT = "arithmetic"
TRIED = ["greedy", "chunked", "logprobs", "penalties", "seed-top-p", "json"]
HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    begin(session, "stock", HERE, "tests.engine.stock", *map(str, MODELS.values()))
    split = [str(MODELS[SPLIT]), "--cases", *TRIED, "--ranks", "1", "2"]
    begin(session, "stock_by_ranks", HERE, "tests.engine.stock", *split)


@pytest.fixture(scope="session")
def stock(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Stock vLLM's answers to all cases, by model and case."""
    with output(pytestconfig, "stock") as directory:
        return {name: json.loads((directory / f"{path.name}.json").read_text()) for name, path in MODELS.items()}


@pytest.fixture
def answers(stock: dict[str, Any]) -> dict[str, Any]:
    """Those of the model that most modules are content with, by case."""
    found: dict[str, Any] = stock[SPLIT]
    return found


@pytest.fixture(scope="session")
def stock_by_ranks(pytestconfig: pytest.Config) -> dict[int, dict[str, Any]]:
    """Stock vLLM's answers to some cases with one rank and with two."""
    with output(pytestconfig, "stock_by_ranks") as directory:
        files = {1: directory / f"{SPLIT}.json", 2: directory / f"{SPLIT}-2.json"}
        return {ranks: json.loads(file.read_text()) for ranks, file in files.items()}
