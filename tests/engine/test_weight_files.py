"""Checkpoints are read without being mapped as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support import preloaded
from tests.support.patience import PATIENCE

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
