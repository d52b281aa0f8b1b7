"""Requests that were sent to a unit which has not named them yet."""

from __future__ import annotations

from dataclasses import dataclass

# From the answer to a gateway until the unit has named the request; after this long it will not come.
NAMED_SECONDS = 1.0


@dataclass(slots=True)
class Placement:
    """A request on its way to `unit`, expected until then."""

    unit: str
    until: float


class Placements:
    """Those of one model."""

    def __init__(self) -> None:
        self._sent: dict[str, Placement] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def unit(self, request_id: str) -> str:
        """Where the request is on its way to; "" if it is not."""
        sent = self._sent.get(request_id)
        return "" if sent is None else sent.unit

    def at(self, unit: str) -> set[str]:
        """Requests on their way to that unit."""
        return {request_id for request_id, each in self._sent.items() if each.unit == unit}

    def sent(self, request_id: str, unit: str, now: float) -> None:
        """The request was sent there."""
        self._sent[request_id] = Placement(unit, now + NAMED_SECONDS)

    def take_back(self, request_id: str) -> str:
        """The request is not expected any more; returns where it was, or ""."""
        sent = self._sent.pop(request_id, None)
        return "" if sent is None else sent.unit

    def gone(self, unit: str) -> None:
        """The unit is gone, with whatever was on its way."""
        self._sent = {key: each for key, each in self._sent.items() if each.unit != unit}

    def expired(self, now: float) -> list[str]:
        """Requests that have not come in time."""
        return [key for key, each in self._sent.items() if now >= each.until]
