"""Files that the kernel is to have in memory before somebody reads them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from muxserve.spec.unit import WEIGHT_FILES

# Kernels read no more for one call than they would read ahead by themselves: by default 128 KiB, often some MiB.
_STEP_BYTES = 128 << 10


def read_ahead(descriptor: int, size: int) -> None:
    """Have the kernel begin to read the first `size` bytes of a file; what is in memory costs next to nothing. Returns
    before they are read."""
    with contextlib.suppress(OSError):  # they are read later all the same
        for offset in range(0, size, _STEP_BYTES):
            os.posix_fadvise(descriptor, offset, _STEP_BYTES, os.POSIX_FADV_WILLNEED)


def read_weights_ahead(directory: str | Path) -> int:
    """Have the kernel begin to read the weights of the checkpoint there; returns their bytes. A file that cannot be
    opened is left out: who loads it says so."""
    found: list[Path] = next((files for each in WEIGHT_FILES if (files := sorted(Path(directory).glob(each)))), [])
    read = 0
    for file in found:
        with contextlib.suppress(OSError), file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            read_ahead(opened.fileno(), size)
            read += size
    return read
