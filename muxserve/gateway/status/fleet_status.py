"""What the gateway last heard of each unit, and which replicas serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from muxserve.costs.correction import Correction
from muxserve.gateway.routing.broker import Broker
from muxserve.gpu import nvml, watch
from muxserve.gpu.nvml import GpuMachine
from muxserve.spec import EnginePhase, FleetSpec, UnitEntry, UnitSpec

# A scrape and a dashboard that ask at the same time share one answer.
MAX_AGE_SECONDS = 0.2
# A unit scheduler that does not answer for this long is busy dying.
TIMEOUT_SECONDS = 1.0
# The same for a unit that did not answer the last time: one that hangs must not make every probe of the gateway late.
BRIEF_SECONDS = 0.05


class UnitStates(Protocol):
    """Who asks units: the broker."""

    def unit_is_up(self, unit: str) -> bool:
        """Whether the unit scheduler is there."""

    async def unit_state(self, unit: str, timeout: float) -> dict[str, object] | None:
        """The unit's state, None if it does not answer within `timeout` seconds."""


_GPU_LABELS = ["gpu", "uuid"]


class GpuStatus(Collector):
    """The unit's GPUs in `/fleet` and `/metrics`: memory, utilisation, faults; nothing without GPUs. NVML knows those
    of this machine, and their units report others.

    Args:
        ask: asks NVML; in a thread, because a lost GPU may take its time.
        reported: the GPUs in the last report of a unit on another machine (`muxserve.gpu.watch.states`), instead of
            `ask`; nothing before the first one.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        ask: Callable[[], GpuMachine] = nvml.machine,
        clock: Callable[[], float] = time.monotonic,
        reported: Callable[[], object] | None = None,
    ) -> None:
        self._unit_spec = unit_spec
        self._ask = ask
        self._clock = clock
        self._reported = reported
        self._asked_at = -1e9
        self._asking = asyncio.Lock()
        self._machine = GpuMachine()

    async def refresh(self) -> None:
        """Ask again if what is known is too old."""
        if self._unit_spec.gpu is None or self._reported is not None:
            return
        async with self._asking:
            if self._clock() - self._asked_at > watch.MAX_AGE_SECONDS:
                self._machine = await asyncio.to_thread(self._ask)
                self._asked_at = self._clock()

    def report(self) -> list[dict[str, object]]:
        """The GPUs for `/fleet`, by rank."""
        reported = None if self._reported is None else self._reported()
        if isinstance(reported, list) and reported:
            return reported
        return watch.states(
            self._unit_spec,
            self._machine if self._reported is None else GpuMachine(why_none="its unit has not reported it yet"),
        )

    def collect(self) -> Iterator[Metric]:
        if self._unit_spec.gpu is None:
            return
        up = GaugeMetricFamily("muxserve_gpu_up", "1 while the GPU answers and has no fault.", labels=_GPU_LABELS)
        total = GaugeMetricFamily("muxserve_gpu_memory_bytes", "Memory of the GPU.", labels=_GPU_LABELS)
        used = GaugeMetricFamily("muxserve_gpu_memory_used_bytes", "Memory of the GPU in use.", labels=_GPU_LABELS)
        busy = GaugeMetricFamily(
            "muxserve_gpu_utilization_ratio", "Part of the last second in which a kernel ran.", labels=_GPU_LABELS
        )
        pool = GaugeMetricFamily("muxserve_gpu_pool_bytes", "Memory of the GPU that KV pages have.", labels=_GPU_LABELS)
        for gpu in self.report():
            index = gpu["index"]
            labels = [str(f"rank{gpu['rank']}" if index is None else index), str(gpu["uuid"])]
            up.add_metric(labels, float(index is not None and not gpu["fault"]))
            known = ((pool, "pool_bytes"), (total, "memory_bytes"), (used, "used_bytes"), (busy, "utilization"))
            for family, key in known:
                value = gpu[key]
                # What a GPU holds it holds although the driver does not answer; nothing else is known then.
                if isinstance(value, int | float) and (family is pool or gpu["memory_bytes"]):
                    family.add_metric(labels, value)
        yield from (up, total, used, busy, pool)


class UnitStatus:
    """A unit's state as last heard, at most `MAX_AGE_SECONDS` old after `refresh`."""

    def __init__(self, entry: UnitEntry, broker: UnitStates, clock: Callable[[], float] = time.monotonic) -> None:
        self.entry = entry
        self.state: dict[str, Any] = {}
        self.answered = False
        reported = (lambda: self.state.get("gpus") if self.answered else None) if entry.remote else None
        self.gpus = None if entry.unit_spec.gpu is None else GpuStatus(entry.unit_spec, reported=reported)
        self._broker = broker
        self._clock = clock
        self._heard_at = -1e9
        self._asking: asyncio.Task[None] | None = None
        self._silent = False

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.entry.name

    async def refresh(self, max_age: float = MAX_AGE_SECONDS) -> None:
        """Ask the unit if what is known is too old; `answered` says whether the unit is there."""
        up = self._broker.unit_is_up(self.name)
        if self.answered and up and self.age <= max_age:
            return
        if not up:
            self.answered = False
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        # An answer counts however late it comes.
        await asyncio.wait((self._asking,), timeout=BRIEF_SECONDS if self._silent else None)

    async def _ask(self) -> None:
        state = await self._broker.unit_state(self.name, TIMEOUT_SECONDS)
        self.answered = state is not None
        self._silent = state is None
        if state is not None:
            self.state = state
            self._heard_at = self._clock()

    @property
    def age(self) -> float:
        """Seconds since the unit last answered."""
        return self._clock() - self._heard_at

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """Per model what the unit says of it."""
        models = self.state.get("models")
        return models if isinstance(models, dict) else {}

    def learnt(self) -> dict[str, dict[str, Correction]]:
        """What the unit has learnt of the costs of its models' steps, by model and phase."""
        said = {name: model.get("costs", {}) for name, model in self.models().items()}
        return msgspec.convert(said, dict[str, dict[str, Correction]])

    def engines(self, model: str) -> tuple[EnginePhase, ...]:
        """The phases of the engines that a model of the unit has.

        Raises:
            KeyError: no such model in this unit.
        """
        return self.entry.unit_spec.model(model).engines

    def engine_up(self, model: str, phase: str) -> bool:
        """Whether that engine serves now, and gives signs of life."""
        engines = self.state.get("engines")
        engine = engines.get(f"{model}/{phase}") if isinstance(engines, dict) else None
        if not self.answered or not isinstance(engine, dict):
            return False
        return bool(engine.get("up")) and not engine.get("suspect")

    def model_up(self, model: str) -> bool:
        """Whether all engines of the model serve now."""
        return all(self.engine_up(model, phase) for phase in self.engines(model))


