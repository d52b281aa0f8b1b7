"""The controller's connection to a unit scheduler."""

from __future__ import annotations

import asyncio
import os

import zmq

from muxserve import wire
from muxserve.net.peer import Address, AsyncPeer

_ASK_AGAIN_SECONDS = 1.0


class UnitPeer:
    """Messages wait for a unit scheduler that is being started again. Made inside a running event loop."""

    def __init__(self, address: str) -> None:
        self._waiting: set[asyncio.Future[dict[str, object]]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        at = Address("the unit scheduler", address, f"controller/{os.getpid()}")
        self._peer = AsyncPeer(self._context, at, keeps=True, on_message=self._answered)

    def send(self, message: wire.Message) -> None:
        """Send it."""
        self._peer.send(message)

    async def state(self) -> dict[str, object]:
        """The unit's state; waits until there is a unit scheduler that answers."""
        future: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            while not future.done():
                # What was sent to a scheduler that has died since is gone, hence again.
                self.send(wire.StateRequest())
                await asyncio.wait([future], timeout=_ASK_AGAIN_SECONDS)
            return future.result()
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        """Close the socket."""
        self._peer.close()
        self._context.term()

    def _answered(self, message: wire.Message) -> None:
        if isinstance(message, wire.StateReply):
            for future in self._waiting:
                if not future.done():
                    future.set_result(message.state)
