"""What is copied next: chunk by chunk, one move after the other, within one limit of bytes per second.

To another machine just enough chunks are under way to keep the network busy; they are acknowledged as written.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Union

from muxserve.migration.pages import ModelShape
from muxserve.migration.tasks import CopyOver, Gather
from muxserve.wire import MoveStage


class TokenBucket:
    """Lets `rate` bytes per second pass, and at most `burst` seconds' worth at once after a pause.

    A piece may begin as soon as anything is left, and is taken off as a whole: pieces of any size pass, and their
    average is kept. A `rate` of 0 is no limit.

    Raises:
        ValueError: a negative rate, or a burst that is not positive.
    """

    def __init__(self, rate: float, burst: float = 0.02) -> None:
        if rate < 0 or burst <= 0:
            raise ValueError(f"rate must not be negative and burst must be positive, not {rate:g} and {burst:g}")
        self.rate = rate
        self._capacity = rate * burst
        self._left = self._capacity
        self._at = -math.inf

    def ready_at(self, now: float) -> float:
        """When the next piece may begin: `now`, or later."""
        if not self.rate:
            return now
        self._fill(now)
        # A hair more than what is missing: at that moment, whatever the rounding, something is left.
        return now if self._left > 0 else now + (-self._left + 1.0) / self.rate

    def take(self, size: int, now: float) -> None:
        """A piece of `size` bytes begins."""
        if self.rate:
            self._fill(now)
            self._left -= size

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._left = min(self._capacity, self._left + (now - self._at) * self.rate)
            self._at = now


class MoveState(Enum):
    """Where a move stands."""

    OPENING = auto()  # asked the other side for blocks
    JOINING = auto()  # asked the other memory manager
    COPYING = auto()
    IDLE = auto()  # waits for the unit scheduler
    COMMITTING = auto()


@dataclass(slots=True)
class OutgoingMove:
    """One request on its way out.

    `held` are its blocks over there. In this stage, copies of blocks up to number `next` have begun, and those up to
    `done` are written; all stages together have blocks up to `until`. `sent` has, for each `PeerStaged` that was not
    answered yet, up to where pages were sent before it, or -1 where none were. `window` counts chunks begun and not
    acknowledged.
    """

    move: str
    model: str
    address: str
    stage: MoveStage
    began: float
    since: float
    heard: float
    signed: float
    state: MoveState = MoveState.OPENING
    asked: int = 0
    held: list[int] = field(default_factory=list)
    joined: bool = False
    streamed: bool = False
    next: int = 0
    done: int = 0
    until: int = 0
    window: int = 0
    sent: deque[int] = field(default_factory=deque)

    @property
    def end(self) -> int:
        """Number of the block after the stage's last."""
        return self.stage.since + len(self.stage.blocks)


# Bytes of a chunk, over all ranks. Small within a machine, where nothing is gained by more, and engines want their
# share of the memory's bandwidth meanwhile; on a network it must be worth a message.
COPY_BYTES = 1 << 20
SEND_BYTES = 4 << 20
# Chunks on their way to another machine, of one move.
WINDOW = 4
# Chunks given to the worker at a time: one that it does and one that it takes up without a pause.
DEPTH = 2

Chunk = Union[CopyOver, Gather]


class Chunks:
    """The chunks of all moves of a unit.

    Args:
        moves: those that there are, by name; those that have ended are no longer in it.
        shapes: of the models.
        ranks: over how many devices a block is spread.
        bandwidth: how much may leave.
    """

    def __init__(
        self, moves: Mapping[str, OutgoingMove], shapes: Mapping[str, ModelShape], ranks: int, bandwidth: TokenBucket
    ) -> None:
        self._moves = moves
        self._shapes = shapes
        self._ranks = ranks
        self._bandwidth = bandwidth
        self._turns: deque[str] = deque()
        self._running = 0

    def block_bytes(self, move: OutgoingMove) -> int:
        """Bytes of one block, over all ranks."""
        return self._ranks * self._shapes[move.model].block_bytes

    def queue(self, move: OutgoingMove) -> None:
        """The move has a stage to be copied."""
        self._turns.append(move.move)

    def done(self) -> None:
        """A chunk has been carried out, or could not be."""
        self._running -= 1

    def next(self, now: float) -> Chunk | None:
        """The next chunk, which is to be carried out; None if none may begin now."""
        if self._running >= DEPTH or not self._turns or self._bandwidth.ready_at(now) > now:
            return None
        for _ in range(len(self._turns)):
            move = self._moves.get(self._turns.popleft())
            if move is None or move.state is not MoveState.COPYING or move.next == move.end:
                continue
            if move.streamed and move.window >= WINDOW:
                self._turns.append(move.move)
                continue
            return self._begin(move, now)
        return None

    def wakeup(self, now: float) -> float:
        """When there may be a next one although nothing happened."""
        if self._turns and self._running < DEPTH:
            ready = self._bandwidth.ready_at(now)
            if ready > now:
                return ready
        return math.inf

    def _begin(self, move: OutgoingMove, now: float) -> Chunk:
        per_block = self.block_bytes(move)
        count = max(1, (SEND_BYTES if move.streamed else COPY_BYTES) // per_block)
        first, last = move.next, min(move.next + count, move.end)
        states = self._shapes[move.model].state_blocks
        part = None
        if first < states:
            last = min(last, states)
            part, ours, theirs = (first, last), move.stage.blocks[:states], move.held[:states]
        else:
            since = move.stage.since
            ours, theirs = move.stage.blocks[first - since : last - since], move.held[first:last]
        self._bandwidth.take((last - first) * per_block, now)
        self._running += 1
        move.next = last
        if last < move.end:
            self._turns.append(move.move)
        if move.streamed:
            move.window += 1
            return Gather(move.move, move.model, first, last, tuple(ours), part)
        whole = last - first == len(move.stage.blocks)
        return CopyOver(move.move, move.model, last, tuple(ours), tuple(theirs), whole, part)
