"""A gateway's connections to everyone in the fleet, opened and ended as the fleet changes, and the socket to which the
engines of all units push its tokens."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import zmq

from muxserve.net.inbox import Inbox
from muxserve.net.peer import Address, AsyncPeer
from muxserve.net.reader import Reader
from muxserve.net.sockets import NetworkError, bind_local, bind_tcp, tcp_address
from muxserve.spec import FleetSpec, Keys, UnitEntry
from muxserve.wire import AnyMessage, GatewayHello, Message, TokensHeader, UnitHello, decode

log = logging.getLogger(__name__)

LINGER_MS = 200


class TokensSocket:
    """Takes the tokens meant for this gateway process.

    Args:
        context: of the socket.
        epoch: this gateway process.
        address: for engines of this machine, `ipc://...`.
        on_tokens: called with each token message: header, and the frames of vLLM's encoding.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        epoch: str,
        address: str,
        on_tokens: Callable[[TokensHeader, list[bytes]], None],
    ) -> None:
        self.address = address
        self.tcp_address = ""
        self._context = context
        self._inbox = Inbox(log, decode)
        self._epoch = epoch
        self._on_tokens = on_tokens
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: Reader | None = None

    def start(self) -> None:
        """Open the socket; must be called in the event loop.

        Raises:
            zmq.ZMQError: the address cannot be bound.
            muxserve.net.sockets.NetworkError: the run's secret cannot be read.
        """
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = 0
        Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        bind_local(self._socket, self.address)
        self._reader = Reader(self._socket, self._take, self._inbox, "an engine")

    def open_tcp(self, host: str, keys: Keys) -> str:
        """Let engines of other machines in as well; the address under which they reach it.

        Raises:
            muxserve.net.sockets.NetworkError: `host` is no address of this machine.
        """
        if not self.tcp_address:
            assert self._socket is not None
            self.tcp_address = tcp_address(host, bind_tcp(self._socket, host, 0, keys))
        return self.tcp_address

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None and self._reader is not None:
            self._reader.close()
            self._socket.close(linger=0)
            self._socket = None

    def _take(self, frames: list[bytes]) -> None:
        header = self._inbox.read(frames[0], "an engine")
        if header is None:
            return
        if not isinstance(header, TokensHeader):
            self._inbox.drop("unexpected", f"unexpected {type(header).__name__} among the tokens")
        elif header.gateway_epoch == self._epoch:
            self._on_tokens(header, frames[1:])


class Listener(Protocol):
    """Hears what becomes of connections, and what comes over them."""

    def unit_up(self, unit: str, epoch: str) -> None:
        """A unit scheduler has greeted."""

    def unit_down(self, unit: str) -> None:
        """It is gone, or has left the fleet."""

    def unit_said(self, unit: str, message: Message) -> None:
        """A unit scheduler has said something."""

    def scheduler_up(self) -> None:
        """The global scheduler is there."""

    def scheduler_down(self) -> None:
        """It is gone, or not needed any more."""

    def scheduler_said(self, message: Message) -> None:
        """The global scheduler has said something."""


class FleetLinks:
    """To all unit schedulers, and to the global scheduler where there is something to choose.

    Args:
        tokens: where engines send tokens to; units get its address.
        index: which of the fleet's gateways this is.
        epoch: this process.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], tokens: TokensSocket, index: int, epoch: str, listener: Listener
    ) -> None:
        self.units: dict[str, AsyncPeer] = {}
        self.scheduler: AsyncPeer | None = None
        self._context = context
        self._tokens = tokens
        self._index = index
        self._epoch = epoch
        self._listener = listener

    def learn(self, fleet: FleetSpec) -> NetworkError | None:
        """The fleet has changed: link the units that are new, and leave those that are gone. Returns why a unit of
        another machine cannot be linked, if one cannot; all others are."""
        addresses = {unit.name: unit.unit_address for unit in fleet.units}
        for name, link in list(self.units.items()):
            if addresses.get(name) != link.at.address:
                log.info("unit %s is gone from the fleet", name)
                link.close(LINGER_MS)
                del self.units[name]
                self._listener.unit_down(name)
        unreachable: NetworkError | None = None
        for unit in fleet.units:
            if unit.name not in self.units:
                try:
                    self._open(unit, fleet)
                except NetworkError as error:  # the others are reached all the same
                    unreachable = error
        self._learn_scheduler(fleet)
        return unreachable

    def close(self) -> None:
        """Close all."""
        for link in self.units.values():
            link.close(LINGER_MS)
        if self.scheduler is not None:
            self.scheduler.close(LINGER_MS)

    def _open(self, unit: UnitEntry, fleet: FleetSpec) -> None:
        name, reply_to = unit.name, self._tokens.address
        if unit.remote and fleet.keys is not None:
            reply_to = self._tokens.open_tcp(fleet.tokens_host, fleet.keys)
        self.units[name] = AsyncPeer(
            self._context,
            Address(f"the unit scheduler of {name}", unit.unit_address, f"gateway/{self._epoch}", fleet.keys),
            hello=GatewayHello(self._epoch, reply_to, self._index, os.getpid()),
            answer=UnitHello,
            on_up=partial(self._unit_up, name),
            on_down=partial(self._listener.unit_down, name),
            on_message=partial(self._listener.unit_said, name),
        )

    def _unit_up(self, name: str, answer: AnyMessage | None) -> None:
        assert isinstance(answer, UnitHello)
        self._listener.unit_up(name, answer.epoch)

    def _learn_scheduler(self, fleet: FleetSpec) -> None:
        wanted = fleet.needs_scheduler
        if wanted and self.scheduler is None:
            self.scheduler = AsyncPeer(
                self._context,
                Address("the global scheduler", fleet.scheduler_address, f"gateway/{self._epoch}"),
                on_up=lambda _: self._listener.scheduler_up(),
                on_down=self._listener.scheduler_down,
                on_message=self._listener.scheduler_said,
            )
        elif not wanted and self.scheduler is not None:
            self.scheduler.close(LINGER_MS)
            self.scheduler = None
            self._listener.scheduler_down()
