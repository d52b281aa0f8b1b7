"""The mean of what was measured lately."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# Those count that are younger than so many seconds, as of the last one, and at least so many.
_RECENT, _LEAST = 60.0, 16
# This part of them, the longest, and one at least, count as the longest of the rest: one that a machine has let wait
# would count for all.
_EXTREME = 0.01
# Fewer say nothing.
FEWEST = 8
# So many are worth keeping.
MOST = 1024


def recent_moments(seen: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean and variance of the last of these durations, each with the time at which it was measured (seconds of any
    clock). There must be one at least."""
    latest = sorted(seen, reverse=True)
    since = latest[0][0] - _RECENT
    seconds = sorted(each for n, (at, each) in enumerate(latest) if at >= since or n < _LEAST)
    longest = seconds[-1 - min(len(seconds) - 1, max(1, int(_EXTREME * len(seconds))))]
    seconds = [min(each, longest) for each in seconds]
    return statistics.fmean(seconds), statistics.pvariance(seconds)
