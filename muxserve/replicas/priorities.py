"""Priority levels. A request has two of them, which are independent: its *scheduling* priority says in which order
queues are served, its *execution* priority how much room its instance keeps free around it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

NORMAL = "normal"
HIGH = "high"
AUTO: Literal["auto"] = "auto"
# Llumnix's target load for its high level, of LLaMA-7B on an A10. Where a latency model is at hand, it says what the
# same is elsewhere (`costs.target_load`).
TARGET_LOAD = 1600


class ServiceClass(msgspec.Struct, omit_defaults=True, gc=False, frozen=True):
    """How a request is served among others. `priority` follows vLLM: lower is served earlier. `scheduling` and
    `execution` name the request's levels; the gateway has put the rank of the former into `priority`. Prompts and
    choices that a client asked for at once are of one `group`. Service is fair among tenants, by their `weight`."""

    priority: int = 0
    scheduling: str = NORMAL
    execution: str = NORMAL
    group: str = ""
    tenant: str = ""
    weight: float = 1.0


class PriorityError(ValueError):
    """Levels that contradict each other, or a level that nobody declared; the message says which."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level. Higher `rank` goes first.

    `target_load` is how many tokens of KV an instance should hold at most while it runs a request of this level, so
    that its steps stay short; `auto`: as many as the replica's own costs allow, None: as many as it can.
    """

    name: str
    rank: int
    target_load: int | Literal["auto"] | None = None

    def headroom(self, capacity: int, auto: int = TARGET_LOAD) -> int:
        """Tokens that an instance of that capacity keeps free for this level: the capacity less the target load
        (Llumnix, section 4.4.2). `auto` is what such a target load comes to."""
        if self.target_load is None:
            return 0
        return max(0, capacity - (auto if self.target_load == AUTO else self.target_load))


class Levels:
    """The levels of a fleet, by name, as one model has them: `auto` is what automatic target loads come to there.

    Raises:
        PriorityError: no level, a name or rank twice, a target load below zero, or no level called `default`.
    """

    def __init__(self, levels: Iterable[Level], default: str = NORMAL, auto: int = TARGET_LOAD) -> None:
        ordered = sorted(levels, key=lambda level: -level.rank)
        self._levels = {level.name: level for level in ordered}
        if len(self._levels) < len(ordered):
            raise PriorityError("two priority levels have the same name; give each its own")
        if len({level.rank for level in ordered}) < len(ordered):
            raise PriorityError("two priority levels have the same rank; which goes first must be clear")
        for level in ordered:
            if isinstance(level.target_load, int) and level.target_load < 0:
                raise PriorityError(
                    f"priority level {level.name!r}: the target load is in tokens and cannot be below 0, "
                    f"it is {level.target_load}"
                )
        if default not in self._levels:
            raise PriorityError(f"the default priority level {default!r} is not declared; {self._known()}")
        self.default = default
        self.auto = auto
        # Headrooms by capacity: asked for with every report of an instance, and capacities are few.
        self._headrooms: dict[int, dict[str, int]] = {}

    def __getitem__(self, name: str) -> Level:
        try:
            return self._levels[name]
        except KeyError:
            close = difflib.get_close_matches(name, self._levels, 1)
            hint = f"did you mean {close[0]!r}?" if close else self._known()
            raise PriorityError(f"there is no priority level {name!r}; {hint}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Levels):
            return NotImplemented
        return (self._levels, self.default, self.auto) == (other._levels, other.default, other.auto)

    def __hash__(self) -> int:
        return hash((tuple(self), self.default, self.auto))

    def __iter__(self) -> Iterator[Level]:
        """From the highest rank to the lowest."""
        return iter(self._levels.values())

    def __len__(self) -> int:
        return len(self._levels)

    def headrooms(self, capacity: int) -> dict[str, int]:
        """Level -> tokens that an instance of that capacity keeps free for it; only levels that have any."""
        found = self._headrooms.get(capacity)
        if found is None:
            each = ((level.name, level.headroom(capacity, self.auto)) for level in self)
            found = self._headrooms[capacity] = {name: tokens for name, tokens in each if tokens}
        return found

    def _known(self) -> str:
        return f"declared are {', '.join(self._levels) or 'none'}"


DEFAULT_LEVELS = Levels((Level(HIGH, 1, AUTO), Level(NORMAL, 0)))
