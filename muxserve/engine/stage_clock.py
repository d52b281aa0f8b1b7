"""How long each stage of a pipeline computes: counted by its worker, read by the engine.

A stage's *bubbles* are the seconds in which it does not compute although a micro-batch is in flight. Worker and engine
write to memory that they share since the workers were forked, one cache line each, so that nobody asks anybody.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_LINE = 8  # 64-bit words of a cache line, of which one is used: nanoseconds computing

Counts = npt.NDArray[np.int64]


class StageSeconds(NamedTuple):
    """Seconds of each stage: in which it had nothing to compute although something was in flight, and in which it
    computed. The latter are counted when a micro-batch is through the stage."""

    bubbles: list[float]
    computed: list[float]


NO_STAGES = StageSeconds([], [])


class StageClocks:
    """Counters of all `stages`; made before the workers are forked. `now` gives nanoseconds."""

    def __init__(self, stages: int, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._memory = mmap.mmap(-1, stages * _LINE * 8)
        self._counts: Counts = np.frombuffer(self._memory, dtype=np.int64).reshape(stages, _LINE)
        self._now = now
        self._active = 0
        self._since: int | None = None
        self._told = [0.0] * stages
        self._told_busy = [0.0] * stages

    def clock(self, stage: int) -> StageClock:
        """What the worker of that stage counts with."""
        return StageClock(self._counts[stage], self._now)

    def reset(self) -> None:
        """Count from here on; to be called when nothing is in flight."""
        self._counts[:] = 0
        self._active = 0
        self._told = [0.0] * len(self._told)
        self._told_busy = [0.0] * len(self._told)

    def in_flight(self, something: bool) -> None:
        """After a step: whether a micro-batch is in flight."""
        now = self._now()
        if self._since is not None:
            self._active += now - self._since
        self._since = now if something else None

    def take(self) -> StageSeconds:
        """The seconds of each stage since the last call."""
        busy = [int(count) / 1e9 for count in self._counts[:, 0]]
        computed = [now - before for now, before in zip(busy, self._told_busy, strict=True)]
        self._told_busy = busy
        return StageSeconds(self._take_bubbles(busy), computed)

    def _take_bubbles(self, busy: Sequence[float]) -> list[float]:
        """Seconds of bubbles.

        A stage counts when it has computed, so that what it computes at the moment is told as a bubble now, and later
        bubbles as that much shorter; the sum is right whenever nothing is in flight.
        """
        total = [self._active / 1e9 - seconds for seconds in busy]
        fresh = [max(0.0, now - before) for now, before in zip(total, self._told, strict=True)]
        self._told = [before + more for before, more in zip(self._told, fresh, strict=True)]
        return fresh


class StageClock:
    """Runs while the stage computes."""

    def __init__(self, counts: Counts, now: Callable[[], int]) -> None:
        self._counts = counts
        self._now = now
        self._since: int | None = None

    def start(self) -> None:
        """The stage computes from now on."""
        self._since = self._now()

    def stop(self) -> None:
        """It does not any more."""
        if self._since is not None:
            self._counts[0] += self._now() - self._since
            self._since = None

    def paused(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with the clock standing still: it waits for another stage."""

        def waits(*args: Any, **kwargs: Any) -> Any:
            running = self._since is not None
            self.stop()
            try:
                return call(*args, **kwargs)
            finally:
                if running:
                    self.start()

        return waits
