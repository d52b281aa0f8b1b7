"""Which priority levels a request has: those of its headers, else its API key's, else the fleet's default. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

from muxserve.gateway.http.errors import RequestError
from muxserve.replicas.priorities import NORMAL, Levels

BOTH = b"x-muxserve-priority"
SCHEDULING = b"x-muxserve-scheduling-priority"
EXECUTION = b"x-muxserve-execution-priority"
HEADERS = frozenset({BOTH, SCHEDULING, EXECUTION})

# A level counts for more than any `priority` in a body.
STEP = 1 << 32
MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class RequestLevels:
    """The levels of a request, and how many levels each is below the default (negative: above)."""

    scheduling: str = NORMAL
    execution: str = NORMAL
    scheduling_step: int = 0
    execution_step: int = 0

    def queue(self, priority: int) -> int:
        """The place in queues of a request whose body has that `priority`; lower is earlier, and the level goes
        first."""
        return self.scheduling_step * STEP + max(-MOST, min(MOST, priority))

    def engine(self, priority: int) -> int:
        """Likewise in an engine, which preempts the highest first."""
        return self.execution_step * STEP + max(-MOST, min(MOST, priority))


class Priorities:
    """The levels of a fleet as requests ask for them."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._order = {level.name: place for place, level in enumerate(levels)}
        self._plain = self._of(levels.default, levels.default)
        self._last = [*levels][-1].name

    @property
    def last(self) -> RequestLevels:
        """For requests that go behind all others."""
        lowest = self._of(self._last, self._last)
        return RequestLevels(
            self._last, self._last, scheduling_step=lowest.scheduling_step + 1, execution_step=lowest.execution_step + 1
        )

    def of(self, headers: Iterable[tuple[bytes, bytes]], key_level: str | None) -> RequestLevels:
        """The priority of a request.

        A key that has a level of its own cannot be used for more than that: headers may lower it, not raise it.

        Args:
            headers: ASGI's.
            key_level: the level of the API key that the request came with, if it has one.

        Raises:
            RequestError: a level that there is not (400), or above that of the key (403).
        """
        asked: dict[bytes, str] = {}
        for name, value in headers:
            if name in HEADERS:
                asked[name] = value.decode("latin-1").strip()
        if not asked and key_level is None:
            return self._plain
        own = key_level if key_level is not None else self._levels.default
        both = asked.get(BOTH, own)
        scheduling, execution = asked.get(SCHEDULING, both), asked.get(EXECUTION, both)
        for level in dict.fromkeys((both, scheduling, execution)):
            self._check(level, key_level)
        return self._of(scheduling, execution)

    def _check(self, level: str, key_level: str | None) -> None:
        if level not in self._order:
            shown = level if len(level) <= 100 else f"{level[:100]}..."
            names = ", ".join(self._order)
            raise RequestError(HTTPStatus.BAD_REQUEST, f"there is no priority level {shown!r}; this server has {names}")
        if key_level is not None and self._order[level] < self._order[key_level]:
            raise RequestError(
                HTTPStatus.FORBIDDEN,
                f"this API key may ask for priority {key_level!r} and below, not for {level!r}; use another key, or "
                "leave the header out",
            )

    def _of(self, scheduling: str, execution: str) -> RequestLevels:
        default = self._order[self._levels.default]
        return RequestLevels(scheduling, execution, self._order[scheduling] - default, self._order[execution] - default)
