"""Checkpoints are read without being mapped as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.patience import PATIENCE

TENSORS, SIDE = 48, 1024
MIB = 1 << 20

# As vLLM reads a checkpoint, in a process of its own: all tensors are copied, one after the other.
SCRIPT = """
import sys
import torch
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

def mapped():
    with open("/proc/self/smaps") as lines:
        mine = False
        found = 0
        for line in lines:
            if line[0] in "0123456789abcdef":
                mine = line.rstrip().endswith(".safetensors")
            elif mine and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
    return found

from muxserve.engine.cpu import weight_files

def read():
    most, names, total = 0, [], 0.0
    for name, tensor in safetensors_weights_iterator([sys.argv[1]], False):
        total += tensor.clone().sum(dtype=torch.float64).item()
        most = max(most, mapped())
        names.append(name)
    print(most, total, ",".join(names))

read()
weight_files.register()
read()
"""


def test_a_part_of_a_checkpoint_is_mapped_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {f"t{n:02d}": torch.full((SIDE, SIDE), float(n)) for n in range(TENSORS)}
    save_file(tensors, file)
    command = [sys.executable, "-c", SCRIPT, str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    (whole, *said), (most, *again) = (line.split() for line in ran.stdout.splitlines()[-2:])
    assert int(whole) > 0.9 * file.stat().st_size
    assert again == said
    assert int(most) < 64 * MIB < file.stat().st_size // 2
