"""A gateway's connections to unit schedulers and to the global scheduler.

A connection ends when the process at its other end does; then the socket is thrown away with whatever waits in it, so
that nothing meant for one process reaches the next.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from muxserve.gateway.reader import Reader
from muxserve.net.inbox import Inbox
from muxserve.net.sockets import connect
from muxserve.spec import Keys
from muxserve.wire import GatewayHello, Message, UnitHello, decode, encode

log = logging.getLogger(__name__)

RECONNECT_MS = 20
LINGER_MS = 200

_numbers = itertools.count()


class Link:
    """A connection that is made again whenever it is lost.

    Args:
        context: of the socket.
        name: whom it reaches, for the log.
        epoch: this gateway process.
        address: of the other side's ROUTER.
        keys: the fleet's; needed for TCP only.
        on_down: called when the connection is lost that was up.
        on_message: called with each message of the other side.
    """

    # What ZeroMQ is to tell of the connection.
    _EVENTS = zmq.EVENT_DISCONNECTED

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        epoch: str,
        address: str,
        keys: Keys | None,
        on_down: Callable[[], None],
        on_message: Callable[[Message], None],
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.address = address
        self.up = False
        self._context = context
        self._inbox = Inbox(log, decode)
        self._keys = keys
        self._on_down = on_down
        self._on_message = on_message
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._readers: list[Reader] = []

    def start(self) -> None:
        """Begin to connect; must be called in the event loop.

        Raises:
            NetworkError: the address is on another machine, and there are no keys; the sockets are to be closed.
        """
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"gateway/{self.epoch}".encode())
        socket.sndhwm = socket.rcvhwm = 0
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._monitor = socket.get_monitor_socket(self._EVENTS, f"inproc://events-{next(_numbers)}")
        self._readers = [
            Reader(socket, self._take, self._inbox, self.name),
            Reader(self._monitor, self._take_event, self._inbox, self.name),
        ]
        connect(socket, self.address, self._keys)
        self._greet()

    def send(self, message: Message) -> None:
        """Send to the other side; the link must be `up`, else the message is dropped."""
        if not self.up:
            log.warning("%s is not there to be sent a %s", self.name, type(message).__name__)
            return
        self._send(message)

    def close(self, linger: int = LINGER_MS) -> None:
        """Close the sockets; what was just sent still goes out if it can within `linger` milliseconds."""
        for reader in self._readers:
            reader.close()
        self._readers = []
        if self._socket is not None:
            self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(linger=0)
            self._socket.close(linger=linger)
            self._socket = None
        self.up = False

    def _send(self, message: Message) -> None:
        if self._socket is not None:
            self._socket.send(encode(message), zmq.NOBLOCK)
            self._readers[0].look()

    def _greet(self) -> None:
        """The socket is new."""

    def _event(self, event: int) -> None:
        """ZeroMQ tells another of `_EVENTS`."""

    def _heard(self, message: Message) -> None:
        self._on_message(message)

    def _take_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event != zmq.EVENT_DISCONNECTED:
            self._event(event)
            return
        was_up = self.up
        self.close(linger=0)
        self.start()
        if was_up:
            log.warning("%s is gone; waiting for the next", self.name)
            self._on_down()

    def _take(self, frames: list[bytes]) -> None:
        message = self._inbox.read(frames[-1], self.name)
        if message is not None:
            self._inbox.handle(message, self.name, self._heard, message)


class UnitLink(Link):
    """To one unit scheduler. It is up between the unit scheduler's answer to the greeting and the end of either.

    Args:
        reply_to: where engines of the unit reach this gateway with tokens.
        on_up: called with the unit scheduler's epoch when it has answered the greeting.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        unit: str,
        epoch: str,
        gateway: int,
        address: str,
        reply_to: str,
        keys: Keys | None,
        on_up: Callable[[str], None],
        on_down: Callable[[], None],
        on_message: Callable[[Message], None],
    ) -> None:
        super().__init__(context, f"the unit scheduler of {unit}", epoch, address, keys, on_down, on_message)
        self.unit = unit
        self._hello = GatewayHello(epoch, reply_to, gateway)
        self._on_up = on_up
        self._greeted = False

    def _greet(self) -> None:
        self._greeted = True
        self._send(self._hello)

    def _heard(self, message: Message) -> None:
        if not isinstance(message, UnitHello):
            self._on_message(message)
        elif self._greeted:
            self._greeted = False
            self.up = True
            self._on_up(message.epoch)
        else:
            # ZeroMQ has connected to a new unit scheduler before we heard that the old one is gone. It was sent
            # something by us and does not know whom to answer; what it was sent is sent again when it has answered.
            self._greet()


class SchedulerLink(Link):
    """To the global scheduler, which needs no greeting.

    Args:
        on_up: called when it can be asked.
    """

    _EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        epoch: str,
        address: str,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        on_message: Callable[[Message], None],
    ) -> None:
        super().__init__(context, "the global scheduler", epoch, address, None, on_down, on_message)
        self._on_up = on_up

    def _event(self, event: int) -> None:
        self.up = True
        self._on_up()
