"""Follows what requests, steps, tokens and leases cost the cores that a fleet's engines compute on, beside the engines.

What units say of themselves and the kernel's count of idle time are compared every few seconds: the cores' busy time
that no engine took is the front end's (`costs.front_end`). Only where all units that compute on cores do so on this
machine; on GPUs the front end takes nothing from engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from muxserve.costs.front_end import FrontEndLearner, FrontEndUse
from muxserve.costs.profile import Overheads
from muxserve.gateway.status import UnitStatus
from muxserve.net.core_times import CoreTimes

log = logging.getLogger(__name__)

# Engines tell of steps up to some tenths of a second later, which is little of an interval.
INTERVAL_SECONDS = 4.0


class _Counts(NamedTuple):
    """As of a moment: the units by name and epoch, whose counts begin anew with it, idle core-seconds of the machine,
    core-seconds of steps, and requests, steps, tokens and leases so far."""

    at: float
    units: frozenset[tuple[str, str]]
    idle: float
    computed: float
    requests: int
    steps: int
    tokens: int
    leases: int


class FrontEndCosts:
    """Learns while the fleet serves.

    Args:
        units: of the fleet as it is now.
        cores: asked once for the cores of this machine.
    """

    def __init__(
        self,
        units: Callable[[], Iterable[UnitStatus]],
        cores: Callable[[], CoreTimes] = CoreTimes.own,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._units = units
        self._clock = clock
        self._learner = FrontEndLearner()
        self._last: _Counts | None = None
        self._cores: CoreTimes | None = None
        try:
            self._cores = cores()
        except (OSError, ValueError) as error:
            log.warning("what the front end costs is not learnt: %s", error)

    @property
    def overheads(self) -> Overheads | None:
        """What was learnt, as a profile has it; None: nothing yet."""
        work = self._learner.work
        return None if work is None or self._cores is None else work.overheads(self._cores.count)

    async def keep(self) -> None:
        """Go on learning."""
        while self._cores is not None:
            await asyncio.sleep(INTERVAL_SECONDS)
            await self.look()

    async def look(self) -> None:
        """An interval ends, and another one begins."""
        units = [unit for unit in self._units() if unit.entry.unit_spec.shares_cores]
        if not units or any(unit.entry.remote for unit in units):
            self._last = None
            return
        await asyncio.gather(*(unit.refresh(0.0) for unit in units))
        last, self._last = self._last, self._now(units)
        if last is None or self._last is None or last.units != self._last.units:
            return
        use = self._since(last, self._last)
        if min(use) >= 0:  # else a model has left its unit, with its counts
            self._learner.observe(use)

    def _now(self, units: list[UnitStatus]) -> _Counts | None:
        assert self._cores is not None, "else nobody looks"
        if not all(unit.answered for unit in units):
            return None
        try:
            idle = self._cores.idle_seconds()
        except (OSError, ValueError):
            return None
        models = [model for unit in units for model in unit.models().values()]
        return _Counts(
            self._clock(),
            frozenset((unit.name, str(unit.state.get("epoch"))) for unit in units),
            idle,
            sum(float(unit.state.get("core_seconds", 0.0)) for unit in units),
            sum(int(model.get("arrived", 0)) for model in models),
            sum(int(phase["steps"]) for model in models for phase in model.get("costs", {}).values()),
            sum(map(_tokens, models)),
            sum(int(phase.get("leases", 0)) for model in models for phase in model.get("phases", {}).values()),
        )

    def _since(self, last: _Counts, now: _Counts) -> FrontEndUse:
        assert self._cores is not None, "else nobody looks"
        seconds = now.at - last.at
        busy = self._cores.count * seconds - (now.idle - last.idle)
        return FrontEndUse(
            seconds,
            max(0.0, busy - (now.computed - last.computed)),
            now.requests - last.requests,
            now.steps - last.steps,
            now.tokens - last.tokens,
            now.leases - last.leases,
        )


def _tokens(model: Mapping[str, Any]) -> int:
    """Tokens that were emitted: those of decode steps, and a first one of each request."""
    found = int(model.get("arrived", 0))
    for name, phase in model.get("phases", {}).items():
        if name != "prefill":
            found += int(phase["tokens"]) - int(phase.get("prefill_tokens", 0))
    return found
