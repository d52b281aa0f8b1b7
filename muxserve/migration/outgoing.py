"""Moves from this unit to others: what is sent when, and what is done when something goes wrong.

No socket, no clock, no page: messages of the unit scheduler and of other migrators and outcomes of tasks come in, with
the time; messages and tasks go out through `OutgoingEffects`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from muxserve.migration.chunks import Chunks, MoveState, OutgoingMove, TokenBucket
from muxserve.migration.pages import ModelShape
from muxserve.migration.tasks import CopyOver, Gather, JoinPool, LeavePool, Outcome, Task, TaskFailed
from muxserve.wire import (
    Message,
    MoveAbort,
    MoveCommit,
    MoveCommitted,
    MoveFailed,
    MoveStage,
    MoveStaged,
    PeerAbort,
    PeerCommit,
    PeerCommitted,
    PeerOpen,
    PeerOpened,
    PeerPages,
    PeerRefused,
    PeerStaged,
)

# The time limit of an answer to the first message of a move, or of a stage that needs more blocks, seconds.
OPEN_SECONDS = 5.0
# The time limit of the other side's word that its unit has the request, seconds.
COMMIT_SECONDS = 5.0
# How long a silent side counts as alive, and how often a side lets hear of itself while nothing moves.
SILENCE_SECONDS = 10.0
SIGN_SECONDS = 2.0
# How long the unit scheduler may take until it wants the next stage: several of an engine's longest steps.
IDLE_SECONDS = 30.0


class OutgoingEffects(Protocol):
    """What a move can bring about."""

    def tell_unit(self, message: Message) -> object:
        """Send to this unit's scheduler."""

    def tell_peer(self, address: str, message: Message, pages: object = None) -> None:
        """Send to the migrator at `address`, with a frame of pages if there is one."""

    def start(self, task: Task) -> None:
        """Do this after everything that was started before; the outcome comes back."""


