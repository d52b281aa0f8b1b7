"""The migrator: `Incoming` and `Outgoing` with their sockets, their memory manager and their worker."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from typing import Any

import zmq

from muxserve.migration.bandwidth import TokenBucket
from muxserve.migration.copy_executor import Hands, Worker
from muxserve.migration.incoming import Incoming
from muxserve.migration.links import Doorway, PeerLinks, UnitLink
from muxserve.migration.local_pool import Home
from muxserve.migration.outgoing import Outgoing
from muxserve.migration.pages import MakePages, shapes_of
from muxserve.migration.remote_pools import Neighbours
from muxserve.migration.tasks import CopyOver, Outcome, Task, Tidy, Write
from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat, heartbeat_file
from muxserve.net.inbox import Inbox
from muxserve.net.process import Signals
from muxserve.net.sockets import machine_id
from muxserve.spec import UnitSpec
from muxserve.wire import Message, MigratorHello, MoveAbort, MoveCommit, MoveStage, Reset, TakenOver, decode

log = logging.getLogger(__name__)

# Copying gives way to engines a little. The last stage of a move is waited for, so not more than that.
NICE = 5
MEMORY_RETRY_SECONDS = 0.05
MEMORY_LOOK_SECONDS = 0.2
TIDY_SECONDS = 30.0


class Migrator:
    """One unit's migrator.

    Args:
        machine: other than this machine's id only to have everything sent as if to another one.

    Raises:
        NetworkError, zmq.ZMQError: an address cannot be listened on.
    """

    def __init__(self, unit_spec: UnitSpec, make_pages: MakePages, machine: str = "") -> None:
        epoch = secrets.token_hex(8)
        name = f"{unit_spec.unit}/{epoch}"
        machine = machine or machine_id()
        shapes = shapes_of(unit_spec)
        self._home = Home(unit_spec, make_pages)
        self._neighbours = Neighbours(f"migrator of {unit_spec.unit}"[:128], unit_spec.ranks, make_pages)
        actions = _Actions(self)
        bandwidth = TokenBucket(unit_spec.migration_bandwidth)
        self._outgoing = Outgoing(unit_spec.unit, epoch, machine, shapes, unit_spec.ranks, bandwidth, actions)
        self._incoming = Incoming(shapes, unit_spec.ranks, machine, self._home, actions)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 65535)
        self._poller = zmq.Poller()
        self._inbox = Inbox(log, decode)
        self.door = Doorway(self._context, self._poller, self._inbox, unit_spec)
        hello = MigratorHello(epoch, os.getpid())
        self.unit = UnitLink(self._context, self._poller, self._inbox, unit_spec.unit_address, hello)
        self.peers = PeerLinks(self._context, self._poller, self._inbox, name, unit_spec.keys)
        self.worker = Worker(Hands(self._home, self._neighbours).do, NICE)
        self._poller.register(self.worker.done_fd, zmq.POLLIN)
        self._memory_at = self._tidy_at = -math.inf
        self._bound = False
        self._heartbeat = Heartbeat(heartbeat_file(unit_spec.run_dir, "migrator"))
        log.info("migrator %s, machine %s", name, machine)

    def run(self, signals: Signals) -> None:
        """Serve until SIGTERM."""
        self._poller.register(signals.fileno(), zmq.POLLIN)
        while True:
            self._heartbeat.beat()
            now = time.monotonic()
            due = min(self._outgoing.wakeup(now), self._incoming.wakeup(now), self._memory_at, self._tidy_at)
            if self.peers.failed:
                due = now
            wait = min(max(due - now, 0.0), PERIOD_SECONDS)
            ready = dict(self._poller.poll(math.ceil(wait * 1000)))
            if signals.fileno() in ready:
                log.info("stopped")
                return
            now = time.monotonic()
            self._mind_memory(now)
            self._take_in(ready, now)
            self._outgoing.turn(now)
            self._incoming.turn(now)
            if now >= self._tidy_at:
                self._tidy_at = now + TIDY_SECONDS
                self.peers.tidy({move.address for move in self._outgoing.moves.values()})
                self.worker.start(Tidy())

    def close(self) -> None:
        """End what is under way, tell the others, and let go of everything."""
        self._outgoing.unit_lost()
        self._incoming.unit_lost()
        self.worker.close()
        self._neighbours.close()
        self._home.close()
        self.unit.close()
        self.peers.close()
        self.door.close()
        self._context.term()

    def outcome(self, task: Task, outcome: Outcome, now: float) -> None:
        """A task is done."""
        if isinstance(task, Write):
            self._incoming.outcome(task, outcome)
        else:
            self._outgoing.outcome(task, outcome, now)

    def _take_in(self, ready: dict[Any, int], now: float) -> None:
        # What somebody said before his connection ended still counts, so messages come before the end.
        if self.worker.done_fd in ready:
            for task, outcome in self.worker.done():
                self.outcome(task, outcome, now)
        if self.door.socket in ready:
            for peer, message, data in self.door.messages():
                self._inbox.handle(message, peer, self._incoming.heard, peer, message, now, data)
        for address, message in self.peers.messages(ready):
            self._inbox.handle(message, address, self._outgoing.heard, address, message, now)
        for address, reason in self.peers.lost(ready):
            self._outgoing.peer_lost(address, reason, now)
        if self.unit.socket in ready:
            for message in self.unit.messages():
                self._inbox.handle(message, "the unit scheduler", self._of_unit, message, now)
        if self.unit.monitor in ready and self.unit.ended():
            log.warning("the unit scheduler is gone")
            self._nobody_wants()

    def _of_unit(self, message: Message, now: float) -> None:
        if isinstance(message, Reset):
            self._nobody_wants()
            self.unit.greeted = True
            log.info("unit scheduler %s", message.epoch)
            return
        if not self.unit.greeted:
            return  # of one that has died
        match message:
            case MoveStage():
                self._outgoing.stage(message, now)
            case MoveCommit():
                self._outgoing.commit(message, now)
            case MoveAbort():
                self._outgoing.abort(message, now)
            case TakenOver():
                self._incoming.taken_over(message)
            case _:
                log.warning("unexpected %s from the unit scheduler", type(message).__name__)

    def _nobody_wants(self) -> None:
        self._outgoing.unit_lost()
        self._incoming.unit_lost()

    def _mind_memory(self, now: float) -> None:
        if self._home.look():
            self._memory_at = now + MEMORY_LOOK_SECONDS
            return
        if self._bound:
            self._bound, self._memory_at = False, now
            self._incoming.memory_lost()
            self._outgoing.memory_lost()
        if now >= self._memory_at:
            self._bound = self._home.connect()
            self._memory_at = now + (MEMORY_LOOK_SECONDS if self._bound else MEMORY_RETRY_SECONDS)


class _Actions:
    """Implements `outgoing.Actions` and `incoming.Actions`."""

    def __init__(self, migrator: Migrator) -> None:
        self._migrator = migrator

    def tell_unit(self, message: Message) -> bool:
        return self._migrator.unit.send(message)

    def unit_there(self) -> bool:
        return self._migrator.unit.greeted

    def tell_peer(self, address: str, message: Message, pages: object = None) -> None:
        self._migrator.peers.send(address, message, pages)

    def answer(self, peer: bytes, message: Message) -> bool:
        return self._migrator.door.send(peer, message)

    def start(self, task: Task) -> None:
        # A stage of one chunk is as a rule a last one, and somebody waits for it.
        self._migrator.worker.start(task, at_once=isinstance(task, CopyOver) and task.whole)
