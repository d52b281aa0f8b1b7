"""The global scheduler process: `python -m muxserve.global_scheduler.process --fleet PATH`.

A ROUTER for gateways and the controller, a DEALER per unit, and a loop around `SchedulerCore`: it takes in every
message that is there, decides once, and sends. SIGHUP: the fleet file is another one. SIGTERM: leave.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import secrets
import signal
import sys
import time
from typing import Any

import msgspec
import zmq

from muxserve.global_scheduler.core import SchedulerCore
from muxserve.global_scheduler.links import UnitSockets
from muxserve.global_scheduler.outbox import Client, Peer, Unit
from muxserve.net import sockets
from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat, heartbeat_file
from muxserve.net.inbox import Inbox
from muxserve.net.process import Signals, die_with_parent, log_to_stderr
from muxserve.spec import FleetSpec, load_fleet
from muxserve.wire import decode, encode

log = logging.getLogger("muxserve.global_scheduler")

# Messages taken in from one socket before others get their turn.
BATCH = 64


class Server:
    """The sockets and the loop.

    Args:
        path: the fleet file, read again when told to.

    Raises:
        zmq.ZMQError: the address of the global scheduler cannot be bound.
        PriorityError: the fleet's priority levels contradict each other.
    """

    def __init__(self, path: str, fleet: FleetSpec, signals: Signals) -> None:
        self._path = path
        self._signals = signals
        self._inbox = Inbox(log, decode)
        epoch = secrets.token_hex(8)
        self._core = SchedulerCore(fleet, epoch, time.monotonic())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 65535)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.RCVHWM, 0)
        # A gateway that is gone is found out when it is answered.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._poller = zmq.Poller()
        sockets.bind_local(self._router, fleet.scheduler_address)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(signals.fileno(), zmq.POLLIN)
        self._units = UnitSockets(self._context, self._poller, epoch, self._gone)
        self._units.change(fleet.units, fleet.keys)
        self._heartbeat = Heartbeat(heartbeat_file(fleet.run_dir, "scheduler"))
        log.info("%d models in %d units, epoch %s", len(fleet.models), len(fleet.units), epoch)

    def run(self) -> None:
        """Serve until SIGTERM."""
        # What exists now stays; looking at it again and again would only lengthen the pauses.
        gc.collect()
        gc.freeze()
        while True:
            self._heartbeat.beat()
            wait = min(max(self._core.wakeup() - time.monotonic(), 0.0), PERIOD_SECONDS)
            ready = dict(self._poller.poll(math.ceil(wait * 1000)))
            if self._signals.fileno() in ready:
                signals = self._signals.take()
                if signals & {signal.SIGTERM, signal.SIGINT}:
                    log.info("stopped")
                    return
                if signal.SIGHUP in signals:
                    self._read_again()
            for unit, connection in self._units.readable(ready):
                self._take_in(connection, Unit(unit))
            if self._router in ready:
                self._take_in(self._router, None)
            for peer, message in self._core.turn(time.monotonic()):
                if isinstance(peer, Unit):
                    self._units.send(peer.name, message)
                else:
                    try:
                        self._router.send_multipart((peer.identity, encode(message)), zmq.NOBLOCK)
                    except zmq.ZMQError as error:
                        log.info("%r is not there to be told of %s: %s", peer.identity, type(message).__name__, error)
                        self._core.returned(peer, message)

    def close(self) -> None:
        """Close all sockets."""
        self._units.close()
        self._router.close(linger=0)
        self._context.term()

    def _gone(self, unit: str) -> None:
        self._core.unit_gone(unit, time.monotonic())

    def _read_again(self) -> None:
        try:
            fleet = load_fleet(self._path)
            self._core.change(fleet, time.monotonic())
        except (OSError, ValueError) as error:
            log.error("%s: %s; going on with what was in it before", self._path, error)
            return
        self._units.change(fleet.units, fleet.keys)
        log.info("fleet file %d: %d models in %d units", fleet.generation, len(fleet.models), len(fleet.units))

    def _take_in(self, connection: zmq.Socket[Any], unit: Unit | None) -> None:
        for _ in range(BATCH):
            try:
                frames = connection.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer: Peer = unit or Client(frames[0])
            if len(frames) != (1 if unit else 2):
                self._inbox.drop("frames", f"a message of {len(frames)} frames from {peer} ignored")
                continue
            message = self._inbox.read(frames[-1], peer)
            if message is not None:
                self._inbox.handle(message, peer, self._core.handle, peer, message, time.monotonic())


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 stopped, 2 bad input, 3 could not start."""
    parser = argparse.ArgumentParser(
        prog="python -m muxserve.global_scheduler.process", description="The global scheduler."
    )
    parser.add_argument("--fleet", required=True, help="fleet.json, written by the controller")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the process that started this ends")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    options = parser.parse_args(arguments)
    if options.die_with_parent and not die_with_parent():
        return 0
    log_to_stderr(options.log_level)
    # From the first moment on: SIGHUP would end a process that does not expect it.
    signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    try:
        fleet = load_fleet(options.fleet)
    except (OSError, msgspec.DecodeError) as error:
        print(f"{options.fleet}: not a fleet: {error}", file=sys.stderr)
        return 2
    try:
        server = Server(options.fleet, fleet, signals)
    except ValueError as error:
        print(f"{options.fleet}: {error}", file=sys.stderr)
        return 2
    except (zmq.ZMQError, sockets.NetworkError) as error:
        print(f"cannot listen on {fleet.scheduler_address}: {error}", file=sys.stderr)
        return 3
    try:
        server.run()
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
