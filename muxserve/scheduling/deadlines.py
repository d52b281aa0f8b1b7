"""Which of several jobs can still end in time when one is done after the other (Moore-Hodgson)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


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
