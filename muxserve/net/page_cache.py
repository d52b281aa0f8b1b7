"""Files that the kernel is asked to read ahead."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from muxserve.spec.unit import WEIGHT_FILES

# Kernels read no more for one call than they would read ahead by themselves: by default 128 KiB, often some MiB.
_STEP_BYTES = 128 << 10


def read_weights_ahead(directory: str | Path) -> None:
    """Have the kernel begin to read the weights of the checkpoint there; what is in memory costs next to nothing.
    Returns before they are read. A file that cannot be opened is left out: who loads it says so."""
    found: list[Path] = next((files for each in WEIGHT_FILES if (files := sorted(Path(directory).glob(each)))), [])
    for file in found:
        # What is not read ahead is read later all the same.
        with contextlib.suppress(OSError), file.open("rb") as opened:
            for offset in range(0, os.fstat(opened.fileno()).st_size, _STEP_BYTES):
                os.posix_fadvise(opened.fileno(), offset, _STEP_BYTES, os.POSIX_FADV_WILLNEED)
