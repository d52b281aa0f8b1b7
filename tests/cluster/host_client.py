"""A controller's end of the connection to a unit's host, for tests of hosts."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from muxserve.cluster.events import Event, PartId, Up
from muxserve.cluster.host_link import Answer, AnyCommand, ControllerEnd, HostEvent, Sized
from muxserve.spec import UnitSpec
from tests.support.patience import PATIENCE

E = TypeVar("E")


class HostClient:
    """Hears what a host says. Made inside a running event loop."""

    def __init__(self, unit_spec: UnitSpec) -> None:
        self.events: list[Event] = []
        self.sized: list[UnitSpec] = []
        self._changed = asyncio.Event()
        self._link = ControllerEnd(unit_spec, self._hear)

    async def until(self, kind: type[E], part: PartId | None = None, after: int = 0) -> E:
        """The first event of that kind among those from number `after` on."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for event in self.events[after:]:
                    if isinstance(event, kind) and (part is None or getattr(event, "part", None) == part):
                        return event
                self._changed.clear()
                await self._changed.wait()

    async def ask(self, command: AnyCommand) -> Answer:
        return await self._link.ask(command, PATIENCE)

    async def state(self, command: AnyCommand) -> dict[str, Any]:
        state = (await self.ask(command)).state
        assert state is not None
        return state

    def ups(self) -> set[PartId]:
        return {event.part for event in self.events if isinstance(event, Up)}

    def pids(self) -> list[int]:
        return [event.pid for event in self.events if isinstance(event, Up)]

    def close(self) -> None:
        self._link.close("the test is over")

    def _hear(self, event: HostEvent) -> None:
        if isinstance(event, Sized):
            self.sized.append(event.unit_spec)
        else:
            self.events.append(event)
        self._changed.set()
