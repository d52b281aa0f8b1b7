"""What a first token takes beside its place in a queue and its prefill, learnt while a fleet serves. Pure: no clock.

An engine that was idle when a request came to it tells how long that was in the unit's queue, and then in its steps
(`TokensHeader.in_unit`). What its first token took beyond that is the way of a request through gateway, unit scheduler
and engine, and of its token back, on cores as busy as they are: a profile's `Overheads.request`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from muxserve.gateway.requests import Tracked

# Those count that are younger than so many seconds, as of the last one, and at least so many; few say nothing.
_RECENT, _LEAST, _FEWEST = 60.0, 16, 8
_MOST = 1024
# This part of them, the longest, count as the longest of the rest: one that a machine has let wait would count for all.
_EXTREME = 0.05


class RequestDelays:
    """Sees all first tokens of a gateway."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=_MOST))

    def answered(self, request: Tracked, in_unit: float) -> None:
        """A request has its first token, which took so many seconds of its unit's queue and steps."""
        # Of what waited for something else than its turn, and of what is done for images, nothing is learnt.
        now = request.first_token_at
        if now is not None and not request.waited and not request.images:
            self._seen[request.unit].append((now, max(0.0, now - request.arrival - in_unit)))

    def by_device(self, device: Callable[[str], str | None]) -> dict[str, float]:
        """Seconds, in the mean; nothing of devices with few such requests.

        Args:
            device: a unit's, by its name; None: there is no such unit any more.
        """
        found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for unit, seen in self._seen.items():
            name = device(unit)
            if name is not None:
                found[name] += seen
        return {name: _mean(_recent(seen)) for name, seen in found.items() if len(seen) >= _FEWEST}


def _recent(seen: list[tuple[float, float]]) -> list[float]:
    seen = sorted(seen)
    since = seen[-1][0] - _RECENT
    return [seconds for n, (at, seconds) in enumerate(reversed(seen)) if at >= since or n < _LEAST]


def _mean(seconds: list[float]) -> float:
    longest = sorted(seconds)[-1 - int(_EXTREME * len(seconds))]
    return sum(min(each, longest) for each in seconds) / len(seconds)
