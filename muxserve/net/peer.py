"""Connections to processes of the fleet, which die, and are started again at the same address.

`Peer` is our end of such a connection for a loop around a `zmq.Poller`, `AsyncPeer` the same in an event loop. A
`Connection` alone is not made again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message, recv_monitor_message

from muxserve.net.inbox import Inbox
from muxserve.net.reader import BATCH, Reader
from muxserve.net.sockets import RECONNECT_MS, connect
from muxserve.spec import Keys
from muxserve.wire import AnyMessage, Message, decode, encode

log = logging.getLogger(__name__)

_numbers = itertools.count()


def received(socket: zmq.Socket[Any], copy: bool = True) -> Iterator[list[Any]]:
    """Messages that have come, as frames; not more than are good for others who wait."""
    for _ in range(BATCH):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            return


@dataclass(frozen=True, slots=True)
class Address:
    """Whom a connection reaches: its `name` for the log, the `address` of its ROUTER, the `identity` by which it knows
    us, and the fleet's `keys`, which are needed for TCP only."""

    name: str
    address: str
    identity: str
    keys: Keys | None = None


class Connection:
    """A DEALER, and what ZeroMQ tells of its connection.

    Args:
        context: of the sockets.
        poller: where both sockets are registered as long as they are open; None: they are watched otherwise.
        at: whom it reaches.
        events: of ZeroMQ's, those to be told.
        decode: makes a message of a frame, and raises `msgspec.DecodeError`, where the messages are not those of
            `muxserve.wire`.

    Raises:
        NetworkError: the address is on another machine, and there are no keys.
        zmq.ZMQError: it is no address.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller | None,
        at: Address,
        events: int = zmq.EVENT_DISCONNECTED,
        decode: Callable[[bytes], Any] = decode,
    ) -> None:
        self.at = at
        self._context = context
        self._poller = poller
        self._events = events
        self._inbox = Inbox(log, decode)
        self._open()

    def _open(self) -> None:
        self.socket: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, self.at.identity.encode())
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        # Events that came before the socket is watched would be missed, so this comes before it connects.
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(
            self._events, f"inproc://events-{next(_numbers)}"
        )
        if self._poller is not None:
            self._poller.register(self.socket, zmq.POLLIN)
            self._poller.register(self.monitor, zmq.POLLIN)
        try:
            connect(self.socket, self.at.address, self.at.keys)
        except Exception:
            self.close()
            raise

    def send_frames(self, *frames: Any, copy: bool = True) -> None:
        """Send, or keep for when the connection is made."""
        self.socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)

    def messages(self) -> Iterator[AnyMessage]:
        """What has come."""
        for frames in received(self.socket):
            message = self._read(frames)
            if message is not None:
                yield message

    def events(self) -> Iterator[int]:
        """What ZeroMQ has told of the connection."""
        while self.monitor.poll(0):
            yield recv_monitor_message(self.monitor)["event"]

    def close(self, linger: int = 0) -> None:
        """Close both sockets; what was just sent still goes out if it can within `linger` milliseconds."""
        if self.socket.closed:
            return
        if self._poller is not None:
            self._poller.unregister(self.socket)
            self._poller.unregister(self.monitor)
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger)

    def _read(self, frames: list[Any]) -> AnyMessage | None:
        return self._inbox.read(frames[-1], self.at.name)


class Peer(Connection):
    """A connection that is made again whenever it is lost. Each begins with a greeting, and ends when the process at
    its other end does; then the socket is thrown away with whatever waits in it, so that nothing meant for one process
    reaches the next.

    It is `up` from the other side's `answer` to the greeting on; where none is expected, from the first sign of it.

    Args:
        context, poller, at, decode: see `Connection`.
        hello: the greeting.
        answer: the kind of message that answers it.
        keeps: what waits in the socket is for the next process as well. Messages are taken before it is up, too.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller | None,
        at: Address,
        *,
        hello: Message | None = None,
        answer: type[Message] | None = None,
        keeps: bool = False,
        decode: Callable[[bytes], Any] = decode,
    ) -> None:
        self.up = False
        self._hello = hello
        self._answer = answer
        self._greeted = False
        self._keeps = keeps
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        super().__init__(context, poller, at, events, decode)

    def _open(self) -> None:
        super()._open()
        if not self._keeps:
            self._greet()  # the first in a new socket

    def send(self, message: Message) -> bool:
        """Send; false if it is not up, and the message is dropped."""
        if not (self.up or self._keeps):
            log.info("%s is not there to be sent a %s", self.at.name, type(message).__name__)
            return False
        self.send_frames(encode(message))
        return True

    def ended(self) -> bool:
        """Whether the connection has ended since the last call; then another is being made."""
        ended = False
        while self.monitor.poll(0):
            ended |= self._event(recv_monitor_message(self.monitor)["event"])
        return ended

    def close(self, linger: int = 0) -> None:
        """Close both sockets."""
        self.up = False
        super().close(linger)

    def _greet(self) -> None:
        if self._hello is not None:
            self._greeted = True
            self.send_frames(encode(self._hello))

    def _event(self, event: int) -> bool:
        """Whether the connection has ended with it."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._keeps:
                self._greet()
            self.up = self.up or self._answer is None
            return False
        self.up = False
        if not self._keeps:
            self.close()
            self._open()
        return True

    def _read(self, frames: list[Any]) -> AnyMessage | None:
        message = super()._read(frames)
        if self._answer is None:
            self.up = True
        elif isinstance(message, self._answer):
            if not self._greeted:
                # ZeroMQ has connected to a new process before we heard that the old one is gone. It was sent something
                # by us and does not know whom to answer; what it was sent is sent again when it has answered.
                self._greet()
                return None
            self._greeted, self.up = False, True
        return message


class AsyncPeer(Peer):
    """A peer in the event loop that it is made in.

    Args:
        context, at, hello, answer, keeps, decode: see `Peer`.
        on_message: called with each message.
        on_up: called when it is up, with the answer to the greeting if one is expected.
        on_down: called when the connection is lost that was up.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        at: Address,
        *,
        on_message: Callable[[Any], None],
        on_up: Callable[[AnyMessage | None], None] = lambda answer: None,
        on_down: Callable[[], None] = lambda: None,
        hello: Message | None = None,
        answer: type[Message] | None = None,
        keeps: bool = False,
        decode: Callable[[bytes], Any] = decode,
    ) -> None:
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._readers: list[Reader] = []
        super().__init__(context, None, at, hello=hello, answer=answer, keeps=keeps, decode=decode)

    def send_frames(self, *frames: Any, copy: bool = True) -> None:
        """Send, or keep for when the connection is made."""
        super().send_frames(*frames, copy=copy)
        if self._readers:
            self._readers[0].look()

    def close(self, linger: int = 0) -> None:
        """Close both sockets."""
        for reader in self._readers:
            reader.close()
        self._readers = []
        super().close(linger)

    def _open(self) -> None:
        super()._open()
        self._readers = [
            Reader(self.socket, self._take, self._inbox, self.at.name),
            Reader(self.monitor, self._take_event, self._inbox, self.at.name),
        ]

    def _take(self, frames: list[bytes]) -> None:
        was_up = self.up
        message = self._read(frames)
        if message is None:
            return
        if self._answer is not None and isinstance(message, self._answer):
            self._inbox.handle(message, self.at.name, self._on_up, message)
            return
        if self.up and not was_up:
            self._on_up(None)
        self._inbox.handle(message, self.at.name, self._on_message, message)

    def _take_event(self, frames: list[bytes]) -> None:
        was_up = self.up
        if self._event(parse_monitor_message(frames)["event"]):
            if was_up:
                # Whoever keeps what is said meanwhile hears of its end in other ways.
                log.log(
                    logging.DEBUG if self._keeps else logging.WARNING, "%s is gone; waiting for the next", self.at.name
                )
                self._on_down()
        elif self.up and not was_up:
            self._on_up(None)
