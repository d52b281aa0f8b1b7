"""The migrator process: `python -m muxserve.migration.process --unit-spec PATH`.

One beside each unit scheduler. It moves pages of requests to other units and takes them in; who moves, and when, is the
unit scheduler's to say. Here are the sockets, the memory manager and the worker around `Incoming` and `Outgoing`.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
import time
from typing import Any

import numpy as np
import zmq

from muxserve import spec
from muxserve.migration.chunks import TokenBucket
from muxserve.migration.copy_executor import CopyExecutor, CopyWorker
from muxserve.migration.incoming import Incoming
from muxserve.migration.local_pool import LocalPool
from muxserve.migration.outgoing import Outgoing
from muxserve.migration.pages import HostPages, MakePages, shapes_of
from muxserve.migration.remote_migrators import RemoteMigrators
from muxserve.migration.remote_pools import RemotePools
from muxserve.migration.tasks import CopyOver, Task, Tidy, Write
from muxserve.net.heartbeat import heartbeat_file
from muxserve.net.peer import Address, Peer
from muxserve.net.process import Signals
from muxserve.net.server import RouterLoop, ServerProgram
from muxserve.net.sockets import machine_id
from muxserve.spec import UnitSpec
from muxserve.wire import Message, MigratorHello, MoveAbort, MoveCommit, MoveStage, Reset, TakenOver

log = logging.getLogger("muxserve.migration")

# For tests: what this process takes its machine to be.
MACHINE = "MUXSERVE_MACHINE"
# Copying gives way to engines a little. The last stage of a move is waited for, so not more than that.
NICE = 5
MEMORY_RETRY_SECONDS = 0.05
MEMORY_LOOK_SECONDS = 0.2
TIDY_SECONDS = 30.0
# What was sent last still goes out.
LINGER_MS = 100


class Migrator:
    """One unit's migrator. Implements `OutgoingEffects` and `IncomingEffects`.

    Args:
        machine: other than this machine's id only to have everything sent as if to another one.

    Raises:
        NetworkError, zmq.ZMQError: an address cannot be listened on.
    """

    def __init__(self, unit_spec: UnitSpec, signals: Signals, make_pages: MakePages, machine: str = "") -> None:
        epoch = secrets.token_hex(8)
        name = f"{unit_spec.unit}/{epoch}"
        machine = machine or machine_id()
        shapes, ranks = shapes_of(unit_spec), unit_spec.ranks
        self._local = LocalPool(unit_spec, make_pages)
        self._remote = RemotePools(f"migrator of {unit_spec.unit}"[:128], ranks, make_pages)
        bandwidth = TokenBucket(unit_spec.migration_bandwidth)
        self._outgoing = Outgoing(unit_spec.unit, epoch, machine, shapes, ranks, bandwidth, self)
        self._incoming = Incoming(shapes, ranks, machine, self._local, self)
        listen, keys = unit_spec.listen, unit_spec.keys
        self._loop = RouterLoop(
            signals,
            heartbeat_file(unit_spec.run_dir, "migrator"),
            unit_spec.migrator_address,
            (listen.host, listen.migrator_port, keys) if listen is not None and keys is not None else None,
        )
        context, poller = self._loop.context, self._loop.poller
        hello = MigratorHello(epoch, os.getpid())
        at = Address("the unit scheduler", unit_spec.unit_address, "migrator")
        self._unit = Peer(context, poller, at, hello=hello, answer=Reset)
        self._migrators = RemoteMigrators(context, poller, name, unit_spec.keys)
        self._worker = CopyWorker(CopyExecutor(self._local, self._remote).do, NICE)
        poller.register(self._worker.done_fd, zmq.POLLIN)
        self._memory_at = self._tidy_at = -math.inf
        self._bound = False
        log.info("migrator %s, machine %s", name, machine)

    def run(self) -> None:
        """Serve until SIGTERM."""
        while True:
            now = time.monotonic()
            due = min(self._outgoing.wakeup(now), self._incoming.wakeup(), self._memory_at, self._tidy_at)
            ready = self._loop.wait(now if self._migrators.failed else due)
            if ready is None:
                return
            now = time.monotonic()
            self._mind_memory(now)
            self._take_in(ready, now)
            self._outgoing.tick(now)
            self._incoming.tick(now)
            if now >= self._tidy_at:
                self._tidy_at = now + TIDY_SECONDS
                self._migrators.tidy({move.address for move in self._outgoing.moves.values()})
                self._worker.start(Tidy())

    def close(self) -> None:
        """End what is under way, tell the others, and let go of everything."""
        self._nobody_wants()
        self._worker.close()
        self._remote.close()
        self._local.close()
        self._unit.close()
        self._migrators.close()
        self._loop.close(LINGER_MS)

    # ------------------------------------------------------------ what moves bring about

    def tell_unit(self, message: Message) -> bool:
        """See `OutgoingEffects`."""
        return self._unit.send(message)

    def unit_there(self) -> bool:
        """See `IncomingEffects`."""
        return self._unit.up

    def tell_peer(self, address: str, message: Message, pages: object = None) -> None:
        """See `OutgoingEffects`."""
        self._migrators.send(address, message, pages)

    def answer(self, peer: bytes, message: Message) -> bool:
        """See `IncomingEffects`."""
        return self._loop.send(peer, message)

    def start(self, task: Task) -> None:
        """See `IncomingEffects`."""
        # A stage of one chunk is as a rule a last one, and somebody waits for it.
        self._worker.start(task, at_once=isinstance(task, CopyOver) and task.whole)

    # ------------------------------------------------------------ what is heard

    def _take_in(self, ready: dict[Any, int], now: float) -> None:
        # What somebody said before his connection ended still counts, so messages come before the end.
        handle = self._loop.inbox.handle
        if self._worker.done_fd in ready:
            for task, outcome in self._worker.done():
                if isinstance(task, Write):
                    self._incoming.outcome(task, outcome)
                else:
                    self._outgoing.outcome(task, outcome, now)
        if self._loop.router in ready:
            for peer, message, data in self._loop.messages_with_data():
                # The array keeps the frame; nothing is copied.
                pages = None if data is None else np.frombuffer(data, dtype=np.uint8)
                handle(message, peer, self._incoming.heard, peer, message, now, pages)
        for address, message in self._migrators.messages(ready):
            handle(message, address, self._outgoing.heard, address, message, now)
        for address, reason in self._migrators.lost(ready):
            self._outgoing.peer_lost(address, reason)
        if self._unit.socket in ready:
            for message in self._unit.messages():
                handle(message, self._unit.at.name, self._of_unit, message, now)
        if self._unit.monitor in ready and self._unit.ended():
            log.warning("the unit scheduler is gone")
            self._nobody_wants()

    def _of_unit(self, message: Message, now: float) -> None:
        match message:
            case Reset():
                self._nobody_wants()
                log.info("unit scheduler %s", message.epoch)
            case _ if not self._unit.up:
                return  # of one that has died
            case MoveStage():
                self._outgoing.stage(message, now)
            case MoveCommit():
                self._outgoing.commit(message, now)
            case MoveAbort():
                self._outgoing.abort(message)
            case TakenOver():
                self._incoming.taken_over(message)
            case _:
                log.warning("unexpected %s from the unit scheduler", type(message).__name__)

    def _nobody_wants(self) -> None:
        self._outgoing.unit_lost()
        self._incoming.unit_lost()

    def _mind_memory(self, now: float) -> None:
        if self._local.look():
            self._memory_at = now + MEMORY_LOOK_SECONDS
            return
        if self._bound:
            self._bound, self._memory_at = False, now
            self._incoming.memory_lost()
            self._outgoing.memory_lost()
        if now >= self._memory_at:
            self._bound = self._local.connect()
            self._memory_at = now + (MEMORY_LOOK_SECONDS if self._bound else MEMORY_RETRY_SECONDS)


def pages_for(unit_spec: UnitSpec) -> MakePages:
    """How the pages of the unit's pools are read and written. On GPUs this imports torch."""
    if unit_spec.gpu is None:
        return HostPages
    from muxserve.migration.device_pages import DevicePages

    return DevicePages


def _migrator(unit_spec: UnitSpec, path: str, signals: Signals) -> Migrator:
    return Migrator(unit_spec, signals, pages_for(unit_spec), os.environ.get(MACHINE, ""))


PROGRAM = ServerProgram(
    module="muxserve.migration.process",
    description="The migrator of a unit.",
    option="unit-spec",
    what="a unit's spec",
    load=spec.load,
    address=lambda unit_spec: unit_spec.migrator_address,
    make=_migrator,
)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
