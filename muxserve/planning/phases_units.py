"""Rolling and pipelined models of a placement, as the simulator plays them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from muxserve.config import NETWORK, Fleet
from muxserve.costs.devices import device
from muxserve.planning.phases_ground import CPU, CpuGround, GpuGround
from muxserve.planning.phases_layout import Layout, NoPlaceError, Place, Wanted, wanted_of
from muxserve.planning.phases_play import instance_of, pipeline_of, rolling_options
from muxserve.simulator import Apart, PipelinedModel, Replica, RollingModel
from muxserve.simulator.rolling import RollingOptions
from placement.cluster import PlacedUnit, Placement
from placement.demand import Demand
from placement.memory import MemoryRules


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a placement does not say of the devices: `rules` for the memory of GPUs, bytes per second of the `network`
    between their machines, and the `machine` whose CPU units may be on."""

    rules: MemoryRules
    network: float = NETWORK
    machine: CpuGround | None = None


def apart_of(placement: Placement, fleet: Fleet, demands: Sequence[Demand], around: Surroundings) -> list[Apart]:
    """The models of a placement that have units to themselves, in the order of their first units.

    Args:
        demands: of the fleet's models.

    Raises:
        NoPlaceError: a unit has no room for its model.
    """
    units: dict[str, list[PlacedUnit]] = {}
    for unit in placement.units:
        if unit.phases != "multiplexed":
            units.setdefault(unit.models[0].model, []).append(unit)
    by_name = {demand.name: demand for demand in demands}
    found: list[Apart] = []
    for name, mine in units.items():
        wanted = wanted_of(fleet.model(name), by_name[name], free=False)
        places = [_place(placement, unit, len(mine), wanted, around) for unit in mine]
        replicas = tuple(Replica(unit.name, unit.devices) for unit in mine)
        max_len = min(place.max_len or wanted.longest for place in places)
        if mine[0].phases == "rolling":
            found.append(
                RollingModel(name, replicas, instance_of(wanted, places[0]), _rolling(wanted, len(mine)), max_len)
            )
            continue
        found.append(
            PipelinedModel(
                name,
                replicas,
                tuple(pipeline_of(wanted, place) for place in places),
                wanted.budget,
                max_len,
                wanted.demand.max_num_batched_tokens,
                wanted.demand.slo_tpot,
            )
        )
    return found


def _rolling(wanted: Wanted, replicas: int) -> RollingOptions:
    if wanted.demand.slo_ttft is None or wanted.demand.slo_tpot is None:
        raise NoPlaceError(f"{wanted.demand.name} is rolling, which needs slo.ttft_ms and slo.tpot_ms")
    return rolling_options(wanted, replicas)


def _place(placement: Placement, unit: PlacedUnit, replicas: int, wanted: Wanted, around: Surroundings) -> Place:
    """That unit in detail, with the page pool that the placement gives it."""
    name = wanted.demand.name
    if unit.device == CPU:
        assert around.machine is not None, "units on a CPU are on some machine"
        machine = replace(around.machine, pool=unit.kv_bytes, others=len(placement.units) - replicas)
        try:
            return machine.place(wanted, Layout(unit.phases, replicas, unit.stages, machine.ranks))
        except NoPlaceError as error:
            raise NoPlaceError(f"{name}: {error}") from None
    tp = len(unit.devices) // unit.stages
    nodes = tuple(_machines(placement, unit))
    if any(count % tp for count in nodes):
        raise NoPlaceError(f"{name}: the GPUs of a stage of {unit.name} are not all on one machine")
    ground = GpuGround(unit.device, nodes, device(unit.device).memory_bytes, around.rules, around.network)
    try:
        place = ground.place(wanted, Layout(unit.phases, replicas, unit.stages, tp))
    except NoPlaceError as error:
        raise NoPlaceError(f"{name}: {error}") from None
    blocks = tuple(max(1, count * unit.kv_bytes // place.kv_bytes) for count in place.blocks)
    return replace(place, blocks=blocks, kv_bytes=unit.kv_bytes)


def _machines(placement: Placement, unit: PlacedUnit) -> Iterator[int]:
    """How many of a unit's devices, in their order, are on one machine, and then on the next."""
    homes = [number for number, node in enumerate(placement.cluster.nodes) for _ in range(node.count)]
    for _, run in groupby(homes[number] for number in unit.devices):
        yield len(list(run))
