"""Files are in the kernel's page cache before they are read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from muxserve.net.page_cache import read_weights_ahead
from tests.support.patience import PATIENCE, pauses

SIZE = 24 << 20  # more than a kernel reads for one call
PIECE = 64 << 10


def cached(descriptor: int) -> int:
    """Bytes of the file that are in memory, as far as a piece of each `PIECE` tells."""
    there = 0
    for offset in range(0, SIZE, PIECE):
        try:
            os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        there += PIECE
    return there


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file that is on the disk only."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(SIZE))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, SIZE, os.POSIX_FADV_DONTNEED)
        if cached(opened.fileno()) > SIZE // 2:
            pytest.skip("this file system is in memory")
    return file


def until_cached(descriptor: int) -> None:
    ends = time.monotonic() + PATIENCE
    for pause in pauses():
        if cached(descriptor) >= SIZE:
            return
        assert time.monotonic() < ends
        time.sleep(pause)


def test_all_weights_of_a_checkpoint_are_read(cold: Path) -> None:
    read_weights_ahead(cold.parent)
    with cold.open("rb") as opened:
        until_cached(opened.fileno())


def test_what_cannot_be_opened_is_left_to_who_loads_it(cold: Path) -> None:
    (cold.parent / "gone.safetensors").symlink_to(cold.parent / "nowhere")
    read_weights_ahead(cold.parent / "no such directory")
    read_weights_ahead(cold.parent)
    with cold.open("rb") as opened:
        until_cached(opened.fileno())
