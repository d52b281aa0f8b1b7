"""An engine as the clock and the devices see it."""

from __future__ import annotations

from muxserve.costs import Load
from muxserve.scheduling.types import Phase

NO_LOAD = Load(0.0, 0.0)
# An engine has nothing to do, could begin a step, is in one, or is in one that computes nothing.
IDLE, BOUNDARY, STEPPING, STALLED = range(4)
_NEVER = float("inf")


class Job:
    """What an engine computes. `order` is its place among the engines that end steps at one moment; `version` tells
    looks at it that are out of date, `looks` counts the others. While it is `active` it asks `load` of the devices on
    its `share` of them in kernels of that `grain` (`RunningJob`), and is `slow` times as slow as alone. It is looked at
    again at `planned_time`."""

    def __init__(self, phase: Phase, order: int) -> None:
        self.phase = phase
        self.order = order
        self.version = 0
        self.looks = 0
        self.slow = 1.0
        self.load = NO_LOAD
        self.share = 1.0
        self.grain = 0.0
        self.active = False
        self.state = IDLE
        self.planned_time = _NEVER

    def boundary(self, now: float) -> None:
        """The planned step is over."""
        raise NotImplementedError

    def kick(self, now: float) -> None:
        """Begin the next step, if there is one to run."""
        raise NotImplementedError

    def interrupt(self, now: float) -> None:
        """Stop at the next boundary."""

    def plan(self) -> float:
        """Fix when to look at this engine again, and return that."""
        return self.planned_time

    def retime(self, slow: float, now: float) -> None:
        """Jobs beside this one came, went or changed."""
        raise NotImplementedError
