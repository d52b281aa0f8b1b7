"""Moves to this unit: blocks set aside, pages written, and the request given to the unit scheduler.

No socket and no clock. The one thing asked in between is the memory manager, behind `Store`, whose answers take
microseconds. As long as a move is under way, its blocks are held by this process, so that they are free again when it
dies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.migration.pages import ModelShape
from muxserve.migration.tasks import Buffer, Outcome, Task, TaskFailed, Write
from muxserve.wire import (
    Message,
    MovingIn,
    PeerAbort,
    PeerCommit,
    PeerCommitted,
    PeerOpen,
    PeerOpened,
    PeerPages,
    PeerRefused,
    PeerStaged,
    PeerThere,
    TakenOver,
    TakeOver,
)


class Store(Protocol):
    """This unit's memory manager. `life` is its present one, 0 while it is gone; then every method raises
    `MemoryManagerGone`. All may raise `MemoryManagerError`."""

    life: int
    socket: str

    def reserve(self, model: str, count: int) -> list[int]:
        """That many new blocks, or none if there is no room."""

    def share(self, model: str, key: str, blocks: Sequence[int], seconds: float) -> None:
        """Let whoever knows `key` hold the blocks as well."""

    def hand_off(self, model: str, key: str, blocks: Sequence[int], extra: Sequence[int], seconds: float) -> None:
        """Leave `blocks` to whoever adopts `key`, and let go of them and of `extra`."""

    def release(self, model: str, blocks: Sequence[int]) -> None:
        """Let go of blocks."""

    def drop(self, model: str, key: str) -> None:
        """Give a hand-off up, if it is still there."""


class IncomingEffects(Protocol):
    """What a move can bring about."""

    def tell_unit(self, message: Message) -> bool:
        """Send to this unit's scheduler; false if it is not there."""

    def unit_there(self) -> bool:
        """Whether a unit scheduler has answered our greeting."""

    def answer(self, peer: bytes, message: Message) -> bool:
        """Send to another migrator; false if it is not there any more."""

    def start(self, task: Task) -> None:
        """Do this after everything that was started before; the outcome comes back."""


@dataclass(slots=True)
class Arrival:
    """One request on its way in. `until`: blocks up to there are written, as its sender says. `pending`: up to where
    writing was asked to be acknowledged, with the number of the last write before it."""

    move: str
    peer: bytes
    unit: str
    epoch: str
    model: str
    life: int
    heard: float
    looked: float
    blocks: list[int] = field(default_factory=list)
    until: int = 0
    shares: list[str] = field(default_factory=list)
    writes: int = 0
    written: int = 0
    pending: list[tuple[int, int]] = field(default_factory=list)
    # Set when it has been given to the unit scheduler.
    key: str = ""
    given: float = math.inf
    over: bool = False


# How long a silent side counts as alive, and how often it is looked whether its connection is there.
SILENCE_SECONDS = 10.0
LOOK_SECONDS = 1.0
# The time limit of the unit scheduler's answer to `TakeOver`, seconds.
TAKE_OVER_SECONDS = 2.0
# How long blocks wait for the decode engine, and for the other migrator to hold them as well.
HAND_OFF_SECONDS = 120.0
SHARE_SECONDS = 10.0


