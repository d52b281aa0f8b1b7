"""Virtual time, and the units that share it.

At one moment everything happens in this order: steps end (engines in their order), messages and arrivals come in, each
unit's scheduler takes its turn, engines begin their next steps (in their order), and jobs that now run side by side on
the same devices settle on their new speeds. So what is computed does not depend on how often an engine is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

from muxserve.costs import LatencyModel
from muxserve.scheduling.types import DECODE
from muxserve.simulator.engine import Engine
from muxserve.simulator.requests import SimRequest

if TYPE_CHECKING:
    from muxserve.simulator.unit import SimulatedUnit

# Actions come after the steps that end at the same time.
_AFTER_ENGINES = 1 << 20
# No step takes that long: when nothing has run for so many seconds with all arrivals in, nothing ever will.
_STUCK_SECONDS = 10_000.0
_NEVER = float("inf")
_NUMBER = attrgetter("number")


class SimulationError(ValueError):
    """The simulation cannot be run, or does not get on; the message says why."""


class Compute:
    """Devices, and the jobs that run on them side by side: those of one unit, or of several that share a CPU
    (`shared`)."""

    def __init__(self, device: str, latency: LatencyModel, shared: bool = False) -> None:
        self.device = device
        self.shared = shared
        self.engines: list[Engine] = []
        self.units: list[SimulatedUnit] = []
        self.changed = False
        self._slowdowns = latency.slowdowns
        # Models that are woken, each on a core of its own as far as there are so many, and how much less of a core a
        # decode job gets that shares it with one of them or with a prefill job.
        self.waking = 0
        self._cores = 1
        self._decode_weight = 1.0

    def beside_wakes(self, waking: int, cores: int, decode_weight: float) -> None:
        """So many models are woken on the CPU's `cores` from now on."""
        self.waking, self._cores, self._decode_weight = waking, cores, decode_weight
        self.changed = True

    def lone(self) -> bool:
        """No job can ever run beside the one engine's."""
        return len(self.engines) == 1 and not self.shared

    def settle(self, now: float) -> None:
        """The set of running jobs, or what they ask of the devices, has changed."""
        self.changed = False
        if len(self.engines) == 1:
            # It is alone, at work or not.
            (engine,) = self.engines
            self.units[0].works(engine.active, now)
            if engine.active:
                self._retime(engine, 1.0, now)
            return
        running = [engine for engine in self.engines if engine.active]
        if len(self.units) == 1:
            self.units[0].works(bool(running), now)
        else:
            for unit in self.units:
                unit.works(any(engine.active for engine in unit.engines), now)
        if len(running) == 1 and not self.waking:
            self._retime(running[0], 1.0, now)
            return
        decoding = sum(engine.phase is DECODE for engine in running)
        before, decode = self._beside(len(running) - decoding, decoding) if self.waking else (1.0, 1.0)
        loads = [engine.load for engine in running]
        for engine, slow in zip(running, self._slowdowns(self.device, loads), strict=True):
            self._retime(engine, slow * (decode if engine.phase is DECODE else before), now)

    def _retime(self, engine: Engine, slow: float, now: float) -> None:
        """Beside others an engine is so much slower."""
        if slow != engine.slow:
            engine.retime(slow, now)

    def _beside(self, first: int, decoding: int) -> tuple[float, float]:
        """How many times as long as without wakes so many decode jobs take, and (before that) so many others."""
        without = fair_shares(self._cores, first, decoding, self._decode_weight)
        there = fair_shares(self._cores, first + self.waking, decoding, self._decode_weight)
        return without[0] / there[0], without[1] / there[1]


def fair_shares(cores: int, first: int, second: int, weight: float) -> tuple[float, float]:
    """The part of a core that each of `first` threads gets, and each of `second` threads of that `weight` (at most 1):
    by weight, and a core at most, as of the kernel's fair scheduler."""
    if first + second <= cores:
        return 1.0, 1.0
    left = cores - first
    if second and left >= weight * second:
        return 1.0, left / second
    share = min(1.0, cores / (first + weight * second))
    return share, share * weight


class Clock:
    """The events of some units, up to `until`. `open` requests have come and not ended."""

    def __init__(self, until: float = _NEVER) -> None:
        self.until = until
        self.now = 0.0
        self.open = 0
        self.units: list[SimulatedUnit] = []
        self.places = 0
        self.heap: list[tuple[float, int, int, Engine | Callable[[float], None]]] = []
        # When the next request comes.
        self._due = _NEVER
        self._serial = _AFTER_ENGINES
        self._touched: list[SimulatedUnit] = []
        # The only unit, as long as there is one.
        self._alone: SimulatedUnit | None = None

    def place(self) -> int:
        """The next engine's place in the order of those that end steps at one moment."""
        self.places += 1
        return self.places - 1

    def at(self, time: float, action: Callable[[float], None]) -> None:
        """Do something at a time; of the same time in the order of asking."""
        self._serial += 1
        heappush(self.heap, (time, self._serial, 0, action))

    def join(self, unit: SimulatedUnit) -> None:
        """A unit comes."""
        self.units.append(unit)
        first, self._alone = self._alone, unit if len(self.units) == 1 else None
        if first is not None:
            # It was asked at every moment so far.
            self._touched = [first]
            first.touched = True

    def quiet_until(self, unit: SimulatedUnit) -> float:
        """Before that time nothing happens but what the engines of `unit` do that have not asked to be looked at; now,
        where there are other units."""
        if self._alone is not unit:
            return self.now
        heap = self.heap
        while heap:
            time, _, version, what = heap[0]
            if not isinstance(what, Engine) or what.version == version:
                return min(time, self._due)
            heappop(heap)
        return self._due

    def touch(self, unit: SimulatedUnit) -> None:
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
                if isinstance(what, Engine):
                    if what.version == version:
                        looked_at = now
                        what.unit.looks += 1
                        what.boundary(now)
                elif following is None and now - looked_at > _STUCK_SECONDS:
                    raise SimulationError(self._stuck())
                else:
                    what(now)
            while due <= now:
                assert following is not None
                looked_at = now
                self.open += 1
                arrive(following, now)
                following = next(arrivals, None)
                due = following.arrival + delay if following is not None else _NEVER
            self._due = due
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
