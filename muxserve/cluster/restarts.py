"""When a part that died is started again, and when that is given up. Pure."""

from __future__ import annotations

from collections import deque

MAX_DEATHS = 5
WINDOW = 60.0
# The first restart is as good as at once: a part killed by accident should be missed as little as possible.
DELAYS = (0.05, 0.5, 1.0, 2.0)
# For what the fleet can do without for a while.
PATIENT_DELAYS = (*DELAYS, 5.0)


class RestartPolicy:
    """Bounded back-off of one part.

    Args:
        max_deaths: as many deaths within `window` seconds end it; None: it is started again for ever.
        delays: seconds before the first, second, ... restart within the window; the last one repeats.
    """

    def __init__(
        self, max_deaths: int | None = MAX_DEATHS, window: float = WINDOW, delays: tuple[float, ...] = DELAYS
    ) -> None:
        self.max_deaths = max_deaths
        self.window = window
        self.delays = delays
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Note a death at `now` (monotonic seconds); the delay before the next start, None to give up."""
        while self._deaths and self._deaths[0] <= now - self.window:
            self._deaths.popleft()
        self._deaths.append(now)
        if self.max_deaths is not None and len(self._deaths) >= self.max_deaths:
            return None
        return self.delays[min(len(self._deaths), len(self.delays)) - 1]
