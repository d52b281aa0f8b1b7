"""A file of rows of numbers that processes of a machine map: each writes its own row, and reads those of the others.

Reading and writing are plain memory accesses, without a lock. So a reader may see a row half-written; what is kept in
rows must bear that for a moment. The row of a process that has ended stays as it was until another one takes it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

_ROWS = 2048
_ITEM_BYTES = 8


class ProcessRows:
    """`numbers` are those of all rows, one after the other. Each row has `fields`, of which the first is the pid of the
    process that has it, or 0 in a row that nobody ever had; such rows are the last ones. `mine` is the place of the own
    row's first number.

    Raises:
        OSError: the file cannot be made, or has no room for another process.
    """

    def __init__(self, path: Path, fields: int) -> None:
        self.fields = fields
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            # What is mapped keeps the file open, so that closing would not unlock it.
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                # A hole in the file would be filled at the first store, and on a full disk that ends the process.
                os.posix_fallocate(file.fileno(), 0, _ROWS * fields * _ITEM_BYTES)
                self.numbers = memoryview(mmap.mmap(file.fileno(), _ROWS * fields * _ITEM_BYTES)).cast("d")
                self.mine = self._claim(path)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

    def _claim(self, path: Path) -> int:
        for place in range(0, len(self.numbers), self.fields):
            pid = self.numbers[place]
            if not pid or not Path(f"/proc/{pid:.0f}").exists():
                self.numbers[place] = os.getpid()
                return place
        raise OSError(f"{path}: {_ROWS} processes have all of its rows")
