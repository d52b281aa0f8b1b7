"""The controller's line to a unit scheduler."""

from __future__ import annotations

import asyncio
import os

from muxserve import wire
from muxserve.cluster.line import Line

_ASK_AGAIN_SECONDS = 1.0


class UnitLink(Line):
    """Known there as `controller/<pid>`."""

    def __init__(self, address: str) -> None:
        self._waiting: set[asyncio.Future[dict[str, object]]] = set()
        super().__init__(address, f"controller/{os.getpid()}".encode(), "unit scheduler", self._answered)

    async def state(self) -> dict[str, object]:
        """The unit's state; waits until there is a unit scheduler that answers."""
        future: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            while not future.done():
                # What was sent to a scheduler that has died since is gone, hence again.
                await self.send(wire.StateRequest())
                await asyncio.wait([future], timeout=_ASK_AGAIN_SECONDS)
            return future.result()
        finally:
            self._waiting.discard(future)

    def _answered(self, message: wire.Message) -> None:
        if isinstance(message, wire.UnitState):
            for future in self._waiting:
                if not future.done():
                    future.set_result(message.state)
