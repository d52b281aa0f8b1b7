"""What the tests of engines share: the answers of stock vLLM, which are made while other tests run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import (
    AVX512,
    INT4,
    MODELS,
    PRIVATE_KINDS,
    QUANTISED,
    ROUNDED,
    SEEING,
    SEEING_PRIVATE,
    TINY,
    on_this_processor,
)
from tests.support.beside import begin, output, wanted

# The model that is split over ranks. One of each kind of case that could go wrong between ranks: chunks, logits
# gathered, sampling on each rank, a grammar.
SPLIT = "arithmetic"
TRIED = ["greedy", "chunked", "logprobs", "penalties", "seed-top-p", "json"]
HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    ranks = wanted(session, "stock_by_ranks", HERE) is not None
    split = ["--split", str(MODELS[SPLIT]), "--cases", *TRIED] if ranks else []
    tiny = ["--tiny", *TINY] if wanted(session, "stock_tiny", HERE) is not None else []
    begin(session, "answered", HERE, "tests.engine.stock", *map(str, MODELS.values()), *split, *tiny, keep=True)
    begin(session, "stock_split", HERE, "tests.engine.stock", "--split-tiny", *sorted(ROUNDED), keep=True)
    begin(session, "stock_families", HERE, "tests.engine.stock", "--tiny", *on_this_processor(), keep=True)
    begin(session, "stock_seeing", HERE, "tests.engine.stock", "--seeing", *SEEING)
    begin(session, "stock_seeing_private", HERE, "tests.engine.stock", "--seeing-private", *SEEING_PRIVATE)
    begin(session, "stock_private", HERE, "tests.engine.stock", "--private", *PRIVATE_KINDS, keep=True)
    quantised = [str(path) for name, path in QUANTISED.items() if AVX512 or name != INT4]
    cached = ["--fp8", str(MODELS[SPLIT])] if AVX512 else []
    begin(session, "quantised", HERE, "tests.engine.stock", "--quantised", *quantised, *cached, keep=True)


@pytest.fixture(scope="session")
def answered(pytestconfig: pytest.Config) -> Path:
    """The directory of stock vLLM's answers."""
    return output(pytestconfig, "answered")


@pytest.fixture(scope="session")
def stock(answered: Path) -> dict[str, Any]:
    """Stock vLLM's answers to all cases, by model and case."""
    return {name: read(answered, path.name) for name, path in MODELS.items()}


@pytest.fixture(scope="session")
def stock_tiny(answered: Path) -> dict[str, Any]:
    """Stock vLLM's answers to some cases, by kind of tiny model and case."""
    return {kind: read(answered, kind) for kind in TINY}


@pytest.fixture(scope="session")
def stock_families(pytestconfig: pytest.Config, stock_tiny: dict[str, Any]) -> dict[str, Any]:
    """The same of more kinds."""
    directory = output(pytestconfig, "stock_families")
    return stock_tiny | {kind: read(directory, kind) for kind in on_this_processor()}


@pytest.fixture(scope="session")
def stock_seeing(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Stock vLLM's answers to prompts with images, by kind of tiny model and case."""
    directory = output(pytestconfig, "stock_seeing")
    return {kind: read(directory, make().name) for kind, make in SEEING.items()}


@pytest.fixture(scope="session")
def stock_seeing_private(pytestconfig: pytest.Config) -> dict[str, Any]:
    """The same of those that have a cache of their own."""
    directory = output(pytestconfig, "stock_seeing_private")
    return {kind: read(directory, make().name) for kind, make in SEEING_PRIVATE.items()}


@pytest.fixture(scope="session")
def stock_private(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Stock vLLM's answers to some cases, by kind of model whose cache the pool cannot hold, and case."""
    directory = output(pytestconfig, "stock_private")
    return {kind: read(directory, kind) for kind in PRIVATE_KINDS}


@pytest.fixture
def answers(stock: dict[str, Any]) -> dict[str, Any]:
    """Those of the model that most modules are content with, by case."""
    found: dict[str, Any] = stock[SPLIT]
    return found


@pytest.fixture(scope="session")
def stock_by_ranks(answered: Path) -> dict[int, dict[str, Any]]:
    """Stock vLLM's answers to some cases with one rank and with two."""
    return {1: read(answered, SPLIT), 2: read(answered, f"{SPLIT}-2")}


@pytest.fixture(scope="session")
def stock_split(pytestconfig: pytest.Config, stock_tiny: dict[str, Any]) -> dict[str, Any]:
    """Stock vLLM's answers with two ranks, by kind of tiny model and case. Without roundings they are those of one."""
    directory = output(pytestconfig, "stock_split")
    return stock_tiny | {kind: read(directory, f"{kind}-2") for kind in ROUNDED}


@pytest.fixture(scope="session")
def quantised(pytestconfig: pytest.Config) -> Path:
    """The directory of stock vLLM's answers with quantised weights, and with an FP8 cache."""
    return output(pytestconfig, "quantised")


def read(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    return found
