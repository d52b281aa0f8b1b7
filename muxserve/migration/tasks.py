"""What the migrator does with pages: carried out one after another, in the order in which they were asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]

# The pages of a state are one sequence in the order of their numbers, whatever block they are in: as engines map them.
# Its blocks go together, and a task has a part of that sequence, as long as those from the first number to the one
# before the second. None: K and V, or latents.
StatePart = Union[tuple[int, int], None]


@dataclass(frozen=True, slots=True)
class JoinPool:
    """Hold the blocks that the other migrator has set aside for `move`, too, so as to write into them.

    Outcome: whether that is possible. It is not where the other memory manager or its pools cannot be reached.
    """

    move: str
    model: str
    memory_socket: str
    generation: int
    key: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyOver:
    """Copy blocks of this unit's pools into blocks that were joined. They are the request's blocks up to number
    `until`; `whole` tells that they are all of their stage. Outcome: none."""

    move: str
    model: str
    until: int
    source: tuple[int, ...]
    destination: tuple[int, ...]
    whole: bool = False
    part: StatePart = None


@dataclass(frozen=True, slots=True)
class Gather:
    """Bring the pages of some blocks together, the first of which has number `first` in the request, and the one after
    the last `until`. Outcome: one `Buffer` per rank, in the order of the page table."""

    move: str
    model: str
    first: int
    until: int
    source: tuple[int, ...]
    part: StatePart = None


@dataclass(frozen=True, slots=True)
class LeavePool:
    """Let go of everything that was joined for `move`. Outcome: none."""

    move: str


@dataclass(frozen=True, slots=True)
class Write:
    """Write pages that came from another machine into blocks held here; `life` is the memory manager's that granted
    them. Outcome: none."""

    peer: bytes
    move: str
    model: str
    rank: int
    blocks: tuple[int, ...]
    life: int
    data: Buffer = field(repr=False)
    part: StatePart = None


@dataclass(frozen=True, slots=True)
class Tidy:
    """Let go of memory managers that nothing has been moved to for a while. Outcome: none."""


Task = Union[JoinPool, CopyOver, Gather, LeavePool, Write, Tidy]


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The outcome of a task that could not be done; `reason` in words."""

    reason: str


Outcome = Union[None, bool, list[Buffer], TaskFailed]
