"""Reads ZeroMQ sockets straight from the event loop, a batch at a time: futures per message, as in `zmq.asyncio`, would
cost more than the messages themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

log = logging.getLogger(__name__)

# Messages taken from one socket before others get their turn.
BATCH = 64


class Reader:
    """Calls `take` with the frames of each message that arrives on `socket`.

    ZeroMQ's descriptor tells only of changes, so after anything else was done with the socket it must be looked at
    again: `look`.
    """

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
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
            try:
                self._take(frames)
            except Exception:  # one bad message must not stop those behind it
                log.exception("a message could not be handled")
        self.look()