class Outgoing:
    """All moves from this unit.

    Args:
        unit: the unit's name; epoch: this migrator's.
        machine: see `PeerOpened`.
    """

    def __init__(
        self,
        unit: str,
        epoch: str,
        machine: str,
        shapes: Mapping[str, ModelShape],
        ranks: int,
        bandwidth: TokenBucket,
        effects: OutgoingEffects,
    ) -> None:
        self.moves: dict[str, OutgoingMove] = {}
        self._unit = unit
        self._epoch = epoch
        self._machine = machine
        self._shapes = shapes
        self._effects = effects
        self._chunks = Chunks(self.moves, shapes, ranks, bandwidth)

    # ------------------------------------------------------------ the unit scheduler

    def stage(self, message: MoveStage, now: float) -> None:
        """The unit scheduler wants blocks copied."""
        move = self.moves.get(message.move)
        if move is None:
            if message.since:
                self._effects.tell_unit(MoveFailed(message.move, "the move is over already"))
                return
            if message.model not in self._shapes:
                self._effects.tell_unit(MoveFailed(message.move, f"this unit has no model {message.model!r}"))
                return
            move = OutgoingMove(message.move, message.model, message.address, message, now, now, now, now)
            self.moves[message.move] = move
        elif move.state is not MoveState.IDLE:
            self._fail(move, "a stage was asked for before the one before was over")
            return
        elif message.since > move.until:
            self._fail(move, f"blocks {move.until} to {message.since - 1} have not been moved")
            return
        states = self._shapes[move.model].state_blocks
        if message.since < states and (message.since or len(message.blocks) < states):
            self._fail(move, "a part of its state was to be moved")
            return
        first = not move.held and not move.until
        move.stage, move.began, move.next, move.done = message, now, message.since, message.since
        move.asked = max(message.reserve, move.end - len(move.held), 0)
        if move.asked or first:
            self._enter(move, MoveState.OPENING, now)
            layout = self._shapes[move.model].layout
            opening = PeerOpen(move.move, self._unit, self._epoch, move.model, layout, move.asked, self._machine)
            self._tell(move, opening, now)
        else:
            self._copy(move, now)

    def commit(self, message: MoveCommit, now: float) -> None:
        """The unit scheduler wants the request handed over."""
        move = self.moves.get(message.move)
        if move is None:
            self._effects.tell_unit(MoveFailed(message.move, "the move is over already"))
        elif move.state is not MoveState.IDLE:
            self._fail(move, "it was to be handed over before its last stage was over")
        else:
            self._leave(move)
            self._enter(move, MoveState.COMMITTING, now)
            self._tell(move, PeerCommit(move.move, message.request), now)

    def abort(self, message: MoveAbort) -> None:
        """The unit scheduler wants the move undone. Once handed over, it is not in our hands."""
        move = self.moves.get(message.move)
        if move is not None and move.state is not MoveState.COMMITTING:
            self._end(move, tell_peer=True)

    def unit_lost(self) -> None:
        """The unit scheduler is gone, or new: nobody wants any of this."""
        for move in list(self.moves.values()):
            self._end(move, tell_peer=move.state is not MoveState.COMMITTING)

    # ------------------------------------------------------------ the other migrator

    def heard(self, address: str, message: Message, now: float) -> None:
        """A message of the migrator at `address`."""
        name = getattr(message, "move", "")
        move = self.moves.get(name)
        if move is None or move.address != address:
            return  # of a move that has ended here
        move.heard = now
        match message:
            case PeerOpened():
                self._opened(move, message, now)
            case PeerStaged():
                self._acknowledged(move, now)
            case PeerCommitted():
                if move.state is MoveState.COMMITTING:
                    del self.moves[move.move]
                    self._effects.tell_unit(MoveCommitted(move.move))
            case PeerRefused():
                self._end(move, tell_peer=False, reason=message.reason, uncertain=message.uncertain)

    def peer_lost(self, address: str, reason: str) -> None:
        """Nobody is at `address` any more."""
        for move in [m for m in self.moves.values() if m.address == address]:
            # It may have handed over the request of an earlier order.
            self._end(move, tell_peer=False, reason=reason, uncertain=move.state is MoveState.COMMITTING)

    def memory_lost(self) -> None:
        """This unit's memory manager died, and with it what its blocks held. What was committed is over there."""
        for move in [m for m in self.moves.values() if m.state is not MoveState.COMMITTING]:
            self._fail(move, "the memory manager died")

    # ------------------------------------------------------------ tasks

    def outcome(self, task: Task, outcome: Outcome, now: float) -> None:
        """A task is done."""
        if isinstance(task, (CopyOver, Gather)):
            self._chunks.done()
        move = self.moves.get(task.move) if isinstance(task, (JoinPool, CopyOver, Gather)) else None
        if move is None:
            return
        if isinstance(outcome, TaskFailed):
            self._fail(move, outcome.reason)
            return
        if isinstance(task, JoinPool):
            move.streamed = not outcome
            self._copy(move, now)
        elif isinstance(task, CopyOver):
            move.done = task.until
            if move.done == move.end:
                # It is written, whatever the other side says; that only has to know how far we are.
                self._tell_staged(move, move.end, now)
                self._staged(move, now)
        elif isinstance(task, Gather):
            assert isinstance(outcome, list)
            for rank, pages in enumerate(outcome):
                self._tell(move, PeerPages(move.move, task.first, task.until - task.first, rank), now, pages)
            self._tell_staged(move, task.until, now, pages=True)

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Start what can be started, and give up what takes too long."""
        for move in list(self.moves.values()):
            self._mind(move, now)
        while (chunk := self._chunks.next(now)) is not None:
            self._effects.start(chunk)

    def wakeup(self, now: float) -> float:
        """When `tick` is due although nothing happened."""
        due = min((move.signed + SIGN_SECONDS for move in self.moves.values()), default=math.inf)
        return min(due, self._chunks.wakeup(now))

    def _mind(self, move: OutgoingMove, now: float) -> None:
        waited = now - move.since
        if move.state is MoveState.OPENING and waited > OPEN_SECONDS:
            self._fail(move, f"no answer from the migrator at {move.address}")
        elif move.state is MoveState.COMMITTING and waited > COMMIT_SECONDS:
            reason = f"the migrator at {move.address} does not say whether its unit has the request"
            self._end(move, tell_peer=False, reason=reason, uncertain=True)
        elif move.state is MoveState.IDLE and waited > IDLE_SECONDS:
            self._fail(move, "the unit scheduler does not go on with it")
        elif move.sent and now - move.heard > SILENCE_SECONDS:
            self._fail(move, f"the migrator at {move.address} is silent")
        elif now - move.signed >= SIGN_SECONDS:
            move.signed = now
            if move.state in (MoveState.JOINING, MoveState.COPYING, MoveState.IDLE):
                self._tell_staged(move, move.until, now)

    # ------------------------------------------------------------ one move

    def _opened(self, move: OutgoingMove, message: PeerOpened, now: float) -> None:
        if move.state is not MoveState.OPENING:
            self._fail(move, "the other migrator has set blocks aside that were not asked for")
            return
        if len(message.blocks) != move.asked:
            self._fail(move, f"the other migrator has set {len(message.blocks)} blocks aside instead of {move.asked}")
            return
        move.held += message.blocks
        if message.machine == self._machine and message.key and not move.streamed:
            self._enter(move, MoveState.JOINING, now)
            self._effects.start(
                JoinPool(
                    move.move,
                    move.model,
                    message.memory_socket,
                    message.generation,
                    message.key,
                    tuple(message.blocks),
                )
            )
            # Whatever comes of it: there may be something to let go of.
            move.joined = True
        else:
            move.streamed = move.streamed or bool(message.blocks)
            self._copy(move, now)

    def _copy(self, move: OutgoingMove, now: float) -> None:
        self._enter(move, MoveState.COPYING, now)
        if move.done == move.end:
            self._staged(move, now)
        else:
            self._chunks.queue(move)

    def _acknowledged(self, move: OutgoingMove, now: float) -> None:
        until = move.sent.popleft() if move.sent else -1
        if until < 0:
            return
        move.window -= 1
        move.done = until
        if move.done == move.end:
            self._staged(move, now)

    def _staged(self, move: OutgoingMove, now: float) -> None:
        move.until = max(move.until, move.end)
        self._enter(move, MoveState.IDLE, now)
        size = len(move.stage.blocks) * self._chunks.block_bytes(move)
        self._effects.tell_unit(MoveStaged(move.move, move.end, now - move.began, size))

    def _enter(self, move: OutgoingMove, state: MoveState, now: float) -> None:
        move.state, move.since = state, now

    def _tell(self, move: OutgoingMove, message: Message, now: float, pages: object = None) -> None:
        move.signed = now
        self._effects.tell_peer(move.address, message, pages)

    def _tell_staged(self, move: OutgoingMove, until: int, now: float, pages: bool = False) -> None:
        if not move.sent:
            move.heard = now  # silence counts from the question
        move.sent.append(until if pages else -1)
        self._tell(move, PeerStaged(move.move, until), now)

    # ------------------------------------------------------------ the end

    def _fail(self, move: OutgoingMove, reason: str) -> None:
        """It went wrong. What was handed over already stays so, whatever comes."""
        committing = move.state is MoveState.COMMITTING
        self._end(move, tell_peer=not committing, reason=reason, uncertain=committing)

    def _end(self, move: OutgoingMove, tell_peer: bool, reason: str = "", uncertain: bool = False) -> None:
        del self.moves[move.move]
        if tell_peer:
            self._effects.tell_peer(move.address, PeerAbort(move.move))
        self._leave(move)
        if reason:
            self._effects.tell_unit(MoveFailed(move.move, reason, uncertain))

    def _leave(self, move: OutgoingMove) -> None:
        # Tasks are done in order: by then nothing is written for the move any more.
        if move.joined:
            self._effects.start(LeavePool(move.move))
            move.joined = False
