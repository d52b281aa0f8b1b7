"""In which order sleeping models are woken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muxserve.scheduling.deadlines import TimedJob, moore_hodgson
from muxserve.scheduling.residency_types import Residence, ResidencyRules, Standing, WakeCosts
from muxserve.scheduling.wake_times import WakeTimes, busy_models


def deadlines(standing: Standing, costs: WakeCosts) -> list[float]:
    """By when each waiting request of the model is to have its first token."""
    return [arrival + costs.ttft for arrival in standing.waiting]


class WakeOrder:
    """In which order the sleeping models are woken that requests wait for. All requests of one model are one group,
    since one wake serves them all. First come groups with a request that has waited for `max_wait`, then those that can
    be in time, then those that cannot."""

    def __init__(self, rules: ResidencyRules, models: Mapping[str, WakeCosts], times: WakeTimes) -> None:
        self._rules, self._models, self._times = rules, models, times

    def queue(self, now: float, standings: Iterable[Standing]) -> list[str]:
        """The models, first the one that is woken first."""
        starved, hopeless = [], []
        jobs: list[TimedJob] = []
        standings = list(standings)
        pace, wakes = self._times.pace, self._rules.wakes
        busy, waking = busy_models(standings), sum(each.residence is Residence.WAKING for each in standings)
        alone = pace.slowdown(waking + busy)
        # Parallel wakes count as one machine that is so many times as fast.
        together = pace.slowdown(wakes - 1 + busy) / wakes
        for each in standings:
            if not each.waiting or each.residence is not Residence.ASLEEP:
                continue
            oldest = min(each.waiting)
            seconds = self._times.seconds(each.model)
            possible = [by for by in deadlines(each, self._models[each.model]) if now + seconds * alone <= by]
            if now - oldest >= self._rules.max_wait:
                starved.append((oldest, each.model))
            elif possible:
                jobs.append(TimedJob(each.model, seconds * together, min(possible), len(possible)))
            else:
                hopeless.append((oldest, each.model))
        in_time, late = moore_hodgson(jobs, now)
        last = [job.name for job in late] + [model for _, model in sorted(hopeless)]
        return [model for _, model in sorted(starved)] + [job.name for job in in_time] + last
