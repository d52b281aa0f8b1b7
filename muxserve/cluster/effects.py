"""What the parts of a fleet, and those of a unit, may ask of the whole that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from muxserve import wire
from muxserve.cluster.processes import Process
from muxserve.cluster.supervision import PartEffects
from muxserve.cluster.warm_link import WarmLink
from muxserve.spec import FleetSpec, FollowedFleet


class FleetEffects(PartEffects, Protocol):
    """A fleet, for its units, its changes and the processes that belong to no unit. `Controller` is one."""

    @property
    def fleet(self) -> FleetSpec:
        """The fleet as it is now."""

    def fleet_changed(self) -> None:
        """The fleet's file has been written anew."""

    def failed(self, error: BaseException) -> None:
        """The fleet cannot go on."""

    def stop(self, cause: str = "") -> None:
        """Drain the fleet and end it, because of `cause`."""

    def tell_scheduler(self, message: wire.Message) -> None:
        """Send something to the global scheduler, if there is one."""

    def warm_links(self) -> Iterable[WarmLink]:
        """To the warm parents of this machine, which have imported vLLM and can fork."""

    async def until_sized(self) -> None:
        """Wait until the fleet's file has the pools as large as they will be."""

    async def until_followed(self, enough: Callable[[FollowedFleet], bool]) -> list[FollowedFleet]:
        """Wait until `enough` holds for every gateway that runs; returns what they have taken in."""


class UnitEffects(PartEffects, Protocol):
    """A unit, for its parts. `UnitHost` is one."""

    def on_model_parent(self, model: str, process: Process) -> None:
        """A process has begun to load a model, to fork its engines."""

    async def tell(self, message: wire.Message) -> None:
        """Tell the unit scheduler; one that is being started knows of nobody, and must not hear it late."""
