"""How busy the cores of a CPU unit are with everything but its own engines.

Engines of other units, gateways, and clients on the same machine slow an engine's steps down beside taking cores from
it: they share its caches. What that costs is learnt (`costs.correction`), so it has to be known how much of it there
was. The kernel counts idle time in hundredths of a second, hence the mean of the last moments.
"""

from __future__ import annotations

import contextlib
import time

from muxserve.net.core_times import CoreTimes
from muxserve.scheduling.types import WHOLE

# The kernel is asked so often at most, and what it said fades with this time. On a machine of many cores it takes
# milliseconds to answer: no more than a hundredth of the time goes into that.
_LOOK_SECONDS = 0.1
_LOOK_PART = 0.01
_FADE_SECONDS = 0.4


class CoreUse:
    """Of those cores.

    Raises:
        OSError, ValueError: as `CoreTimes.idle_seconds`.
    """

    def __init__(self, cores: CoreTimes, now: float) -> None:
        self._cores = cores
        self._every = _LOOK_SECONDS
        self._looked_at, self._idle = now, self._idle_seconds()
        # Core-seconds that the own engines have computed since then.
        self._computed = 0.0
        # Fading sums: seconds, and core-seconds of those in which others were busy (below zero while steps of the own
        # engines are told later than they were done).
        self._seconds = self._busy = 0.0
        self._part = 0.0
        self._sum, self._at = 0.0, now

    def computed(self, seconds: float) -> None:
        """An engine of the own unit has computed for so many core-seconds."""
        self._computed += seconds

    def elsewhere(self, now: float) -> float:
        """Millionths of the cores that were busy with other things, summed up over time (seconds) until now. Where it
        begins means nothing: only differences do."""
        self._sum += self._part * max(0.0, now - self._at)
        self._at = max(now, self._at)
        if now - self._looked_at >= self._every:
            self._look(now)
        return self._sum

    def _look(self, now: float) -> None:
        elapsed, idle = now - self._looked_at, self._idle
        with contextlib.suppress(OSError, ValueError):  # a core may have been taken away: then it was never idle
            idle = self._idle_seconds()
        busy = self._cores.count * elapsed - (idle - self._idle) - self._computed
        fade = max(0.0, 1.0 - elapsed / max(_FADE_SECONDS, 4.0 * self._every))
        self._seconds = fade * self._seconds + elapsed
        self._busy = fade * self._busy + busy
        self._looked_at, self._idle, self._computed = now, idle, 0.0
        part = self._busy / (self._seconds * self._cores.count)
        self._part = WHOLE * min(1.0, max(0.0, part))

    def _idle_seconds(self) -> float:
        began = time.thread_time()
        idle = self._cores.idle_seconds()
        self._every = max(_LOOK_SECONDS, (time.thread_time() - began) / _LOOK_PART)
        return idle
