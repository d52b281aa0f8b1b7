"""The controller's line to the unit scheduler."""

from __future__ import annotations

import asyncio
import logging
import os

import msgspec
import zmq
import zmq.asyncio

from muxserve import wire

log = logging.getLogger(__name__)

_RECONNECT_MS = 20
_ASK_AGAIN_SECONDS = 1.0


class UnitLink:
    """A ZeroMQ DEALER `controller/<pid>`; it reconnects by itself when the unit scheduler is started again."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"controller/{os.getpid()}".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.connect(address)
        self._waiting: set[asyncio.Future[dict[str, object]]] = set()
        self._reader = asyncio.create_task(self._read())

    async def send(self, message: wire.Message) -> None:
        """Send, or keep for when the unit scheduler is back."""
        await self._socket.send(wire.encode(message))

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

    async def close(self) -> None:
        """Close the socket."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = wire.decode(frames[-1])
            except msgspec.DecodeError as error:
                log.warning("a message that is none from the unit scheduler: %s", error)
                continue
            if isinstance(message, wire.UnitState):
                for future in self._waiting:
                    if not future.done():
                        future.set_result(message.state)