class FleetStatus:
    """All units of the fleet."""

    def __init__(self, fleet: FleetSpec, broker: Broker) -> None:
        self.fleet = fleet
        self.broker = broker
        self.units: dict[str, UnitStatus] = {}
        self.was_ready = False
        # Models that this gateway cannot offer, and why.
        self.refused: dict[str, str] = {}
        # Where memory decides which models are awake, how they and it stand, as the global scheduler said last.
        self.memory: dict[str, Any] = {}
        self._were_up: set[tuple[str, str]] = set()
        self.learn(fleet)

    def learn(self, fleet: FleetSpec) -> None:
        """The fleet has changed."""
        self.fleet = fleet
        units: dict[str, UnitStatus] = {}
        for entry in fleet.units:
            status = self.units.get(entry.name)
            if status is None or status.entry.unit_spec != entry.unit_spec:
                status = UnitStatus(entry, self.broker)
            status.entry = entry
            units[entry.name] = status
        self.units = units  # at once: another thread may be reading for a scrape
        self._were_up = {(unit, model) for unit, model in self._were_up if unit in self.units}

    async def refresh(self, max_age: float = MAX_AGE_SECONDS) -> None:
        """Ask those units of which too little is known."""
        await asyncio.gather(self._refresh_scheduler(), *(unit.refresh(max_age) for unit in self.units.values()))

    async def _refresh_scheduler(self) -> None:
        if not self.fleet.residency:
            return
        state = await self.broker.scheduler_state(TIMEOUT_SECONDS)
        if state is None:
            return
        memory = state.get("memory")
        if isinstance(memory, dict):
            self.memory = memory

    def replica_states(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """The states of their models as units that answer report them: unit, model, state. A unit keeps books also of
        models that the fleet has no longer; these are left out."""
        known = {model.name for model in self.fleet.models}
        for unit in self.units.values():
            if unit.answered:
                yield from ((unit.name, name, state) for name, state in unit.models().items() if name in known)

    def resident(self, model: str) -> dict[str, Any]:
        """What is known of a model that memory decides on; nothing of others."""
        models = self.memory.get("models")
        return models.get(model, {}) if isinstance(models, dict) else {}

    def trouble(self, model: str) -> str:
        """Why a model that memory decides on is not served as it should be; empty if it is."""
        return str(self.resident(model).get("trouble") or "")

    async def refresh_gpus(self) -> None:
        """Ask NVML if what is known is too old."""
        await asyncio.gather(*(unit.gpus.refresh() for unit in self.units.values() if unit.gpus is not None))

    def replicas(self, model: str) -> list[UnitStatus]:
        """The units that serve `model`."""
        return [self.units[entry.name] for entry in self.fleet.replicas(model)]

    def engines(self, model: str) -> dict[EnginePhase, bool]:
        """The phases of the model's engines, and whether one replica's engine of each serves."""
        replicas = self.replicas(model)
        # Without a replica, those that it would have.
        planned = next((known.engines for known in self.fleet.models if known.name == model), ())
        phases = dict.fromkeys(phase for unit in replicas for phase in unit.engines(model)) or planned
        return {phase: any(unit.engine_up(model, phase) for unit in replicas) for phase in phases}

    def model_up(self, model: str) -> bool:
        """Whether one replica serves."""
        return any(unit.model_up(model) for unit in self.replicas(model))

    def was_up(self, model: str) -> bool:
        """Whether one of the replicas that there are has served before."""
        return any((unit.name, model) in self._were_up for unit in self.replicas(model))

    def asleep(self, model: str) -> bool:
        """Whether there is no replica, and none is missing: the next request starts one."""
        rules = self.fleet.scaling.get(model)
        return rules is not None and rules.minimum == 0 and not self.replicas(model)

    def why_degraded(self, model: str) -> str:
        """Why a model cannot be served for now: its engines fail at each start, or it cannot be offered; else empty."""
        return self.refused.get(model, "") or self.broker.router.placing.trouble(model)

    def look(self) -> tuple[bool, bool]:
        """Whether each model can be served, but for those that are degraded; and whether none is, and all replicas are
        up that once were."""
        up = {(unit.name, model) for unit in self.units.values() for model in unit.entry.serves if unit.model_up(model)}
        serving = {(unit.name, model) for unit in self.units.values() for model in unit.entry.serves}
        self._were_up = (self._were_up & serving) | up
        served = {model for _, model in up}
        names = [model.name for model in self.fleet.models]
        degraded = {name for name in names if self.why_degraded(name)}
        ready = all(name in served or self.asleep(name) or name in degraded for name in names)
        ready &= len(degraded) < len(names)
        self.was_ready |= ready
        return ready, self._were_up <= up and not degraded
