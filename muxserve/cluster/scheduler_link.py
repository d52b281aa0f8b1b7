"""The controller's line to the global scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from muxserve import wire

log = logging.getLogger(__name__)

IDENTITY = b"controller"
_RECONNECT_MS = 20


class SchedulerLink:
    """A ZeroMQ DEALER `controller`; it reconnects by itself when the global scheduler is started again.

    Args:
        on_message: called with each message from it.
    """

    def __init__(self, address: str, on_message: Callable[[wire.Message], None]) -> None:
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, IDENTITY)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.connect(address)
        self._on_message = on_message
        self._reader = asyncio.create_task(self._read())

    async def send(self, message: wire.Message) -> None:
        """Send, or keep for when the global scheduler is back."""
        await self._socket.send(wire.encode(message))

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
                log.warning("a message that is none from the global scheduler: %s", error)
                continue
            self._on_message(message)
