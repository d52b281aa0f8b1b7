"""Requests that were sent to a unit which has not named them yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# From the answer to a gateway until the unit has named the request; after this long it will not come.
NAMED_SECONDS = 1.0


@dataclass(slots=True)
class Placement:
    """A request on its way to `unit`, expected until then."""

    unit: str
    until: float


class Placements:
    """Those of one model, and their former lives: a request may be sent to a unit again before that unit has told that
    it had lost it, and what it tells then is not about the new life."""

    def __init__(self) -> None:
        self._sent: dict[str, Placement] = {}
        self._past: dict[str, Placement] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def unit(self, request_id: str) -> str:
        """Where the request is on its way to; "" if it is not."""
        sent = self._sent.get(request_id)
        return "" if sent is None else sent.unit

    def at(self, unit: str) -> set[str]:
        """Requests on their way to that unit."""
        return {request_id for request_id, each in self._sent.items() if each.unit == unit}

    def past(self, unit: str) -> set[str]:
        """Of these, those whose former life there has not been said to be over."""
        return {request_id for request_id in self.at(unit) if self._is_past(request_id, unit)}

    def sent(self, request_id: str, unit: str, now: float) -> None:
        """The request was sent there."""
        self._sent[request_id] = Placement(unit, now + NAMED_SECONDS)

    def died(self, request_id: str, unit: str, now: float) -> None:
        """Its life in that unit is over, though the unit has not said so."""
        self._past[request_id] = Placement(unit, now + NAMED_SECONDS)

    def told(self, unit: str, left: Iterable[str]) -> None:
        """The unit has said that these have left."""
        for request_id in left:
            if self._is_past(request_id, unit):
                del self._past[request_id]

    def named(self, request_id: str, unit: str) -> str:
        """The unit has the request; returns where else it was expected, or ""."""
        self.told(unit, [request_id])
        sent = self._sent.pop(request_id, None)
        return "" if sent is None or sent.unit == unit else sent.unit

    def take_back(self, request_id: str) -> str:
        """The request is not expected any more; returns where it was, or ""."""
        sent = self._sent.pop(request_id, None)
        return "" if sent is None else sent.unit

    def gone(self, unit: str) -> None:
        """The unit is gone, with whatever was on its way."""
        self._sent = {key: each for key, each in self._sent.items() if each.unit != unit}
        self._past = {key: each for key, each in self._past.items() if each.unit != unit}

    def expired(self, now: float) -> list[str]:
        """Requests that have not come in time."""
        self._past = {key: each for key, each in self._past.items() if now < each.until}
        return [key for key, each in self._sent.items() if now >= each.until]

    def _is_past(self, request_id: str, unit: str) -> bool:
        past = self._past.get(request_id)
        return past is not None and past.unit == unit
