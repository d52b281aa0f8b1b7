"""How many models are woken at a time: wakes beside each other delay each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muxserve.scheduling.residency_types import Residence, ResidencyRules, Standing, WakeCosts
from muxserve.scheduling.wake_order import deadlines
from muxserve.scheduling.wake_times import WakeTimes, busy_models

# The number is chosen for the first so many models of the order.
_LOOKED_AT = 12


class WakeConcurrency:
    """How many models are woken at a time, those under way included."""

    def __init__(self, rules: ResidencyRules, models: Mapping[str, WakeCosts], times: WakeTimes) -> None:
        self._rules, self._models, self._times = rules, models, times

    def at_a_time(self, now: float, queue: Sequence[str], standings: Mapping[str, Standing]) -> int:
        """The number of parallel wakes that serves most waiting requests in time; among equal ones, the number with the
        least waiting time."""
        if self._rules.wakes == 1 or not queue:
            return self._rules.wakes
        waking = [each for each in standings.values() if each.residence is Residence.WAKING]
        left = [self._times.left(each.model) for each in waking]
        first = [standings[model] for model in queue[:_LOOKED_AT]]
        seconds = [self._times.seconds(each.model) for each in first]
        busy = busy_models(standings.values())

        def served(count: int) -> tuple[int, float]:
            """Requests in time, and minus the seconds that all wait, with `count` wakes at a time."""
            ends = [now + end for end in self._times.pace.ends(left, seconds, count, busy)]
            groups = list(zip(ends, [*waking, *first], strict=True))
            in_time = sum(end <= by for end, each in groups for by in deadlines(each, self._models[each.model]))
            return in_time, -sum(end * len(each.waiting) for end, each in groups)

        return max(range(1, self._rules.wakes + 1), key=served)
