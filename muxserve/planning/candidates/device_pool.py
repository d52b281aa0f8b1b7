"""Devices that a model has for itself: GPUs, or the cores of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from muxserve.config import AUTO, NETWORK
from muxserve.costs.devices import device
from muxserve.costs.latency import EngineShape
from muxserve.planning.candidates.layouts import (
    LayoutRequest,
    NoPlaceError,
    ReplicaLayout,
    SimulatedLayout,
    allows,
    check_pool,
    link_of,
    no_layout,
    place_on_gpus,
)
from placement import HostMemory, Machine, ModelDemand, PlanError, UnitPlan, plan_unit
from placement.demand import splits_evenly
from placement.engines import SHARED, ShareRules
from placement.format import format_size
from placement.memory import MemoryRules

CPU = "CPU"


@dataclass(frozen=True, slots=True)
class GpuPool:
    """GPUs of one type, `nodes[i]` of them on the i-th machine; `memory` is that of one GPU, bytes. A replica lies
    within one machine. Some GPUs are left idle where no layout takes all."""

    kind: str
    nodes: tuple[int, ...]
    memory: int
    rules: MemoryRules

    @property
    def devices(self) -> int:
        """See `DevicePool`."""
        return sum(self.nodes)

    @property
    def words(self) -> str:
        """What they are, for people."""
        machines = f" on {len(self.nodes)} machines (a replica is on one)" if len(self.nodes) > 1 else ""
        return f"{self.devices} {self.kind}{machines}"

    @property
    def usable(self) -> int:
        """See `GpuDevices`."""
        return int(self.memory * self.rules.utilisation) - self.rules.reserve_bytes

    def layouts(self, wanted: LayoutRequest) -> Iterator[ReplicaLayout]:
        """See `DevicePool`."""
        architecture, found = wanted.demand.architecture, False
        check_pool(wanted, wanted.replicas or self.devices, self.devices, "one GPU")
        for devices in range(self.devices, 0, -1):
            for tp in _divisors(devices):
                if not splits_evenly(architecture, tp):
                    continue
                for stages in _divisors(devices // tp):
                    layout = ReplicaLayout(devices // tp // stages, stages, tp, wanted.rolling)
                    if self._holds(layout) and allows(layout, wanted):
                        found = True
                        yield layout
        if not found:
            raise NoPlaceError(no_layout(wanted, self.words))

    def place(self, wanted: LayoutRequest, layout: ReplicaLayout) -> SimulatedLayout:
        """See `DevicePool`."""
        return place_on_gpus(self, wanted, layout)

    def check_room(self, wanted: LayoutRequest, tokens: int, layout: ReplicaLayout, own: int | None = None) -> None:
        """See `GpuDevices`."""
        demand = wanted.demand
        if tokens >= demand.sequence_tokens:
            return
        usable = format_size(self.usable)
        where = f"on each of {layout.tp * layout.stages} {self.kind}"
        if own is not None and tokens < 0:
            raise NoPlaceError(
                f"its weights, activations and processes take {format_size(own)} {where}, of which {usable} may be used"
            )
        raise NoPlaceError(
            f"of the {usable} that may be used {where} its weights, activations and processes leave room for "
            f"{max(0, tokens)} tokens of KV, and a mean request has {demand.sequence_tokens}"
        )

    def _holds(self, layout: ReplicaLayout) -> bool:
        size = layout.stages * layout.tp
        return sum(count // size for count in self.nodes) >= layout.replicas


@dataclass(frozen=True, slots=True)
class CpuPool:
    """The cores of one machine, divided evenly among the engines that run on them at the same time. `pool` is the
    size of a unit's page pool where the fleet file gives it, bytes; `cores` those that may be used. `ranks` as in the
    fleet file. `others` are units of other models that are there, too."""

    machine: Machine
    cores: int
    pool: int | None = None
    ranks: int = 1
    others: int = 0
    kind: str = CPU
    devices: int = 1

    def layouts(self, wanted: LayoutRequest) -> Iterator[ReplicaLayout]:
        """See `DevicePool`."""
        replicas = wanted.replicas or 1
        check_pool(wanted, replicas, None, "one replica in the fleet file; give `replicas: 2` or more")
        yield ReplicaLayout(replicas, wanted.stages or wanted.least_stages, self.ranks, wanted.rolling)

    def place(self, wanted: LayoutRequest, layout: ReplicaLayout) -> SimulatedLayout:
        """See `DevicePool`."""
        units = layout.replicas + self.others
        ranks = layout.stages * self.ranks
        # Engines of both phases have as many threads as leave the others as many, but one at least. Where that is more
        # than there are cores, units slow each other down while they compute; the ranks of one unit always do.
        threads = max(1, self.cores // units // ranks)
        asked = replace(ModelDemand.of(wanted.demand), ranks=ranks, stages=layout.stages, threads=threads)
        try:
            plan = plan_unit([asked], self.machine, self.cores, self.pool, units=units)
        except PlanError as error:
            raise NoPlaceError(str(error)) from None
        memory = sum([HostMemory.of(plan, [asked])] * layout.replicas, HostMemory())
        if memory.total > self.machine.memory_bytes:
            raise NoPlaceError(
                f"{layout.words} need {format_size(memory.weights)} for weights and {format_size(memory.kv)} for KV, "
                f"and the memory is {format_size(self.machine.memory_bytes)}"
            )
        return on_cores(layout, asked, plan)


def on_cores(layout: ReplicaLayout, demand: ModelDemand, unit: UnitPlan) -> SimulatedLayout:
    """A layout in detail, each replica of which has a unit that is planned so."""
    (model,) = unit.models
    weights = demand.architecture.weight_bytes(demand.dtype)
    return SimulatedLayout(
        layout,
        EngineShape(CPU, demand.tensor_parallel, model.share / demand.ranks, demand.dtype),
        model.table.block_tokens,
        (model.table.num_blocks - 1,) * layout.stages,
        unit.pool_bytes,
        weights // demand.ranks,
        links=(link_of(device(CPU), 1),) * (layout.stages - 1),
        max_len=model.max_len,
    )


def cpu_pool(machine: Machine, cores: int | str, pool: int | str, ranks: int = 1) -> CpuPool:
    """The machine as the fleet file's `cluster.cores` and `kv_pool.size` leave it."""
    return CpuPool(
        machine,
        machine.cores if cores == AUTO else int(cores),
        None if pool == AUTO else int(pool),
        ranks,
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a placement does not say of the devices: `rules` for the memory of GPUs, bytes per second of the `network`
    between their machines, the `machine` whose CPU units may be on, and how engines have shares of a GPU."""

    rules: MemoryRules
    network: float = NETWORK
    machine: CpuPool | None = None
    sharing: ShareRules = SHARED
