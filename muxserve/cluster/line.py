"""What the controller's lines to other processes have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from muxserve import wire
from muxserve.network import connect

log = logging.getLogger(__name__)

_RECONNECT_MS = 20


class Line:
    """A ZeroMQ DEALER; it reconnects by itself when the process at `address` is started again. Made inside a running
    event loop.

    Args:
        identity: by which the other side knows us.
        peer: what the other side is called in the log.
        take: called with each message from it.
    """

    def __init__(self, address: str, identity: bytes, peer: str, take: Callable[[wire.Message], None]) -> None:
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        connect(self._socket, address)
        self._peer = f"the {peer}"
        self._inbox = wire.Inbox(log, wire.decode)
        self._take = take
        self._reader = asyncio.create_task(self._read())

    async def send(self, message: wire.Message) -> None:
        """Send, or keep for when the other side is back."""
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
            message = self._inbox.read(frames[-1], self._peer)
            if message is not None:
                self._inbox.handle(message, self._peer, self._take, message)
