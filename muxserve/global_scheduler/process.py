"""The global scheduler process: `python -m muxserve.global_scheduler.process --fleet PATH`.

A ROUTER for gateways and the controller, a peer per unit, and a loop around `SchedulerCore`: it takes in every message
that is there, decides once, and sends. SIGHUP: the fleet file is another one. SIGTERM: leave.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time

import zmq

from muxserve.global_scheduler.core import SchedulerCore
from muxserve.global_scheduler.outbox import Destination, ToClient, ToUnit
from muxserve.net.heartbeat import heartbeat_file
from muxserve.net.peer import Address, Peer
from muxserve.net.process import Signals
from muxserve.net.server import RouterLoop, ServerProgram
from muxserve.net.sockets import NetworkError
from muxserve.spec import FleetSpec, load_fleet
from muxserve.wire import Message, SchedulerHello

log = logging.getLogger("muxserve.global_scheduler")


class GlobalSchedulerServer:
    """The sockets and the loop.

    Args:
        path: the fleet file, read again at SIGHUP.

    Raises:
        zmq.ZMQError: the address of the global scheduler cannot be bound.
        PriorityError: the fleet's priority levels contradict each other.
    """

    def __init__(self, fleet: FleetSpec, path: str, signals: Signals) -> None:
        self._path = path
        self._epoch = secrets.token_hex(8)
        self._core = SchedulerCore(fleet, self._epoch, time.monotonic())
        heartbeat = heartbeat_file(fleet.run_dir, "scheduler")
        self._loop = RouterLoop(signals, heartbeat, fleet.scheduler_address, on_hangup=self._read_again)
        self._units: dict[str, Peer] = {}
        self._connect(fleet)
        log.info("%d models in %d units, epoch %s", len(fleet.models), len(fleet.units), self._epoch)

    def run(self) -> None:
        """Serve until SIGTERM."""
        loop, core = self._loop, self._core
        while (ready := loop.wait(core.wakeup())) is not None:
            for name, unit in list(self._units.items()):
                if unit.socket in ready:
                    for message in unit.messages():
                        self._take_in(ToUnit(name), message)
                if unit.monitor in ready and unit.ended():
                    core.unit_gone(name, time.monotonic())
            if loop.router in ready:
                for identity, message in loop.messages():
                    self._take_in(ToClient(identity), message)
            for destination, answer in core.tick(time.monotonic()):
                self._send(destination, answer)

    def close(self) -> None:
        """Close all sockets."""
        for unit in self._units.values():
            unit.close()
        self._loop.close()

    def _take_in(self, source: Destination, message: Message) -> None:
        self._loop.inbox.handle(message, source, self._core.handle, source, message, time.monotonic())

    def _send(self, destination: Destination, message: Message) -> None:
        if isinstance(destination, ToClient):
            if not self._loop.send(destination.identity, message):
                log.info("%r is gone, with a %s on its way to it", destination.identity, type(message).__name__)
                self._core.returned(destination, message)
        elif destination.name in self._units:
            # What a unit does not hear is said again in the next round.
            self._units[destination.name].send(message)

    def _read_again(self) -> None:
        try:
            fleet = load_fleet(self._path)
            self._core.change(fleet, time.monotonic())
        except (OSError, ValueError) as error:
            log.error("%s: %s; going on with the one before", self._path, error)
            return
        self._connect(fleet)
        log.info("fleet file %d: %d models in %d units", fleet.generation, len(fleet.models), len(fleet.units))

    def _connect(self, fleet: FleetSpec) -> None:
        """Connect to the units that are new, and let go of those that are gone."""
        wanted = {unit.name: unit.unit_address for unit in fleet.units}
        for name, unit in list(self._units.items()):
            if wanted.get(name) != unit.at.address or unit.at.keys != fleet.keys:
                unit.close()
                del self._units[name]
        for name in wanted.keys() - self._units.keys():
            try:
                self._units[name] = Peer(
                    self._loop.context,
                    self._loop.poller,
                    Address(f"unit {name}", wanted[name], f"scheduler/{self._epoch}", fleet.keys),
                    hello=SchedulerHello(self._epoch),
                )
            except (NetworkError, zmq.ZMQError) as error:
                log.error("unit %s cannot be reached: %s", name, error)


PROGRAM = ServerProgram(
    module="muxserve.global_scheduler.process",
    description="The global scheduler.",
    option="fleet",
    what="a fleet",
    load=load_fleet,
    address=lambda fleet: fleet.scheduler_address,
    make=GlobalSchedulerServer,
    signals=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
