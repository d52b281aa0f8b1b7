"""What becomes of a loaded model's memory while the model sleeps: it moves into a file, and the process that has the
model stays.

The kernel keeps as much of the file in memory as nobody else needs, as of any file. When the model is woken its engines
are forked from that process as ever, and find the weights where they were. So nothing is loaded, configured or packed
again; weights that the kernel has dropped meanwhile are read from the file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from muxserve.memory import Hibernation
from muxserve.net.page_cache import read_ahead, write_out
from muxserve.net.process import trim

# Memory moves in pieces of so many bytes at least: single pages, too. 6 MiB of a process stay in memory; with pieces of
# 16 KiB 24 MiB would.
MIN_BYTES = 4 << 10
# So much of the file system stays free.
KEPT_FREE_BYTES = 1 << 30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# From so many pages on the kernel does not wait any longer, but writes at once.
_WRITES_AT_ONCE = "nr_dirty_background_threshold"
# A model that is woken meanwhile waits for so long at most.
_WRITE_SECONDS = 1.0
# Everything moves within the time of so many loads, or not at all: nobody waits for the memory when that begins, and
# every wake after it is spared a load. What has changed since is moved within the time of one.
_LOADS = 3
# A beat is due after so long.
_SLICE_SECONDS = 0.1


class HibernationError(Exception):
    """The memory cannot move, or not all of it; the process is as it was."""


class SleepingMemory:
    """The file of one process, which has no name and goes with the process.

    Args:
        directory: where it is made.
        load_seconds: that loading the model took.
    """

    def __init__(self, directory: str, load_seconds: float) -> None:
        self._directory = directory
        self._load_seconds = load_seconds
        self._file: IO[bytes] | None = None
        self._moved: Hibernation | None = None

    def move(self, beat: Callable[[], None]) -> int:
        """Move what is this process's alone into the file, and call `beat` meanwhile; returns the bytes that moved.
        What has moved before and was not written to since stays there.

        Raises:
            HibernationError: the disk is full or slow, or the kernel does not let it.
        """
        trim()
        needed = 0  # what changed since it moved has its place in the file
        most_seconds = self._load_seconds
        try:
            if self._moved is None:
                self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 (stays open)
                self._moved = Hibernation(self._file.fileno(), MIN_BYTES)
                needed = _private_bytes()
                most_seconds *= _LOADS
            free = shutil.disk_usage(self._directory).free
            if free < KEPT_FREE_BYTES + needed:
                raise HibernationError(f"{self._directory} has only {free >> 20} MiB free")
            if needed and _is_behind(needed):
                raise HibernationError("the disks have not written yet what they were given")
            bytes_moved, everything, began = 0, False, time.monotonic()
            while not everything:
                moved, everything = self._moved.move(_SLICE_SECONDS)
                bytes_moved += moved
                beat()
                if not everything and time.monotonic() > began + most_seconds:
                    raise HibernationError(
                        f"{self._directory} took only {bytes_moved >> 20} MiB in {most_seconds:.1f} s"
                    )
        except (OSError, RuntimeError) as error:
            raise HibernationError(str(error)) from None
        _forget_peak()
        return bytes_moved

    def write_out(self) -> None:
        """Have the disk write what has moved: the next one to sleep is refused while too much waits for that."""
        if self._file is not None and self._moved is not None:
            write_out(self._file.fileno(), self._moved.file_bytes, _WRITE_SECONDS)

    def read_ahead(self) -> None:
        """Have the kernel read what it has dropped, beside whatever else the wake takes."""
        if self._file is not None and self._moved is not None:
            read_ahead(self._file.fileno(), self._moved.file_bytes)


def _private_bytes() -> int:
    """Bytes of memory that only this process has, and that would have to be written."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        if name == "Private_Dirty:":
            return int(value) << 10
    return 0


def _is_behind(more: int) -> bool:
    """Whether with so many bytes more the kernel would begin to hold up whoever writes."""
    told = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    pages = {name: int(told.get(name, 0)) for name in ("nr_dirty", "nr_writeback", _WRITES_AT_ONCE)}
    waiting = pages["nr_dirty"] + pages["nr_writeback"] + more // _PAGE_BYTES
    return _WRITES_AT_ONCE in told and waiting > pages[_WRITES_AT_ONCE]


def _forget_peak() -> None:
    """The most that this process ever took counts from now on: what its next wake takes is seen from that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
