"""How long an engine's threads waited for a core, by the kernel's count: on a machine that does other things too, that
time is not the step's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

# A step that waited for less than this part of its time counts as it was measured.
UNDISTURBED = 0.03
_ENOUGH = 3
_NANOSECONDS = 1e-9
# What is left of a step at least: the kernel's count and the step do not begin and end at the same moment.
_LEAST = 0.05


class Sample(NamedTuple):
    """A step of `seconds`; its engine waited for a core for `waited` of them."""

    seconds: float
    waited: float

    @property
    def corrected(self) -> float:
        """Without the waiting."""
        return max(self.seconds - self.waited, _LEAST * self.seconds)


class CoreWaits:
    """Asks the kernel about one process; where it does not tell, nothing ever waited."""

    def __init__(self, pid: int) -> None:
        self._tasks = f"/proc/{pid}/task"
        self._last = self._read()

    def since(self) -> float:
        """Seconds that the thread which waited longest has waited since the last call."""
        now = self._read()
        last, self._last = self._last, now
        return max((waited - last.get(thread, waited) for thread, waited in now.items()), default=0) * _NANOSECONDS

    def _read(self) -> dict[str, int]:
        waited = {}
        try:
            for thread in os.listdir(self._tasks):
                with open(f"{self._tasks}/{thread}/schedstat", "rb") as file:
                    waited[thread] = int(file.read().split()[1])
        except (OSError, ValueError, IndexError):
            pass
        return waited


def step_seconds(samples: Sequence[Sample]) -> float:
    """The median of the undisturbed steps if there are enough, else of all without their waiting."""
    quiet = [sample.seconds for sample in samples if sample.waited <= UNDISTURBED * sample.seconds]
    if len(quiet) >= _ENOUGH:
        return median(quiet)
    return median(sample.corrected for sample in samples)


def disturbance(samples: Sequence[Sample]) -> float:
    """The part of the steps' time that was spent waiting."""
    total = sum(sample.seconds for sample in samples)
    return min(1.0, sum(sample.waited for sample in samples) / total) if total else 0.0
