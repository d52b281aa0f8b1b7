"""The sockets to the units, one DEALER each.

A connection begins with a greeting and ends when the unit scheduler does; then the socket is thrown away with whatever
waits in it, so that nothing meant for one unit scheduler reaches the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from muxserve.net import sockets
from muxserve.spec import Keys, UnitEntry
from muxserve.wire import Message, SchedulerHello, encode

log = logging.getLogger(__name__)

_RECONNECT_MS = 20


class UnitSocket:
    """The connection to one unit scheduler, opened again when it ends."""

    def __init__(self, context: zmq.Context[Any], epoch: str, address: str, keys: Keys | None) -> None:
        """Open it.

        Raises:
            sockets.NetworkError: the address needs keys, and there are none.
            zmq.ZMQError: it is no address.
        """
        self.address = address
        self.keys = keys
        self._context = context
        self._epoch = epoch
        self._opened = 0
        self._open()

    def _open(self) -> None:
        self._opened += 1
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"scheduler/{self._epoch}".encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        name = f"inproc://unit-{id(self):x}-{self._opened}"
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, name)
        sockets.connect(self.socket, self.address, self.keys)
        self.socket.send(encode(SchedulerHello(self._epoch)), zmq.NOBLOCK)

    def ended(self) -> bool:
        """Whether the connection has ended."""
        while self.monitor.poll(0):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_DISCONNECTED:
                return True
        return False

    def open_again(self) -> None:
        """Begin anew with another socket."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class UnitSockets:
    """Those to all units of the fleet, and what their poller has to do with them.

    Args:
        on_gone: called with the unit's name when a connection has ended.
    """

    def __init__(
        self, context: zmq.Context[Any], poller: zmq.Poller, epoch: str, on_gone: Callable[[str], None]
    ) -> None:
        self._context = context
        self._poller = poller
        self._epoch = epoch
        self._on_gone = on_gone
        self._links: dict[str, UnitSocket] = {}
        self._monitors: dict[Any, str] = {}
        self._sockets: dict[Any, str] = {}

    def change(self, units: Iterable[UnitEntry], keys: Keys | None) -> None:
        """Connect to the units that are new, and let go of those that are gone."""
        wanted = {unit.name: unit.unit_address for unit in units}
        for name, link in list(self._links.items()):
            if wanted.get(name) != link.address or link.keys != keys:
                self._forget(link)
                link.close()
                del self._links[name]
        for name in wanted.keys() - self._links.keys():
            try:
                self._links[name] = UnitSocket(self._context, self._epoch, wanted[name], keys)
            except (sockets.NetworkError, zmq.ZMQError) as error:
                log.error("unit %s cannot be reached: %s", name, error)
            else:
                self._watch(name)

    def send(self, unit: str, message: Message) -> None:
        """Send to a unit scheduler; what it does not take in is lost, since the next round says it again."""
        link = self._links.get(unit)
        if link is None:
            return
        try:
            link.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("unit %s takes in no more messages", unit)

    def readable(self, ready: dict[Any, int]) -> list[tuple[str, zmq.Socket[bytes]]]:
        """Of what the poller found: the units that have sent something. Ended connections are begun anew."""
        for monitor in self._monitors.keys() & ready.keys():
            name = self._monitors[monitor]
            link = self._links[name]
            if link.ended():
                self._forget(link)
                link.open_again()
                self._watch(name)
                self._on_gone(name)
        return [(self._sockets[socket], socket) for socket in self._sockets.keys() & ready.keys()]

    def close(self) -> None:
        """Close all."""
        for link in self._links.values():
            link.close()

    def _watch(self, name: str) -> None:
        link = self._links[name]
        self._sockets[link.socket] = name
        self._monitors[link.monitor] = name
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def _forget(self, link: UnitSocket) -> None:
        del self._sockets[link.socket]
        del self._monitors[link.monitor]
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
