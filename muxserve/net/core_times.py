"""For how long the cores of a machine were idle, by the kernel's counts."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


class CoreTimes:
    """Of those cores (their numbers), by the kernel's counts in `stat`. `count` is how many they are.

    Raises:
        OSError: `stat` cannot be read.
        ValueError: it does not say of these cores for how long they were idle.
    """

    def __init__(self, cores: Collection[int], stat: Path = Path("/proc/stat")) -> None:
        self.count = len(cores)
        self._names = {b"cpu%d" % core for core in cores}
        self._stat = stat
        self.idle_seconds()

    @classmethod
    def own(cls) -> CoreTimes:
        """Of the cores that this process may run on.

        Raises:
            OSError: the kernel does not tell.
            ValueError: it does not tell of all of them.
        """
        return cls(os.sched_getaffinity(0))

    def idle_seconds(self) -> float:
        """Seconds in which the cores were idle, since the machine started, all together.

        Raises:
            OSError, ValueError: as of the class; a core may have been taken away.
        """
        idle = known = 0
        for line in self._stat.read_bytes().splitlines():
            name, *counts = line.split()
            if name in self._names:
                # Waiting for a disk is idle, too.
                idle += int(counts[3]) + int(counts[4])
                known += 1
        if known != self.count:
            raise ValueError(f"the kernel counts the idle time of {known} of {self.count} cores")
        return idle * _TICK
