"""The gateway's sockets: messages with the unit scheduler, tokens from the engines.

The sockets are read straight from the event loop, a batch at a time: futures per message, as in `zmq.asyncio`, would
cost more than the messages themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from muxserve.wire import GatewayHello, Message, TokensHeader, UnitHello, decode, encode

log = logging.getLogger(__name__)

# Messages taken from one socket before others get their turn.
BATCH = 64
RECONNECT_MS = 20
LINGER_MS = 200


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


class UnitLink:
    """One gateway's connection to its unit.

    A connection to the unit scheduler begins with greetings and ends when the unit scheduler does; then the socket is
    thrown away with whatever waits in it, so that nothing meant for one unit scheduler reaches the next.

    Args:
        epoch: this gateway process.
        unit_address: ZeroMQ ROUTER of the unit scheduler.
        gateway_address: where to take tokens from the engines.
        on_up: called with the unit scheduler's epoch when it has answered the greeting.
        on_down: called when the connection is lost.
        on_message: called with each other message of the unit scheduler.
        on_tokens: called with each token message: header, and the frames of vLLM's encoding.
    """

    def __init__(
        self,
        epoch: str,
        unit_address: str,
        gateway_address: str,
        *,
        on_up: Callable[[str], None],
        on_down: Callable[[], None],
        on_message: Callable[[Message], None],
        on_tokens: Callable[[TokensHeader, list[bytes]], None],
    ) -> None:
        self.epoch = epoch
        self.up = False
        self._unit_address = unit_address
        self._gateway_address = gateway_address
        self._on_up = on_up
        self._on_down = on_down
        self._on_message = on_message
        self._on_tokens = on_tokens
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._unit: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._connections = 0
        self._readers: list[Reader] = []
        self._tokens_reader: Reader | None = None
        self._tokens: zmq.Socket[bytes] | None = None

    def start(self) -> None:
        """Open the sockets; must be called in the event loop.

        Raises:
            zmq.ZMQError: the address for tokens cannot be bound.
        """
        self._tokens = self._context.socket(zmq.PULL)
        self._tokens.rcvhwm = 0
        if self._gateway_address.startswith("ipc://"):
            Path(self._gateway_address.removeprefix("ipc://")).unlink(missing_ok=True)
        self._tokens.bind(self._gateway_address)
        self._tokens_reader = Reader(self._tokens, self._take_tokens)
        self._connect()

    def send(self, message: Message) -> None:
        """Send to the unit scheduler; it must be `up`, else the message is dropped."""
        if self._unit is None or not self.up:
            log.warning("no unit scheduler to send a %s to", type(message).__name__)
            return
        self._unit.send(encode(message), zmq.NOBLOCK)
        self._readers[0].look()

    def close(self) -> None:
        """Close all sockets; what was just sent still goes out if it can within a moment."""
        self._disconnect(LINGER_MS)
        if self._tokens is not None and self._tokens_reader is not None:
            self._tokens_reader.close()
            self._tokens.close(linger=0)
        self._context.term()

    def _connect(self) -> None:
        unit = self._context.socket(zmq.DEALER)
        unit.setsockopt(zmq.IDENTITY, f"gateway/{self.epoch}".encode())
        unit.sndhwm = unit.rcvhwm = 0
        unit.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._connections += 1
        self._monitor = unit.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://unit-events-{self._connections}")
        self._readers = [Reader(unit, self._take_message), Reader(self._monitor, self._take_event)]
        unit.connect(self._unit_address)
        unit.send(encode(GatewayHello(self.epoch, self._gateway_address)), zmq.NOBLOCK)
        self._unit = unit

    def _disconnect(self, linger: int) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []
        if self._unit is not None:
            self._unit.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(linger=0)
            self._unit.close(linger=linger)
            self._unit = None
        self.up = False

    def _take_event(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] != zmq.EVENT_DISCONNECTED:
            return
        was_up = self.up
        self._disconnect(linger=0)
        self._connect()
        if was_up:
            log.warning("the unit scheduler is gone; waiting for the next")
            self._on_down()

    def _take_message(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[-1])
        except msgspec.DecodeError as error:
            log.warning("not a message of ours from the unit scheduler: %s", error)
            return
        if isinstance(message, UnitHello):
            self.up = True
            self._on_up(message.epoch)
        else:
            self._on_message(message)

    def _take_tokens(self, frames: list[bytes]) -> None:
        try:
            header = decode(frames[0])
        except msgspec.DecodeError as error:
            log.warning("not a token message: %s", error)
            return
        if not isinstance(header, TokensHeader):
            log.warning("unexpected %s among the tokens", type(header).__name__)
        elif header.gateway_epoch == self.epoch:
            self._on_tokens(header, frames[1:])
