from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.two_units import MODEL, Pair, unit_of
from muxserve.engine.synthetic import Encoder, RequestsWanted
from tests.engine.harness import TINY, deployed_model
from tests.support import preloaded
from tests.support.tiny_checkpoint import tiny_checkpoint

# Requests that move to and fro while they are decoded, and those that see a process die: count, prompt, output tokens.
MOVING = (3, 300, 700)
STRUCK = (1, 300, 500)
BLOCKS = 240
HERE = Path(__file__).parent
# One model of each page class whose requests move in a way of their own.
BY_HEAD, LATENTS, STATES = "llama", "deepseek_v2", "granite_hybrid"
CLASSES = {BY_HEAD: partial(tiny_checkpoint, "llama", 2, 4, 2, 64), LATENTS: TINY[LATENTS], STATES: TINY[STATES]}
# Another model with states, some of whose layers are an MLP alone.
SPARSE_STATES = "nemotron_h"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one kind come after each other: the units of each kind are started once."""
    places = [place for place, item in enumerate(items) if _kind(item) in CLASSES]
    order = sorted(
        (items[place] for place in places),
        key=lambda item: (list(CLASSES).index(_kind(item)), item.path, item.reportinfo()[1]),
    )
    for place, item in zip(places, order, strict=True):
        items[place] = item


def _kind(item: pytest.Item) -> str:
    """The kind of model that the test's units serve; "" where it has none."""
    callspec = getattr(item, "callspec", None)
    asked: str = callspec.params.get("kind", "") if callspec is not None and item.path.parent == HERE else ""
    return asked


@pytest.fixture(scope="package")
def kind(request: pytest.FixtureRequest) -> str:
    """The page class of the units' model; a test says with `pytest.mark.parametrize` which, and with `scope="package"`
    that the units may stay for the next test."""
    asked: str = request.param
    return asked


@pytest.fixture(scope="package")
def pair(kind: str) -> Iterator[Pair]:
    """Two real units. Whoever kills parts of them waits until they are whole again."""
    model = deployed_model(
        MODEL,
        TINY[SPARSE_STATES]() if kind == SPARSE_STATES else CLASSES[kind](),
        block_tokens=32,
        max_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        prefix_caching=kind == STATES,
    )
    with (
        tempfile.TemporaryDirectory(prefix="mx") as root,
        Pair(lambda name: unit_of(Path(root) / name, name, model, BLOCKS), start=preloaded.start) as started,
    ):
        yield started


@pytest.fixture(scope="package")
def requests() -> dict[tuple[int, int, int], list[bytes]]:
    """In vLLM's encoding."""
    encoder = Encoder()
    return {
        lengths: encoder.make(RequestsWanted(*lengths, vocabulary=256, seed=seed)).bodies
        for seed, lengths in enumerate((MOVING, STRUCK))
    }
