"""What is known of a request on its way out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from muxserve.wire import MoveStage


class State(Enum):
    """Where a move stands."""

    OPENING = auto()  # asked the other side for blocks
    JOINING = auto()  # asked the other memory manager
    COPYING = auto()
    IDLE = auto()  # the unit scheduler's turn
    COMMITTING = auto()


@dataclass(slots=True)
class Move:
    """One request on its way out.

    `held` are its blocks over there. Of the stage, blocks up to number `next` have been begun and up to `done` are
    written; up to `until` they are of all stages. `sent` has, for each `PeerStaged` that was not answered yet, up to
    where pages were sent before it, or -1 where none were. `window` counts chunks begun and not acknowledged.
    """

    move: str
    model: str
    address: str
    stage: MoveStage
    began: float
    since: float
    heard: float
    signed: float
    state: State = State.OPENING
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
