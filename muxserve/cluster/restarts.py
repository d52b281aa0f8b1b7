"""When a part that died is started again, and when that is given up. Pure."""

from __future__ import annotations

from collections import deque

MAX_DEATHS = 5
WINDOW = 60.0
# The first restart is as good as at once: a part killed by accident should be missed as little as possible.
DELAYS = (0.05, 0.5, 1.0, 2.0)
# For what the fleet can do without for a while.
PATIENT_DELAYS = (*DELAYS, 5.0)
# What does not even come up is tried ever more rarely: each try costs the others compute.
START_DELAYS = (0.05, 1.0, 5.0, 15.0, 60.0)
# After so many starts in a row that failed nobody should wait for the next one.
DEGRADED_STARTS = 3


class RestartPolicy:
    """Back-off of one part.

    `failed_starts` counts the starts that failed since the part was up; those that were killed from outside count half.

    Args:
        max_deaths: as many deaths within `window` seconds end it; None: it is started again for ever.
        delays: seconds before the first, second, ... restart within the window; the last one repeats.
        start_delays: likewise for the first, second, ... start in a row that failed; the longer delay counts.
    """

    def __init__(
        self,
        max_deaths: int | None = MAX_DEATHS,
        window: float = WINDOW,
        delays: tuple[float, ...] = DELAYS,
        start_delays: tuple[float, ...] = START_DELAYS,
    ) -> None:
        self.max_deaths = max_deaths
        self.window = window
        self.delays = delays
        self.start_delays = start_delays
        self._failed_starts = 0.0
        self._deaths: deque[float] = deque()

    @property
    def failed_starts(self) -> int:
        """See above."""
        return int(self._failed_starts)

    def died(self, now: float, came_up: bool = True, killed: bool = False) -> float | None:
        """Note a death at `now` (monotonic seconds), of a part that had been up or whose start failed, and whether it
        was killed from outside; the delay before the next start, None to give up."""
        self._failed_starts = 0.0 if came_up else self._failed_starts + (0.5 if killed else 1.0)
        while self._deaths and self._deaths[0] <= now - self.window:
            self._deaths.popleft()
        self._deaths.append(now)
        if self.max_deaths is not None and len(self._deaths) >= self.max_deaths:
            return None
        delay = self.delays[min(len(self._deaths), len(self.delays)) - 1]
        if came_up:
            return delay
        return max(delay, self.start_delays[min(max(self.failed_starts, 1), len(self.start_delays)) - 1])
