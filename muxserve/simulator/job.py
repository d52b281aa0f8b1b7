"""An engine as the clock and the devices see it."""

from __future__ import annotations

from muxserve.costs import Load
from muxserve.scheduling.types import Phase

NO_LOAD = Load(0.0, 0.0)


class Job:
    """What an engine computes. `order` is its place among those that end steps at one moment; `version` tells looks at
    it that are out of date, `looks` counts the others. While it is `active` it asks `load` of the devices, and is
    `slow` times as slow as alone."""

    def __init__(self, phase: Phase, order: int) -> None:
        self.phase = phase
        self.order = order
        self.version = 0
        self.looks = 0
        self.slow = 1.0
        self.load = NO_LOAD
        self.active = False

    def boundary(self, now: float) -> None:
        """The planned step is over."""
        raise NotImplementedError

    def retime(self, slow: float, now: float) -> None:
        """Jobs beside this one came, went or changed."""
        raise NotImplementedError
