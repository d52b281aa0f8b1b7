"""A model that sleeps and wakes, and its unit as residency sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.residency_types import Residence
from muxserve.simulator.clock import Clock
from muxserve.simulator.compute import Compute
from muxserve.simulator.leased import LeasedEngine
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimUnit


@dataclass(slots=True)
class ResidentModel:
    """One model: where it is and since when, how many of its requests the unit has, and those that wait for it. What
    happened to it: wakes, the times that it was put to sleep, and requests that waited for it. `left`: the seconds
    alone that its wake still takes. `idle_since`: since when it is only put to sleep. `awake_since`: when its turn
    began. `hibernated`: its memory is in a file; `moves`: it moves there when it is put to sleep this time."""

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
    hibernated: bool = False
    moves: bool = False

    def become(self, residence: Residence, now: float) -> None:
        """It is there now."""
        self.residence, self.since = residence, now
        if residence is Residence.AWAKE:
            self.awake_since = now


class ResidencyUnit(Protocol):
    """What residency asks of its unit."""

    spec: SimUnit
    clock: Clock
    compute: Compute
    ledger: UnitLedger
    page_of: dict[str, ModelPages]

    def serve(self, request: SimRequest, now: float) -> None:
        """A request whose model is awake is queued."""
        ...

    def withdraw(self, name: str, now: float) -> list[SimRequest]:
        """All that wait for that model leave."""
        ...

    def detach(self, request: SimRequest, now: float) -> int:
        """A sequence leaves its engine between two steps; returns its blocks, which stay taken."""
        ...

    def forget(self, request: SimRequest, now: float) -> None:
        """A detached request is none of the unit's any more."""
        ...

    def decoder(self, name: str) -> LeasedEngine:
        """The engine in which the model's sequences decode."""
        ...

    def decide_again(self) -> None:
        """Something has changed that calls for a decision."""
        ...
