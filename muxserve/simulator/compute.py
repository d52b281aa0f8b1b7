"""Devices, and what jobs side by side on them do to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from muxserve.costs import LatencyModel
from muxserve.costs.contention import WHOLE, RunningJob, Sharing, slowdowns_in_crowd
from muxserve.costs.devices import device
from muxserve.scheduling.types import DECODE
from muxserve.simulator.job import Job


class Occupant(Protocol):
    """A unit on the devices."""

    @property
    def engines(self) -> Sequence[Job]:
        """Those of the unit."""
        ...

    def works(self, running: bool, now: float) -> None:
        """Some job of the unit runs, or none."""
        ...


class Compute:
    """Devices, and the jobs that run on them side by side: those of one unit, or of several that share a CPU
    (`shared`). `sharing` is how processes share a GPU; while jobs are `crowded` no lease separates them."""

    def __init__(self, device: str, latency: LatencyModel, shared: bool = False, sharing: Sharing = "mps") -> None:
        self.device = device
        self.shared = shared
        self.sharing = sharing
        self.crowded = False
        self.engines: list[Job] = []
        self.units: list[Occupant] = []
        self.changed = False
        self._slowdowns = latency.slowdowns
        # Models that are woken, each on a core of its own as far as there are enough cores, and how much less of a core
        # a decode job gets that shares it with one of them or with a prefill job.
        self.waking = 0
        self._cores = 1
        self._decode_weight = 1.0

    def beside_wakes(self, waking: int, cores: int, decode_weight: float) -> None:
        """`waking` models are woken on the CPU's `cores` from now on."""
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
        factors = self._slowdowns(self.device, [engine.load for engine in running])
        self.crowded = sum([engine.share for engine in running]) > WHOLE
        if self.crowded:
            jobs = [RunningJob(engine.share, engine.load, engine.grain) for engine in running]
            factors = list(map(max, factors, slowdowns_in_crowd(device(self.device), jobs, self.sharing)))
        for engine, slow in zip(running, factors, strict=True):
            self._retime(engine, slow * (decode if engine.phase is DECODE else before), now)

    def _retime(self, engine: Job, slow: float, now: float) -> None:
        """Beside others an engine is so much slower."""
        if slow != engine.slow:
            engine.retime(slow, now)

    def _beside(self, first: int, decoding: int) -> tuple[float, float]:
        """Slowdown factors by the wakes under way: for `first` jobs that do not decode, and `decoding` that do."""
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
