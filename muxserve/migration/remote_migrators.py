"""Connections to the migrators that requests are moved to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import zmq

from muxserve.net.peer import Address, Connection
from muxserve.net.sockets import NetworkError
from muxserve.spec import Keys
from muxserve.wire import AnyMessage, Message, encode

# Connections are kept for the next move.
KEEP_SECONDS = 60.0
_LINGER_MS = 100
_FAILURES = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class RemoteMigrators:
    """Connects when there is something to send. A connection that ends is not opened again by itself: moves under way
    through it are over.

    Args:
        name: by which the others know this migrator.
    """

    def __init__(self, context: zmq.Context[Any], poller: zmq.Poller, name: str, keys: Keys | None) -> None:
        self._context = context
        self._poller = poller
        self._name = name
        self._keys = keys
        self._numbers = itertools.count(1)
        self._by_address: dict[str, Connection] = {}
        self._used_at: dict[str, float] = {}
        # Addresses that could not be sent to, and why; the next call of `lost` returns them.
        self.failed: dict[str, str] = {}

    def send(self, address: str, message: Message, pages: object = None) -> None:
        """Send, connecting first if need be. `lost` returns what goes wrong."""
        try:
            known = self._by_address.get(address)
            if known is None:
                at = Address(address, address, f"{self._name}/{next(self._numbers)}", self._keys)
                known = self._by_address[address] = Connection(self._context, self._poller, at, _FAILURES)
            if pages is None:
                known.send_frames(encode(message))
            else:
                known.send_frames(encode(message), pages, copy=False)
        except (NetworkError, zmq.ZMQError) as error:
            self.failed.setdefault(address, str(error))
        self._used_at[address] = time.monotonic()

    def messages(self, ready: dict[Any, int]) -> Iterator[tuple[str, AnyMessage]]:
        """What has come, with the address that it came from."""
        for address, connection in list(self._by_address.items()):
            if connection.socket in ready:
                for message in connection.messages():
                    yield address, message

    def lost(self, ready: dict[Any, int]) -> list[tuple[str, str]]:
        """Addresses where nobody is any more, and why."""
        for address, connection in self._by_address.items():
            if connection.monitor in ready:
                for event in connection.events():
                    self.failed.setdefault(address, _reason(event, address))
        lost, self.failed = list(self.failed.items()), {}
        for address, _ in lost:
            self._shut(address)
        return lost

    def tidy(self, in_use: set[str]) -> None:
        """Close connections that have not been used for a while."""
        now = time.monotonic()
        for address in list(self._by_address):
            if address not in in_use and now - self._used_at[address] > KEEP_SECONDS:
                self._shut(address)

    def close(self) -> None:
        """Close all; messages sent before still go out."""
        for connection in self._by_address.values():
            connection.close(_LINGER_MS)
        self._by_address.clear()

    def _shut(self, address: str) -> None:
        connection = self._by_address.pop(address, None)
        if connection is not None:
            connection.close()


def _reason(event: int, address: str) -> str:
    if event == zmq.EVENT_DISCONNECTED:
        return f"the connection to the migrator at {address} has ended"
    if event == zmq.EVENT_CONNECT_RETRIED:
        return f"no migrator listens at {address}"
    return f"the migrator at {address} is not of this fleet, or does not let us in"