class Incoming:
    """All moves to this unit.

    Args:
        machine: see `PeerOpened`.
    """

    def __init__(
        self,
        shapes: Mapping[str, ModelShape],
        ranks: int,
        machine: str,
        store: Store,
        effects: IncomingEffects,
    ) -> None:
        self.arrivals: dict[str, Arrival] = {}
        self._shapes = shapes
        self._ranks = ranks
        self._machine = machine
        self._store = store
        self._effects = effects
        self._ending: dict[tuple[bytes, str], Arrival] = {}
        self._shown: dict[str, int] | None = None

    # ------------------------------------------------------------ the other migrator

    def heard(self, peer: bytes, message: Message, now: float, data: Buffer | None = None) -> None:
        """A message of another migrator, which ZeroMQ knows as `peer`."""
        if isinstance(message, PeerOpen):
            self._open(peer, message, now)
            return
        arrival = self.arrivals.get(getattr(message, "move", ""))
        if arrival is None or arrival.peer != peer:
            if isinstance(message, (PeerStaged, PeerCommit)):
                self._effects.answer(peer, PeerRefused(message.move, "the move is over"))
            return
        arrival.heard = now
        match message:
            case PeerPages():
                self._pages(arrival, message, data)
            case PeerStaged():
                if message.until > len(arrival.blocks):
                    self._refuse(arrival, f"{message.until} blocks were not set aside")
                elif arrival.written == arrival.writes:
                    self._acknowledge(arrival, message.until)
                else:
                    arrival.pending.append((message.until, arrival.writes))
            case PeerCommit():
                self._commit(arrival, message, now)
            case PeerAbort():
                if not arrival.key:
                    self._end(arrival)

    def _open(self, peer: bytes, message: PeerOpen, now: float) -> None:
        arrival = self.arrivals.get(message.move)
        if arrival is None:
            for old in [a for a in self.arrivals.values() if a.unit == message.unit and a.epoch != message.epoch]:
                self._give_up(old, "its migrator has started anew")
            shape = self._shapes.get(message.model)
            reason = ""
            if shape is None:
                reason = f"this unit has no model {message.model!r}"
            elif shape.layout != message.layout:
                reason = f"{message.model!r} has its KV as {shape.layout} here, and as {message.layout} there"
            elif (peer, message.move) in self._ending:
                reason = "the move is over"
            elif not self._effects.unit_there():
                reason = "the unit scheduler is not there"
            if reason:
                self._effects.answer(peer, PeerRefused(message.move, reason))
                return
            arrival = Arrival(
                message.move, peer, message.unit, message.epoch, message.model, self._store.life, now, now
            )
            self.arrivals[message.move] = arrival
        elif arrival.peer != peer or arrival.key:
            self._effects.answer(peer, PeerRefused(message.move, "the move is another's", uncertain=bool(arrival.key)))
            return
        arrival.heard = now
        key = ""
        blocks: list[int] = []
        try:
            if message.blocks:
                blocks = self._store.reserve(arrival.model, message.blocks)
                if not blocks:
                    self._refuse(arrival, f"there is no room for {message.blocks} more blocks of {arrival.model!r}")
                    return
                arrival.blocks += blocks
                if message.machine == self._machine:
                    key = f"{message.move}/{len(arrival.shares)}"
                    arrival.shares.append(key)
                    self._store.share(arrival.model, key, blocks, SHARE_SECONDS)
        except MemoryManagerError as error:
            self._refuse(arrival, f"the memory manager refused: {error}")
            return
        except MemoryManagerGone:
            self.memory_lost()
            return
        opened = PeerOpened(message.move, blocks, self._machine, self._store.socket, self._store.life, key)
        if not self._effects.answer(peer, opened):
            self._end(arrival)
        self._show()

    def _pages(self, arrival: Arrival, message: PeerPages, data: Buffer | None) -> None:
        end, states = message.since + message.blocks, self._shapes[arrival.model].state_blocks
        if arrival.key or data is None:
            self._refuse(arrival, "pages came at the wrong time")
        elif not (0 <= message.since < end <= len(arrival.blocks) and 0 <= message.rank < self._ranks):
            self._refuse(arrival, "pages came for blocks that were not set aside")
        elif message.since < states < end or len(arrival.blocks) < states:
            self._refuse(arrival, "pages of a state came with others")
        elif data.size != message.blocks * self._shapes[arrival.model].block_bytes:
            self._refuse(arrival, f"{data.size} bytes are not {message.blocks} blocks of {arrival.model!r}")
        else:
            arrival.writes += 1
            part = (message.since, end) if end <= states else None
            blocks = tuple(arrival.blocks[message.since : end] if part is None else arrival.blocks[:states])
            self._effects.start(
                Write(arrival.peer, arrival.move, arrival.model, message.rank, blocks, arrival.life, data, part)
            )

    def _acknowledge(self, arrival: Arrival, until: int) -> None:
        arrival.until = max(arrival.until, until)
        if not self._effects.answer(arrival.peer, PeerStaged(arrival.move, until)):
            self._end(arrival)

    def _commit(self, arrival: Arrival, message: PeerCommit, now: float) -> None:
        request = message.request
        shape = self._shapes[arrival.model]
        count = shape.state_blocks - (-request.computed_tokens // shape.block_tokens)
        if arrival.key:
            return
        there = shape.state_blocks < count <= arrival.until and arrival.written == arrival.writes
        if request.request.model != arrival.model or not there:
            self._refuse(arrival, f"{count} blocks were to be handed over, and {arrival.until} are here")
            return
        try:
            extra = arrival.blocks[count:]
            self._store.hand_off(arrival.model, arrival.move, arrival.blocks[:count], extra, HAND_OFF_SECONDS)
            # From here on the hand-off has the blocks, and whatever goes wrong, that is what is to be given up.
            arrival.key, arrival.given, arrival.blocks = arrival.move, now, []
            if arrival.writes:  # pages were sent, so the other side has not taken the shared ones
                self._unshare(arrival)
        except MemoryManagerError as error:
            self._refuse(arrival, f"the memory manager refused: {error}")
            return
        except MemoryManagerGone:
            arrival.key = ""  # nobody has heard of it
            self.memory_lost()
            return
        if not self._effects.tell_unit(TakeOver(arrival.move, arrival.key, count, request)):
            self._refuse(arrival, "the unit scheduler is not there")

    # ------------------------------------------------------------ the unit scheduler

    def taken_over(self, message: TakenOver) -> None:
        """The unit scheduler has the request, or does not want it."""
        arrival = self.arrivals.get(message.move)
        if arrival is None or not arrival.key:
            return
        if message.reason:
            self._refuse(arrival, message.reason)
            return
        del self.arrivals[arrival.move]
        self._effects.answer(arrival.peer, PeerCommitted(arrival.move))
        self._show()

    def unit_lost(self) -> None:
        """The unit scheduler is gone, or new."""
        for arrival in list(self.arrivals.values()):
            self._give_up(arrival, "its unit scheduler has started anew")
        self._shown = None

    def memory_lost(self) -> None:
        """The memory manager died, and nothing is held any more. What was given to the unit scheduler is its affair."""
        for arrival in [a for a in self.arrivals.values() if not a.key]:
            arrival.blocks = []
            self._refuse(arrival, "the memory manager died")

    # ------------------------------------------------------------ tasks and time

    def outcome(self, task: Write, outcome: Outcome) -> None:
        """Pages are written, or could not be."""
        arrival = self.arrivals.get(task.move)
        if arrival is None or arrival.peer != task.peer:
            self._written_late(task)
            return
        arrival.written += 1
        if isinstance(outcome, TaskFailed):
            self._refuse(arrival, outcome.reason)
            return
        while arrival.pending and arrival.pending[0][1] <= arrival.written and not arrival.over:
            self._acknowledge(arrival, arrival.pending.pop(0)[0])

    def tick(self, now: float) -> None:
        """Give up what is silent, and tell the unit scheduler how many moves there are."""
        for arrival in list(self.arrivals.values()):
            if arrival.key:
                if now - arrival.given > TAKE_OVER_SECONDS:
                    self._give_up(arrival, "its unit scheduler does not answer")
            elif now - arrival.heard > SILENCE_SECONDS:
                self._refuse(arrival, "nothing was heard for too long")
            elif now - arrival.looked >= LOOK_SECONDS:
                arrival.looked = now
                if not self._effects.answer(arrival.peer, PeerThere(arrival.move)):
                    self._end(arrival)
        self._show()

    def wakeup(self) -> float:
        """When `tick` is due although nothing happened."""
        due = math.inf
        for arrival in self.arrivals.values():
            due = min(due, arrival.given + TAKE_OVER_SECONDS if arrival.key else arrival.looked + LOOK_SECONDS)
        return due

    # ------------------------------------------------------------ the end

    def _give_up(self, arrival: Arrival, reason: str) -> None:
        self._refuse(arrival, reason, uncertain=bool(arrival.key))

    def _refuse(self, arrival: Arrival, reason: str, uncertain: bool = False) -> None:
        self._effects.answer(arrival.peer, PeerRefused(arrival.move, reason, uncertain))
        self._end(arrival)

    def _end(self, arrival: Arrival) -> None:
        del self.arrivals[arrival.move]
        arrival.over = True
        if arrival.writes != arrival.written:
            self._ending[arrival.peer, arrival.move] = arrival  # still written to
        else:
            self._let_go(arrival)
        self._show()

    def _written_late(self, task: Write) -> None:
        arrival = self._ending.get((task.peer, task.move))
        if arrival is None:
            return
        arrival.written += 1
        if arrival.written == arrival.writes:
            del self._ending[task.peer, task.move]
            self._let_go(arrival)

    def _let_go(self, arrival: Arrival) -> None:
        if arrival.life != self._store.life:
            return  # the memory manager that had granted them has forgotten them
        try:
            if arrival.key:
                self._store.drop(arrival.model, arrival.key)
            elif arrival.blocks:
                self._store.release(arrival.model, arrival.blocks)
                self._unshare(arrival)  # the other side may have died before it took them
        except (MemoryManagerError, MemoryManagerGone):
            return  # it is gone, or has given them up already

    def _unshare(self, arrival: Arrival) -> None:
        for share in arrival.shares:
            self._store.drop(arrival.model, share)
        arrival.shares.clear()

    def _show(self) -> None:
        moves = dict(Counter(arrival.model for arrival in self.arrivals.values()))
        if moves != self._shown and self._effects.tell_unit(MovingIn(moves)):
            self._shown = moves
