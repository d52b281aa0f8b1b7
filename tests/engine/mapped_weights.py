"""How much of a checkpoint is mapped at most while vLLM reads it: as it does by itself, and as our processes do.

    python -m tests.engine.mapped_weights FILE

All tensors are copied, one after the other. A line for each way: the bytes, and the sum and the names of what was read.
"""

from __future__ import annotations

import sys

import torch
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from muxserve.engine.cpu import weight_files


def mapped() -> int:
    """Bytes of safetensors files that are in the memory of this process."""
    with open("/proc/self/smaps") as lines:
        ours = False
        found = 0
        for line in lines:
            if line[0] in "0123456789abcdef":
                ours = line.rstrip().endswith(".safetensors")
            elif ours and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
    return found


def read(file: str) -> None:
    most, names, total = 0, [], 0.0
    for name, tensor in safetensors_weights_iterator([file], False):
        total += tensor.clone().sum(dtype=torch.float64).item()
        most = max(most, mapped())
        names.append(name)
    print(most, total, ",".join(names))


def main() -> None:
    read(sys.argv[1])
    weight_files.register()
    read(sys.argv[1])


if __name__ == "__main__":
    main()
