"""What the end of a process's log says of a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What an engine says when its GPU fails, and what that means.
_LAST_WORDS = (
    (r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|has no memory left",
     "the GPU is out of memory: lower cluster.gpu_memory, serve fewer models, or stop what else runs on the GPU"),
    (r"fallen off the bus|GPU is lost|ERROR_DEVICE_UNAVAILABLE|CUDA_ERROR_NO_DEVICE|device_lost|Xid.{0,40}\b79\b",
     "the GPU is lost: see `dmesg | grep Xid`; reset it or restart the machine"),
    (r"uncorrectable ECC|ECC_UNCORRECTABLE|Xid.{0,40}\b(48|63|64|94|95)\b",
     "the GPU's memory has failed (uncorrectable error): reset it, and replace it if that happens again"),
    (r"MPS server|cudaErrorMps|CUDA_ERROR_MPS_\w+",
     "the MPS server failed or refuses: see its log in the run directory (mps/log)"),
    (r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|device-side assert|unspecified launch failure",
     "a kernel failed; under MPS the failure of one engine takes the others with it, and all are started again"),
)  # fmt: skip


def explain(lines: Sequence[str]) -> str:
    """What the last lines of a process's log mean when a GPU is the cause; empty when none of them says so."""
    for line in reversed(lines):
        for pattern, words in _LAST_WORDS:
            if re.search(pattern, line):
                return words
    return ""
