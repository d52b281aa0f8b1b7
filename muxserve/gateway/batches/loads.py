"""What else the models of a fleet have to do, as batches see it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from muxserve.gateway.batches.pace import ModelTraffic, room
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.status.fleet_status import FleetStatus
from muxserve.gateway.status.measure import Measures

# A request that ended so short a time ago may still be in what units reported.
REPORT_SECONDS = 1.0
# The states of a request in a unit: those in which it waits, and those in which it is served.
_QUEUED = ("queued",)
_SERVED = ("prefilling", "handed", "decoding")


class FleetLoads:
    """The loads of all models, of which it knows the part that batches make. Names are those that clients use.

    Args:
        clock: seconds.
    """

    def __init__(
        self,
        status: FleetStatus,
        limiter: ConcurrencyLimiter,
        measures: Measures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status = status
        self._limiter = limiter
        self._measures = measures
        self._clock = clock
        self.running: Counter[str] = Counter()
        self._ended: deque[tuple[float, str]] = deque()
        self._others_at: dict[str, float] = {}
        self._loads: dict[str, ModelTraffic] = {}
        self._beside: dict[str, set[str]] = {}

    def began(self, model: str) -> None:
        """A request of a batch is asked."""
        self.running[model] += 1
        load = self._loads.get(model)
        if load is not None:
            self._loads[model] = ModelTraffic(
                load.seats, load.queued, load.others, load.batch + 1, load.quiet_seconds, load.met, load.asleep
            )

    def ended(self, model: str) -> None:
        """It has its answer, or has none."""
        self.running[model] -= 1
        self._ended.append((self._clock(), model))

    async def look(self) -> None:
        """See how every model stands."""
        await self._status.refresh()
        now = self._clock()
        while self._ended and self._ended[0][0] < now - REPORT_SECONDS:
            self._ended.popleft()
        own = self.running + Counter(model for _, model in self._ended)
        units: dict[str, set[str]] = {}
        for name in self._status.fleet.served_names:
            self._loads[name] = self._load(name, own[name], now)
            for unit in self._status.replicas(self._status.fleet.serving(name)):
                units.setdefault(unit.name, set()).add(name)
        self._beside = {}
        for names in units.values():
            for name in names:
                self._beside.setdefault(name, set()).update(names - {name})

    def room(self, model: str) -> int:
        """How many more requests for `model` may begin."""
        load = self._loads.get(model)
        gate = self._limiter.gates.get(self._status.fleet.serving(model))
        if load is None or gate is None or gate.waiting:
            return 0
        beside = [self._loads[name] for name in self._beside.get(model, ()) if name in self._loads]
        return min(room(load, beside), max(1, gate.max_concurrency // 2) - self.running[model])

    def _load(self, name: str, own: int, now: float) -> ModelTraffic:
        status = self._status
        version = status.fleet.serving(name)
        replicas = [unit for unit in status.replicas(version) if unit.answered]
        asleep = status.asleep(version)
        states = [unit.models().get(version, {}) for unit in replicas]
        queued = sum(state.get(each, 0) for state in states for each in _QUEUED)
        served = sum(state.get(each, 0) for state in states for each in _SERVED)
        gate = self._limiter.gates.get(version)
        here = gate.inside + gate.waiting - self.running[name] if gate is not None else 0
        others = max(0, queued + served - own, here)
        if others:
            self._others_at[name] = now
        queued += status.broker.router.placing.waiting[version]
        if not replicas and not asleep:
            queued += 1  # nobody is there to serve it
        recent = self._measures.recent(version, now)
        spec = next((model for model in status.fleet.models if model.name == version), None)
        return ModelTraffic(
            seats=(spec.max_num_seqs if spec is not None else 1) * max(1, len(replicas)),
            queued=queued,
            others=others,
            batch=self.running[name],
            quiet_seconds=now - self._others_at.get(name, -1e9),
            met=recent.met / recent.judged if recent.judged else 1.0,
            asleep=asleep,
        )
