"""A gateway's connections to everyone in the fleet, opened and ended as the fleet changes."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Protocol

import zmq

from muxserve.gateway.routing.tokens import TokensSocket
from muxserve.net.peer import Address, AsyncPeer
from muxserve.net.sockets import NetworkError
from muxserve.spec import FleetSpec, UnitEntry
from muxserve.wire import AnyMessage, GatewayHello, Message, UnitHello

log = logging.getLogger(__name__)

LINGER_MS = 200


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
