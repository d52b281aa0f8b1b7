"""In which order sleeping models are woken, and how many at a time: wakes beside each other delay each other."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from muxserve.scheduling.residency_types import Residence, ResidencyRules, Standing, WakeCosts
from muxserve.scheduling.wake_times import WakeTimes, busy_models

# How many models are woken at a time is chosen for the first so many models of the order.
_LOOKED_AT = 12


@dataclass(frozen=True, slots=True)
class TimedJob:
    """Takes `seconds`, and should have ended at `deadline`; so many requests (`weight`) wait for it."""

    name: str
    seconds: float
    deadline: float
    weight: int = 1


def moore_hodgson(jobs: Sequence[TimedJob], now: float) -> tuple[list[TimedJob], list[TimedJob]]:
    """Those that end in time when they are done from `now` on in this order, and those that are late.

    By deadlines; whenever one would be late, the job that takes longest per request is left out (Moore, Management
    Science 15(1), 1968: that leaves the fewest late jobs where all have the same weight). Late jobs come by their
    deadlines.
    """
    chosen: list[tuple[float, str, TimedJob]] = []
    late: list[TimedJob] = []
    end = now
    for job in sorted(jobs, key=lambda each: (each.deadline, each.name)):
        heapq.heappush(chosen, (-job.seconds / job.weight, job.name, job))
        end += job.seconds
        if end > job.deadline:
            left_out = heapq.heappop(chosen)[2]
            late.append(left_out)
            end -= left_out.seconds
    in_time = sorted((job for _, _, job in chosen), key=lambda each: (each.deadline, each.name))
    return in_time, sorted(late, key=lambda each: (each.deadline, each.name))


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
        pace, wakes = self._times.pace, self._rules.wakes.most
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


class WakeConcurrency:
    """How many models are woken at a time, those under way included."""

    def __init__(self, rules: ResidencyRules, models: Mapping[str, WakeCosts], times: WakeTimes) -> None:
        self._rules, self._models, self._times = rules, models, times

    def at_a_time(self, now: float, queue: Sequence[str], standings: Mapping[str, Standing]) -> int:
        """The number of parallel wakes that serves most waiting requests in time; among equal ones, the number with the
        least waiting time."""
        if self._rules.wakes.most == 1 or not queue:
            return self._rules.wakes.most
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

        return max(range(1, self._rules.wakes.most + 1), key=served)
