from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.two_units import Pair, spec_of_unit
from muxserve.engine.synthetic import Encoder, RequestsWanted
from tests.support import preloaded
from tests.support.tiny_checkpoint import tiny_checkpoint

# Requests that move to and fro while they are decoded, and those that see a process die: count, prompt, output tokens.
MOVING = (3, 300, 1000)
STRUCK = (1, 300, 500)


@pytest.fixture(scope="package")
def pair() -> Iterator[Pair]:
    """Two real units. Whoever kills parts of them waits until they are whole again."""
    checkpoint = tiny_checkpoint("llama", 2, 4, 2, 64)
    with (
        tempfile.TemporaryDirectory(prefix="mx") as root,
        Pair(
            lambda name: spec_of_unit(Path(root) / name, name, checkpoint, max_len=2048, blocks=240),
            start=preloaded.start,
        ) as started,
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
