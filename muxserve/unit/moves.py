"""The moves of a unit's requests to other units, as records: what each waits for, and how far it is."""

from __future__ import annotations

import math
from collections.abc import KeysView
from dataclasses import dataclass
from enum import Enum, auto

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.state import LiveRequest
from muxserve.scheduling.types import Place

# The last stage is what the request waits for. It comes when at most so many whole blocks were filled during the stage
# before, or after so many stages: the next one would hardly be shorter.
LAST_STAGE_BLOCKS = 4
MOST_STAGES = 3


class Step(Enum):
    """What a move waits for."""

    SHOWING = auto()  # the engine, which is to show blocks
    COPYING = auto()  # the migrator, while the request goes on
    DETACHING = auto()  # the engine, which is to let go of it
    LAST = auto()  # the migrator; the request stands still
    COMMITTING = auto()  # the other unit


@dataclass(slots=True)
class Move:
    """One request on its way. `until` is how many of its blocks are over there, `held` how many were set aside there.
    The step that it waits for is given up at `deadline`."""

    name: str
    live: LiveRequest
    incarnation: int
    destination: str
    address: str
    usage: int
    step: Step = Step.SHOWING
    deadline: float = math.inf
    until: int = 0
    held: int = 0
    total: int = 0
    stages: int = 0
    shown_at: float = 0.0
    detached_at: float = 0.0

    @property
    def key(self) -> str:
        """Under which its blocks wait in this unit's memory manager."""
        return f"move:{self.name}"

    @property
    def detached(self) -> bool:
        """The request has left its engine, and stands still."""
        return self.step in (Step.LAST, Step.COMMITTING)

    def as_expected(self, ledger: UnitLedger) -> bool:
        """The request is still where it has to be for the step that is waited for."""
        live = self.live
        if ledger.requests.get(live.request_id) is not live:
            return False
        if self.detached:
            return live.place is Place.MOVING
        return live.place is Place.DECODING and live.lease_id == self.incarnation

    def nearly_over(self, now: float) -> bool:
        """The next stage is to be the last one."""
        model = self.live.model
        filled = (now - self.shown_at) / max(model.decode.step_seconds, 1e-4) / model.block_tokens
        return filled <= LAST_STAGE_BLOCKS or self.stages >= MOST_STAGES


@dataclass(slots=True)
class Downtime:
    """How long requests of a model stood still while they moved, seconds."""

    last: float = 0.0
    most: float = 0.0
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """One more has arrived, after so long."""
        self.last = seconds
        self.most = max(self.most, seconds)
        self.total += seconds


class Moves:
    """The moves under way, by their names."""

    def __init__(self) -> None:
        self._by_name: dict[str, Move] = {}
        self._by_request: dict[str, Move] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def all(self) -> list[Move]:
        """Those of now, oldest first."""
        return list(self._by_name.values())

    def of_model(self, model: str) -> list[Move]:
        """Those of the model's requests."""
        return [move for move in self._by_name.values() if move.live.model.name == model]

    def named(self, name: str) -> Move | None:
        """The move of that name."""
        return self._by_name.get(name)

    def of(self, request_id: str) -> Move | None:
        """The move of that request."""
        return self._by_request.get(request_id)

    def requests(self) -> KeysView[str]:
        """The requests that move."""
        return self._by_request.keys()

    def add(self, move: Move) -> None:
        """A move begins."""
        self._by_name[move.name] = self._by_request[move.live.request_id] = move

    def remove(self, move: Move) -> None:
        """A move is over."""
        del self._by_name[move.name]
        if self._by_request.get(move.live.request_id) is move:
            del self._by_request[move.live.request_id]
