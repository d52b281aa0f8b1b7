"""In which order grammars compile: quick ones overtake slow ones, small ones others.

Pure. Every grammar first gets a short time in a place for quick ones. One that is not through by then is begun again,
with all the time that a grammar may take, in a place for slow ones.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class GrammarQueue:
    """Jobs that wait, and those that compile: `workers` of each kind at once."""

    workers: int
    _waiting: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    # Of each job its size, and whether it is a quick one.
    _jobs: dict[int, tuple[int, bool]] = field(default_factory=dict)
    _running: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: int, size: int) -> None:
        """A new job; its `size` decides among those that wait."""
        self._put(job, size, quick=True)

    def overran(self, job: int) -> bool:
        """A job that runs took all the time that it had; false if it may not try again."""
        size, quick = self._jobs[job]
        self.remove(job)
        if quick:
            self._put(job, size, quick=False)
        return quick

    def again(self, job: int) -> None:
        """A job that runs was lost, and begins anew."""
        size, quick = self._jobs[job]
        self.remove(job)
        self._put(job, size, quick)

    def remove(self, job: int) -> None:
        """A job that has ended, or that nobody wants any more."""
        self._jobs.pop(job, None)
        self._running.discard(job)

    def running(self, job: int) -> bool:
        """Whether it compiles."""
        return job in self._running

    def start(self) -> list[tuple[int, bool]]:
        """Jobs that begin to compile now, and whether they have a short time only."""
        begun: list[tuple[int, bool]] = []
        for quick, waiting in self._waiting.items():
            room = self.workers - sum(self._jobs[job][1] is quick for job in self._running)
            while room > 0 and waiting:
                size, job = heapq.heappop(waiting)
                if self._jobs.get(job) != (size, quick) or job in self._running:
                    continue  # it left, or waits elsewhere by now
                self._running.add(job)
                begun.append((job, quick))
                room -= 1
        return begun

    def _put(self, job: int, size: int, quick: bool) -> None:
        self._jobs[job] = size, quick
        heapq.heappush(self._waiting[quick], (size, job))
