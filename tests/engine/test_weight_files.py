"""Checkpoints are read ahead, and without being mapped as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from muxserve.engine.cpu.weight_files import read_ahead
from tests.support import preloaded
from tests.support.patience import PATIENCE, pauses

TENSORS, SIDE = 48, 1024
MIB = 1 << 20


def test_a_part_of_a_checkpoint_is_mapped_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {f"t{n:02d}": torch.full((SIDE, SIDE), float(n)) for n in range(TENSORS)}
    save_file(tensors, file)
    command = [sys.executable, "-m", "tests.engine.mapped_weights", str(file)]
    reading = preloaded.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stock=True)
    assert reading.stdout is not None
    with reading.stdout as output:
        said = output.read().decode()
    assert reading.wait(PATIENCE) == 0, said
    (whole, *stock), (most, *ours) = (line.split() for line in said.splitlines()[-2:])
    assert int(whole) > 0.9 * file.stat().st_size
    assert ours == stock
    assert int(most) < 64 * MIB < file.stat().st_size // 2


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
    read_ahead(cold.parent)
    with cold.open("rb") as opened:
        until_cached(opened.fileno())


def test_what_cannot_be_opened_is_left_to_who_loads_it(cold: Path) -> None:
    (cold.parent / "gone.safetensors").symlink_to(cold.parent / "nowhere")
    read_ahead(cold.parent / "no such directory")
    read_ahead(cold.parent)
    with cold.open("rb") as opened:
        until_cached(opened.fileno())
