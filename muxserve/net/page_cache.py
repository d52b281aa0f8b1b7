"""Files that the kernel is asked to read ahead, or to write at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

from muxserve.spec.unit import WEIGHT_FILES

# Kernels read no more for one call than they would read ahead by themselves: by default 128 KiB, often some MiB.
_STEP_BYTES = 128 << 10
# Flag of sync_file_range(2): write what is not being written yet, and do not wait for it.
_WRITE = 2
# A call waits until the disk has taken its orders, on a slow disk almost until they are carried out.
_WRITE_BYTES = 16 << 20


def read_ahead(descriptor: int, size: int) -> None:
    """Have the kernel begin to read the first `size` bytes of a file; what is in memory costs next to nothing. Returns
    before they are read."""
    with contextlib.suppress(OSError):  # they are read later all the same
        for offset in range(0, size, _STEP_BYTES):
            os.posix_fadvise(descriptor, offset, _STEP_BYTES, os.POSIX_FADV_WILLNEED)


def write_out(descriptor: int, size: int, seconds: float) -> None:
    """Have the kernel begin to write the first `size` bytes of a file; by itself it would wait half a minute. What the
    disk has not taken after so many seconds is left to the kernel."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "sync_file_range"):
        return
    until = time.monotonic() + seconds
    for offset in range(0, size, _WRITE_BYTES):
        if time.monotonic() > until:
            return
        part = ctypes.c_int64(offset), ctypes.c_int64(_WRITE_BYTES)
        libc.sync_file_range(ctypes.c_int(descriptor), *part, ctypes.c_uint(_WRITE))


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
