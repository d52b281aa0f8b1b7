"""Reads ZeroMQ sockets straight from the event loop, a batch at a time: futures per message, as in `zmq.asyncio`, would
cost more than the messages themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from muxserve.net.inbox import Inbox

# Messages taken from one socket before others are read.
BATCH = 64


class Reader:
    """Calls `take` with the frames of each message that arrives on `socket`.

    ZeroMQ's descriptor tells only of changes, so after anything else was done with the socket it must be looked at
    again: `look`.

    Args:
        inbox: where it is said what could not be handled.
        peer: who is at the other end, for the log.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None], inbox: Inbox[Any], peer: str
    ) -> None:
        self._socket = socket
        self._inbox = inbox
        self._peer = peer
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.fileno()
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self.look()

    def look(self) -> None:
        """Read soon what may have arrived."""
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop reading; the socket stays open."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _drain(self) -> None:
        for _ in range(BATCH):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._inbox.handle(frames, self._peer, self._take, frames)
        self.look()
