"""Files that the kernel is to have in memory before somebody reads them, and on the disk before it would have to."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from muxserve.spec.unit import WEIGHT_FILES

# Kernels read no more for one call than they would read ahead by themselves: by default 128 KiB, often some MiB.
_STEP_BYTES = 128 << 10
# Of sync_file_range(2): write what is not being written yet, and do not wait for it.
_WRITE = 2


def read_ahead(descriptor: int, size: int) -> None:
    """Have the kernel begin to read the first `size` bytes of a file; what is in memory costs next to nothing. Returns
    before they are read."""
    with contextlib.suppress(OSError):  # they are read later all the same
        for offset in range(0, size, _STEP_BYTES):
            os.posix_fadvise(descriptor, offset, _STEP_BYTES, os.POSIX_FADV_WILLNEED)


def write_out(descriptor: int) -> None:
    """Have the kernel begin to write what it has of a file, which it would otherwise keep to itself for half a minute.
    Returns before it is written, but not before the disk has taken the orders."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "sync_file_range"):  # it is written later all the same
        libc.sync_file_range(ctypes.c_int(descriptor), ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_WRITE))


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
