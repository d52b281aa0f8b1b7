"""What a first token takes beside its prefill step, learnt from requests that are alone in the fleet. Pure: no clock.

Nothing computes beside such a request, and nothing is ahead of it. So what its first token took beyond the step, as
that costs by all that was learnt of steps (`costs.correction`), is the way of a request through gateway, unit scheduler
and engine, and of its token back: a profile's `Overheads.request`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from muxserve.costs.profile import EngineProfile
from muxserve.costs.tables import PrefillTable
from muxserve.gateway.requests import Tracked

# What is left to do for a request when it has ended is done after so long.
QUIET_SECONDS = 0.05
# The last ones count, and few say nothing: the first steps of an engine are slow.
_MOST, _FEWEST = 64, 8


class LoneRequest(NamedTuple):
    """Its unit and model, tokens of its prompt that were `computed` and that were `cached`, and seconds from its
    arrival to its first token."""

    unit: str
    model: str
    computed: int
    cached: int
    ttft: float


class LoneRequests:
    """Sees all requests of the only gateway of a fleet."""

    def __init__(self) -> None:
        self._alone: Tracked | None = None
        self._ended_at = float("-inf")
        self._seen: deque[LoneRequest] = deque(maxlen=_MOST)

    def submitted(self, request: Tracked, in_flight: int) -> None:
        """A request has come; so many are in flight with it."""
        quiet = in_flight == 1 and request.arrival >= self._ended_at + QUIET_SECONDS
        self._alone = request if quiet and not request.images else None

    def delayed(self) -> None:
        """A request waits for something else than its turn, or is served again."""
        self._alone = None

    def answered(self, request: Tracked) -> None:
        """A request has its first token, or its vector."""
        if request is self._alone and request.first_token_at is not None and request.emitted:
            computed = request.prompt_tokens - request.cached_tokens
            ttft = request.first_token_at - request.arrival
            self._seen.append(LoneRequest(request.unit, request.model, computed, request.cached_tokens, ttft))
        self._alone = None

    def ended(self, now: float) -> None:
        """A request has ended, whatever became of it."""
        self._ended_at = now

    def beyond_steps(self, engine: Callable[[str, str], EngineProfile | None]) -> dict[str, float]:
        """By device, seconds that a first token takes beyond its prefill step: the median, since one that a machine has
        let wait would count for all. Nothing of devices with few lone requests.

        Args:
            engine: what is known of the engine of a unit and model that a lone request is computed by; None: nothing.
        """
        found: defaultdict[str, list[float]] = defaultdict(list)
        for each in self._seen:
            known = engine(each.unit, each.model)
            # One with more tokens than a step takes is computed in several.
            if known is not None and each.computed <= max((cell.total for cell in known.prefill), default=0):
                pairs = each.computed * each.cached + each.computed * (each.computed + 1) // 2
                step = PrefillTable(known.prefill).seconds(each.computed, pairs, 1)
                found[known.device].append(max(0.0, each.ttft - step))
        return {device: median(seconds) for device, seconds in found.items() if len(seconds) >= _FEWEST}
