"""The migrator's sockets: to its unit scheduler, to migrators that it sends to, and from those that send to it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from muxserve.migration.tasks import Buffer
from muxserve.net import sockets
from muxserve.net.inbox import Inbox
from muxserve.spec import Keys, UnitSpec
from muxserve.wire import AnyMessage, Message, MigratorHello, encode

log = logging.getLogger(__name__)

Socket = zmq.Socket[Any]

IDENTITY = b"migrator"
# Messages taken in from one socket before others get their turn.
BATCH = 64
RECONNECT_MS = 20
# Connections to other migrators are kept for the next move.
KEEP_SECONDS = 60.0
_FAILURES = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class UnitLink:
    """The connection to the unit scheduler, which is greeted each time it is made. Nothing is sent, and nothing is
    heard, before it has answered."""

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        inbox: Inbox[AnyMessage],
        address: str,
        hello: MigratorHello,
    ) -> None:
        self._inbox = inbox
        self.greeted = False
        self._hello = hello
        self.socket: Socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, IDENTITY)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.monitor: Socket = self.socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        sockets.connect(self.socket, address)
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)

    def messages(self) -> Iterator[AnyMessage]:
        """What has come."""
        for frames in received(self.socket):
            message = self._inbox.read(frames[0], "the unit scheduler") if len(frames) == 1 else None
            if message is not None:
                yield message

    def ended(self) -> bool:
        """Whether the connection has ended since the last call. It is made again by itself."""
        ended = False
        while self.monitor.poll(0):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_CONNECTED:
                self.socket.send(encode(self._hello), zmq.NOBLOCK)
            else:
                ended, self.greeted = True, False
        return ended

    def send(self, message: Message) -> bool:
        """Send, if there is a unit scheduler that knows us; whether there is."""
        if self.greeted:
            self.socket.send(encode(message), zmq.NOBLOCK)
        return self.greeted

    def close(self) -> None:
        """Close both sockets."""
        _close(self.socket, self.monitor)


class PeerLinks:
    """Connections to other migrators, made when they are needed. One that ends is not made again by itself: what was
    under way through it is over."""

    def __init__(
        self, context: zmq.Context[Any], poller: zmq.Poller, inbox: Inbox[AnyMessage], name: str, keys: Keys | None
    ) -> None:
        self._inbox = inbox
        self._context = context
        self._poller = poller
        self._name = name
        self._keys = keys
        self._opened = 0
        self._by_address: dict[str, tuple[Socket, Socket]] = {}
        self._used_at: dict[str, float] = {}
        # Addresses that could not be sent to, and why; told by the next call of `lost`.
        self.failed: dict[str, str] = {}

    def send(self, address: str, message: Message, pages: object = None) -> None:
        """Send, connecting first if need be. What goes wrong is told by `lost`."""
        link = self._by_address.get(address)
        try:
            if link is None:
                link = self._open(address)
            frames: list[Any] = [encode(message)] if pages is None else [encode(message), pages]
            link[0].send_multipart(frames, zmq.NOBLOCK, copy=pages is None)
        except (sockets.NetworkError, zmq.ZMQError) as error:
            self.failed.setdefault(address, str(error))
        self._used_at[address] = time.monotonic()

    def messages(self, ready: dict[Any, int]) -> Iterator[tuple[str, AnyMessage]]:
        """What has come, with the address that it came from."""
        for address, (socket, _) in list(self._by_address.items()):
            if socket in ready:
                for frames in received(socket):
                    message = self._inbox.read(frames[0], address) if len(frames) == 1 else None
                    if message is not None:
                        yield address, message

    def lost(self, ready: dict[Any, int]) -> list[tuple[str, str]]:
        """Addresses where nobody is any more, and why."""
        for address, (_, monitor) in list(self._by_address.items()):
            while monitor in ready and monitor.poll(0):
                event = recv_monitor_message(monitor)["event"]
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
        """Close all; what was sent last still goes out."""
        for socket, monitor in self._by_address.values():
            _close(socket, monitor, linger=100)
        self._by_address.clear()

    def _open(self, address: str) -> tuple[Socket, Socket]:
        self._opened += 1
        socket: Socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{self._name}/{self._opened}".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        monitor: Socket = socket.get_monitor_socket(_FAILURES)
        self._by_address[address] = socket, monitor
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        sockets.connect(socket, address, self._keys)
        return socket, monitor

    def _shut(self, address: str) -> None:
        link = self._by_address.pop(address, None)
        if link is not None:
            for socket in link:
                self._poller.unregister(socket)
            _close(*link)


class Doorway:
    """The ROUTER that other migrators send to: over a Unix socket, and over TCP if the unit's spec says so."""

    def __init__(
        self, context: zmq.Context[Any], poller: zmq.Poller, inbox: Inbox[AnyMessage], unit_spec: UnitSpec
    ) -> None:
        """Bind it.

        Raises:
            sockets.NetworkError: the TCP address cannot be listened on.
            zmq.ZMQError: the Unix socket cannot be.
        """
        self._inbox = inbox
        self.socket: Socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        # One that is gone is found out when it is answered.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        sockets.bind_local(self.socket, unit_spec.migrator_address)
        if unit_spec.listen is not None and unit_spec.keys is not None:
            sockets.bind_tcp(self.socket, unit_spec.listen.host, unit_spec.listen.migrator_port, unit_spec.keys)
        poller.register(self.socket, zmq.POLLIN)

    def messages(self) -> Iterator[tuple[bytes, AnyMessage, Buffer | None]]:
        """What has come, from whom, with the pages of `PeerPages`."""
        for frames in received(self.socket, copy=False):
            peer = frames[0].bytes
            message = self._inbox.read(frames[1].bytes, peer) if len(frames) in (2, 3) else None
            if message is not None:
                # The array keeps the frame; nothing is copied.
                yield peer, message, np.frombuffer(frames[2], dtype=np.uint8) if len(frames) == 3 else None

    def send(self, peer: bytes, message: Message) -> bool:
        """Answer; false if it is not there any more."""
        try:
            self.socket.send_multipart((peer, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("%r is not there to be told %s: %s", peer, type(message).__name__, error)
            return False
        return True

    def close(self) -> None:
        """Close it; what was sent last still goes out."""
        self.socket.close(linger=100)


def received(socket: Socket, copy: bool = True) -> Iterator[list[Any]]:
    """Messages that are there, as frames; not more than are good for others who wait."""
    for _ in range(BATCH):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            return


def _reason(event: int, address: str) -> str:
    if event == zmq.EVENT_DISCONNECTED:
        return f"the connection to the migrator at {address} has ended"
    if event == zmq.EVENT_CONNECT_RETRIED:
        return f"no migrator listens at {address}"
    return f"the migrator at {address} is not of this fleet, or does not let us in"


def _close(socket: Socket, monitor: Socket, linger: int = 0) -> None:
    with contextlib.suppress(zmq.ZMQError):
        socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=linger)
