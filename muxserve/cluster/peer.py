"""What the controller's lines to other processes have in common."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable

import zmq
import zmq.asyncio

from muxserve import wire
from muxserve.net.inbox import Inbox
from muxserve.net.sockets import connect

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
        self._inbox = Inbox(log, wire.decode)
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


IDENTITY = b"controller"


class SchedulerLink(Line):
    """Known there as `controller`.

    Args:
        on_message: called with each message from it.
    """

    def __init__(self, address: str, on_message: Callable[[wire.Message], None]) -> None:
        super().__init__(address, IDENTITY, "global scheduler", on_message)


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


_PAUSE_SECONDS = 0.02


async def until_reachable(address: str) -> None:
    """Until a process listens at `address`, which is ZeroMQ's `ipc://PATH`."""
    while not reachable(address):
        await asyncio.sleep(_PAUSE_SECONDS)


def reachable(address: str) -> bool:
    """Whether a process listens at `address` now. A file that a dead one has left is not enough."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.removeprefix("ipc://"))
        except OSError:
            return False
    return True
