"""How long a thread waited for a core, and how long it computes between two steps, by the kernel's counts.

Steps on a CPU take longer while more threads want to run than there are cores. That is no cost of the step, and whoever
predicts steps counts it by itself: in the simulator jobs that ask for more cores than there are stretch each other.
"""

from __future__ import annotations

import math
import os
import threading
import time

_NANOSECONDS = 1e-9
# What is left of a step at least: the kernel's count and the step do not begin and end at the same moment.
_LEAST = 0.05


class CoreWaits:
    """Of the thread that makes it; where the kernel does not tell, nothing ever waited. With several threads in a step
    the others' waiting is not known."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def total(self) -> float:
        """Seconds since the thread began."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) * _NANOSECONDS
        except (OSError, ValueError, IndexError):
            return 0.0


class NoWaits(CoreWaits):
    """Of an engine whose steps are a device's: its thread may wait while that computes."""

    def __init__(self) -> None:
        self._file = -1


class BetweenSteps:
    """What the thread that takes steps computes between one and the next: it sends tokens and reports, and reads
    messages. What it does before the first step after it had nothing to do is part of that step's lease."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._over = -math.inf

    def idled(self, at: float) -> bool:
        """The engine had nothing to do at that time, and has taken no step since."""
        return self._since is None and at >= self._over

    def begin(self) -> None:
        """A step is over."""
        self._since, self._over = time.thread_time(), time.monotonic()

    def idle(self) -> None:
        """No step follows for the time being."""
        self._since = None

    def pause(self, now: float) -> float:
        """Another step begins now; seconds since the last one if there was nothing to do meanwhile, else 0."""
        return now - self._over if self._since is None else 0.0

    def end(self) -> float:
        """Another step begins; seconds since the last one."""
        return 0.0 if self._since is None else time.thread_time() - self._since


def without_waiting(seconds: float, waited: float) -> float:
    """A step of so many seconds in which so many were waited for a core."""
    return max(seconds - waited, _LEAST * seconds)
