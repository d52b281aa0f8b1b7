"""Processes of a unit whose host was killed, and that have not noticed: found by the unit's directory.

Everything that a host starts dies with it, but for an MPS server whose daemon was killed at the same moment, and for
what hangs in the GPU driver. Nothing is known of these but what they were started with.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from muxserve.gpu.mps import pipe_of

# What dies with its parent gets this long, and what is killed.
_GRACE_SECONDS = 5.0
_FILES = ("unit.json", "memory.sock")


def end_orphans(run_dir: Path, grace: float = _GRACE_SECONDS) -> list[int]:
    """Wait for this user's processes of the unit in `run_dir` to end, kill those that do not; returns their pids.

    To be called when no host of the unit runs.
    """
    seen: set[int] = set()
    killed: set[int] = set()
    # What one of them started while they were looked for is found the next time.
    while found := set(_pids_of(run_dir)) - seen:
        seen |= found
        killed |= _end(found, grace)
    return sorted(killed)


def _pids_of(run_dir: Path) -> list[int]:
    pids = [process for process in Path("/proc").iterdir() if process.name.isdigit()]
    return [int(process.name) for process in pids if int(process.name) != os.getpid() and _is_of(process, run_dir)]


def _end(pids: set[int], grace: float) -> set[int]:
    """Those of them that had to be killed."""
    watched = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            watched[os.pidfd_open(pid)] = pid
    try:
        left = _wait(set(watched), grace)
        for fd in left:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        _wait(left, grace)
        return {watched[fd] for fd in left}
    finally:
        for fd in watched:
            os.close(fd)


def _is_of(process: Path, run_dir: Path) -> bool:
    """Whether a process, by its directory below /proc, was started for the unit: its command line names a file that
    the unit's processes are told, or its environment the pipes of the unit's MPS server."""
    try:
        if process.stat().st_uid != os.getuid():
            return False
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    files = {os.fsencode(run_dir / name) for name in _FILES}
    return not files.isdisjoint(words) or pipe_of(process) == run_dir / "mps" / "pipe"


def _wait(fds: set[int], seconds: float) -> set[int]:
    """The processes that have not ended within that time."""
    end = time.monotonic() + seconds
    left = set(fds)
    while left and (remaining := end - time.monotonic()) > 0:
        left.difference_update(select.select(left, [], [], remaining)[0])
    return left
