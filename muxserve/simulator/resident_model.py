"""A model that sleeps and wakes."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxserve.scheduling.residency_types import Residence
from muxserve.simulator.requests import SimRequest


@dataclass(slots=True)
class ResidentModel:
    """One model: where it is and since when, how many of its requests the unit has, and those that wait for it. What
    happened to it: wakes, the times that it was put to sleep, and requests that waited for it. `left`: the seconds
    alone that its wake still takes. `idle_since`: since when it is only put to sleep. `awake_since`: when its turn
    began."""

    name: str
    residence: Residence
    since: float = 0.0
    running: int = 0
    waiting: list[SimRequest] = field(default_factory=list)
    wakes: int = 0
    sleeps: int = 0
    waited: int = 0
    left: float = 0.0
    idle_since: float = 0.0
    awake_since: float = float("-inf")

    def become(self, residence: Residence, now: float) -> None:
        """It is there now."""
        self.residence, self.since = residence, now
        if residence is Residence.AWAKE:
            self.awake_since = now
