"""What is known of a request on its way in, and whom its move needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from muxserve.migration.tasks import Task
from muxserve.wire import Message


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


class Actions(Protocol):
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
