"""Signs of life of a process's main loop: a number in a file, which the loop raises and whoever may restart it reads.

The loop raises it, not a thread, since a thread goes on while the loop hangs. A loop that waits for events waits for at
most `PERIOD_SECONDS`, so that the number rises while there is nothing to do, too. The memory manager writes the same
file (`heartbeat.hpp`).

The file is mapped, so that a beat is one store into memory: no system call, no lock, and a full disk does not matter
once it is there. It outlives the process; who comes next goes on from the number that it finds.

Once a second a beat also sees that the process writes to a log that still has its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import struct
import time
from pathlib import Path

from muxserve.net.logs import own_log

log = logging.getLogger(__name__)

# The longest that a loop which has nothing to do stays silent.
PERIOD_SECONDS = 0.25
DIRECTORY = "beats"
_LOG_SECONDS = 1.0
_SIZE = 8  # one unsigned integer in the machine's order


def heartbeat_file(run_dir: str | os.PathLike[str], name: str) -> Path:
    """Where the part of that name beats; `run_dir` is that of its unit, or of the fleet."""
    return Path(run_dir) / DIRECTORY / f"{name.replace('/', '_')}.beat"


class Heartbeat:
    """The writer's side. Not to be shared with a child process: that one beats for itself.

    A process whose file cannot be made (the disk is full) serves all the same, and nobody watches it.
    """

    def __init__(self, path: Path) -> None:
        self._beats = 0
        self._log_due = 0.0
        self._memory: mmap.mmap | None = None
        try:
            self._memory = _mapped(path)
            (self._beats,) = struct.unpack("=Q", self._memory[:_SIZE])
        except OSError as error:
            log.warning("nobody will notice if this process hangs: %s", error)
        self.beat()

    def beat(self) -> None:
        """The loop has come round."""
        self._beats += 1
        if self._memory is not None:
            self._memory[:_SIZE] = struct.pack("=Q", self._beats & (1 << 64) - 1)
        now = time.monotonic()
        if now >= self._log_due:
            self._log_due = now + _LOG_SECONDS
            own_log.follow()

    async def keep(self) -> None:
        """Beat for the event loop that runs this, until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(PERIOD_SECONDS)

    def close(self) -> None:
        """Let go of the file."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class HeartbeatReader:
    """The watcher's side."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None

    def beats(self) -> int | None:
        """The number as it is now; None: nobody has written one."""
        if self._memory is None:
            with contextlib.suppress(OSError, ValueError), self._path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        if self._memory is None:
            return None
        (beats,) = struct.unpack("=Q", self._memory[:_SIZE])
        return int(beats)

    def close(self) -> None:
        """Let go of the file."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _mapped(path: Path) -> mmap.mmap:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A hole in the file would be filled at the first store, and on a full disk that ends the process.
        os.posix_fallocate(fd, 0, _SIZE)
        return mmap.mmap(fd, _SIZE)
    finally:
        os.close(fd)
