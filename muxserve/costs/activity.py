"""How busy a device was lately, and for how long an engine has paused. On cores that have done nothing for some time
the next step takes longer, most likely since others have used their caches and the host has put them to sleep."""

from __future__ import annotations

import math

# Seconds after which what was before counts 1/e.
MEMORY_SECONDS = 0.05
# After a pause of the second nothing is left of what an engine's steps leave for the next one; up to the first, all is.
SHORT_SECONDS, LONG_SECONDS = 0.005, 0.04


def lost_in(pause: float) -> float:
    """Which part of what its last step has left an engine finds no more after so many seconds, from 0 to 1."""
    return min(1.0, max(0.0, pause - SHORT_SECONDS) / (LONG_SECONDS - SHORT_SECONDS))


class Activity:
    """The part of a device that was in use, in a mean over the last moments. Nothing was before `now`."""

    __slots__ = ("_at", "_mean")

    def __init__(self, now: float = 0.0) -> None:
        self._at = now
        self._mean = 0.0

    def passed(self, now: float, part: float) -> None:
        """So much of it was in use, of 1, since this was last said."""
        self._mean = self._after(now, part)
        self._at = now

    def rested(self, now: float, part: float) -> float:
        """Which part of it has rested until `now`, from 1 (all of it, for long) to 0; `part` was in use since `passed`
        was last said."""
        return 1.0 - self._after(now, part)

    def _after(self, now: float, part: float) -> float:
        kept = math.exp((self._at - now) / MEMORY_SECONDS) if now > self._at else 1.0
        return min(1.0, part) + (self._mean - min(1.0, part)) * kept
