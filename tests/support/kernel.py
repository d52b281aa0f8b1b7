"""What a machine's kernel counts, for tests."""

from __future__ import annotations

from pathlib import Path

from muxserve.net.core_times import CoreTimes


class Kernel:
    """`/proc/stat` of a machine with three cores, of which the last is somebody else's, and always busy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 1000.0
        self.idle = [500.0, 300.0]
        self._write()

    def passed(self, seconds: float, busy: float) -> None:
        """So many seconds, in which the cores were busy for so many core-seconds between them."""
        self.now += seconds
        self.idle = [idle + seconds - busy / 2 for idle in self.idle]
        self._write()

    def cores(self) -> CoreTimes:
        """The first two cores."""
        return CoreTimes((0, 1), self.path)

    def _write(self) -> None:
        lines = [f"cpu{core} 11 22 33 {round(100 * idle) - 4} 4 0 0 0 0 0" for core, idle in enumerate(self.idle)]
        self.path.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "cpu2 9 9 9 9 9 9 9 9 9 9", "intr 1 2"]))
