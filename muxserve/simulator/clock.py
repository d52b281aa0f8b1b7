"""Virtual time, and the units that share it.

At one moment everything happens in this order: steps end (engines in their order), messages and arrivals come in, each
unit's scheduler takes its turn, engines begin their next steps (in their order), and jobs that now run side by side on
the same devices settle on their new speeds. So what is computed does not depend on how often an engine is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from operator import attrgetter
from typing import Protocol

from muxserve.simulator.compute import Compute
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.job import Job
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimUnit

# Events come after the steps that end at the same time.
_AFTER_ENGINES = 1 << 20
# No step takes that long: when nothing has run for so many seconds with all arrivals in, nothing ever will.
_STUCK_SECONDS = 10_000.0
_NEVER = float("inf")
_NUMBER = attrgetter("number")


class SimulationError(ValueError):
    """The simulation cannot be run, or does not get on; the message says why."""


class ClockUnit(Protocol):
    """What the clock tells a unit, and asks of it."""

    spec: SimUnit
    number: int
    compute: Compute
    touched: bool

    def moment(self, now: float) -> None:
        """Everything of this moment was told to the one unit of the clock."""
        ...

    def begin(self, now: float) -> None:
        """Everything of this moment was told: decide, and begin steps."""
        ...

    def rest(self, now: float) -> None:
        """Jobs have settled on their speeds."""
        ...


class Clock:
    """The events of some units, up to `until`. `open` requests have come and not ended."""

    def __init__(self, until: float = _NEVER) -> None:
        self.until = until
        self.now = 0.0
        self.open = 0
        self.units: list[ClockUnit] = []
        self.places = 0
        self.heap: list[tuple[float, int, int, Job | TimedEvent]] = []
        self._serial = _AFTER_ENGINES
        self._touched: list[ClockUnit] = []
        # The only unit, as long as there is one.
        self._alone: ClockUnit | None = None

    def place(self) -> int:
        """The next engine's place in the order of those that end steps at one moment."""
        self.places += 1
        return self.places - 1

    def at(self, time: float, event: TimedEvent) -> None:
        """An event happens at a time; events of the same time happen in the order of asking."""
        self._serial += 1
        heappush(self.heap, (time, self._serial, 0, event))

    def join(self, unit: ClockUnit) -> None:
        """A unit comes."""
        self.units.append(unit)
        first, self._alone = self._alone, unit if len(self.units) == 1 else None
        if first is not None:
            # It was asked at every moment so far.
            self._touched = [first]
            first.touched = True

    def touch(self, unit: ClockUnit) -> None:
        """Something is to be done for that unit at this moment."""
        self._touched.append(unit)

    def run(self, arrivals: Iterator[SimRequest], arrive: Callable[[SimRequest, float], None], delay: float) -> None:
        """Have requests `arrive` where they are queued, `delay` seconds after they were sent, until all have ended, or
        the time is over.

        Raises:
            SimulationError: nothing can make progress.
        """
        heap = self.heap
        looked_at = 0.0
        following = next(arrivals, None)
        due = following.arrival + delay if following is not None else _NEVER
        while following is not None or self.open:
            if heap and heap[0][0] <= due:
                now = heap[0][0]
            elif following is not None:
                now = due
            else:
                raise SimulationError(self._stuck())
            if now > self.until:
                return
            self.now = now
            while heap and heap[0][0] <= now:
                _, _, version, what = heappop(heap)
                if isinstance(what, Job):
                    if what.version == version:
                        looked_at = now
                        what.looks += 1
                        what.boundary(now)
                elif following is None and now - looked_at > _STUCK_SECONDS:
                    raise SimulationError(self._stuck())
                else:
                    what.handle(now)
            while due <= now:
                assert following is not None
                looked_at = now
                self.open += 1
                arrive(following, now)
                following = next(arrivals, None)
                due = following.arrival + delay if following is not None else _NEVER
            alone = self._alone
            if alone is not None:
                # It is asked whether it was touched or not.
                alone.moment(now)
            else:
                while self._touched:
                    self._moment(now)

    def _moment(self, now: float) -> None:
        """What units do after everything that they were told."""
        units = self._touched
        self._touched = []
        if len(units) > 1:
            units.sort(key=_NUMBER)
        for unit in units:
            unit.begin(now)
        for unit in units:
            if unit.compute.changed:
                unit.compute.settle(now)
        for unit in units:
            unit.rest(now)

    def _stuck(self) -> str:
        names = ", ".join(unit.spec.name for unit in self.units[:4]) + (", ..." if len(self.units) > 4 else "")
        return f"unit {names}: {self.open} requests wait at {self.now:.3f} s and nothing runs"
