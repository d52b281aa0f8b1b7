"""A placement as the simulator plays it: its rolling and pipelined units, and by what replicas work together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from muxserve.cluster.rules import levels_of, migration_of, scaling_of
from muxserve.config import NETWORK, Fleet
from muxserve.costs.devices import device
from muxserve.planning.phases_ground import CPU, CpuGround, GpuGround
from muxserve.planning.phases_layout import Layout, NoPlaceError, Place, Wanted, wanted_of
from muxserve.planning.phases_play import ring_rules, unit_of
from muxserve.replicas.priorities import Levels
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.scaling import ScalingRules as RollingScaling
from muxserve.simulator import (
    FleetModel,
    MigrationCosts,
    Mode,
    ReplicaRules,
    RingRules,
    Rules,
    SimUnit,
    adapt,
    sim_unit,
    units_of,
)
from placement.cluster import PlacedUnit, Placement
from placement.demand import Demand
from placement.memory import MemoryRules

# Rolling replicas that prefill for less of their time than this are one too many, as for the live global scheduler.
_IDLE = 0.1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a placement does not say of the devices: `rules` for the memory of GPUs, bytes per second of the `network`
    between their machines, and the `machine` whose CPU units may be on."""

    rules: MemoryRules
    network: float = NETWORK
    machine: CpuGround | None = None


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is simulated of a fleet: a placement, the models that its multiplexed units serve, the units of models in
    other arrangements (`others`), and by what replicas of a model work together, by its name. `spares` are units that
    it may get beside those that it has, before a mode has changed them. `origin` says where the placement comes from,
    for the user."""

    placement: Placement
    models: Mapping[str, FleetModel]
    others: tuple[SimUnit, ...] = ()
    rules: Rules = field(default_factory=dict)
    spares: Mapping[str, tuple[SimUnit, ...]] = field(default_factory=dict)
    origin: str = ""

    @property
    def about(self) -> str:
        """Where the placement comes from, and what it is."""
        units = "; ".join(
            f"{unit.name} ({len(unit.devices)} x {unit.device}): {', '.join(member.model for member in unit.models)}"
            for unit in self.placement.units
        )
        return f"{self.origin}: {units}"

    @property
    def longest(self) -> dict[str, int]:
        """Tokens of the longest sequence of each model in another arrangement."""
        return {m.name: m.max_len for unit in self.others for m in unit.models if m.max_len is not None}

    def units(self, mode: Mode) -> list[SimUnit]:
        """All units. What a mode takes away is taken from multiplexed ones.

        Raises:
            SimulationError: as `units_of`.
        """
        return [*units_of(self.placement, self.models, mode), *self.others]

    def rules_of(self, mode: Mode) -> Rules:
        """By what replicas work together in that mode."""
        found: dict[str, ReplicaRules | RingRules] = {}
        for name, each in self.rules.items():
            spares = self.spares.get(name, ())
            found[name] = replace(
                each, spares=tuple(adapt(u, mode) if u.phases == "multiplexed" else u for u in spares)
            )
        return found


def fleet_models(demands: Sequence[Demand], lengths: Mapping[str, int]) -> dict[str, FleetModel]:
    """The models as the simulator wants them. `lengths` are of the longest sequences, where they are not the models'
    own."""
    return {
        d.name: FleetModel(
            d.name, d.architecture, d.dtype, d.max_num_seqs, d.max_num_batched_tokens, lengths.get(d.name)
        )
        for d in demands
    }


def simulated_of(
    placement: Placement, fleet: Fleet, demands: Sequence[Demand], lengths: Mapping[str, int], around: Surroundings
) -> Simulated:
    """A placement of the fleet's models, of which `demands` are; `lengths` as of `fleet_models`.

    Raises:
        NoPlaceError: a unit has no room for its model.
    """
    by_model: dict[str, list[PlacedUnit]] = {}
    for unit in placement.units:
        for placed in unit.models:
            by_model.setdefault(placed.model, []).append(unit)
    by_name = {demand.name: demand for demand in demands}
    models = fleet_models(demands, lengths)
    scaling, free = scaling_of(fleet), _Free(placement)
    others: list[SimUnit] = []
    rules: dict[str, ReplicaRules | RingRules] = {}
    spares: dict[str, tuple[SimUnit, ...]] = {}
    for name, mine in by_model.items():
        first = mine[0]
        more = free.take(first, scaling[name].maximum - len(mine)) if name in scaling else []
        if first.phases == "multiplexed":
            if len(mine) > 1 or name in scaling:
                rules[name] = _replica_rules(fleet, scaling.get(name), around)
            only = tuple(placed for placed in first.models if placed.model == name)
            alone = replace(first, models=only)
            spares[name] = tuple(
                sim_unit(replace(alone, name=f"{name}+{number}", devices=devices), models)
                for number, devices in enumerate(more, 1)
            )
            continue
        wanted = wanted_of(fleet.model(name), by_name[name], free=False)
        places = [_place(placement, unit, len(mine), wanted, around) for unit in mine]
        made = [unit_of(wanted, place, unit.name, unit.devices) for place, unit in zip(places, mine, strict=True)]
        others += made
        spares[name] = tuple(
            replace(made[0], name=f"{name}+{number}", devices=devices) for number, devices in enumerate(more, 1)
        )
        if first.phases == "rolling":
            if wanted.demand.slo_ttft is None or wanted.demand.slo_tpot is None:
                raise NoPlaceError(f"{name} is rolling, which needs slo.ttft_ms and slo.tpot_ms")
            rules[name] = _with_scaling(ring_rules(wanted), fleet, scaling.get(name), around)
        elif len(mine) > 1 or name in scaling:
            rules[name] = _replica_rules(fleet, scaling.get(name), around)
    return Simulated(placement, models, tuple(others), rules, spares)


class _Free:
    """Devices of a placement that no unit has."""

    def __init__(self, placement: Placement) -> None:
        taken = {number for unit in placement.units for number in unit.devices}
        kinds = [node.device for node in placement.cluster.nodes for _ in range(node.count)]
        self._left = [(number, kind) for number, kind in enumerate(kinds) if number not in taken]

    def take(self, like: PlacedUnit, count: int) -> list[tuple[int, ...]]:
        """Devices for so many more such units, as far as there are any. Those of a CPU share it."""
        if like.device == CPU:
            return [like.devices] * max(0, count)
        found = []
        for _ in range(count):
            mine = [number for number, kind in self._left if kind == like.device][: len(like.devices)]
            if len(mine) < len(like.devices):
                break
            self._left = [each for each in self._left if each[0] not in mine]
            found.append(tuple(mine))
        return found


def _levels(fleet: Fleet) -> Levels:
    return Levels(levels_of(fleet), fleet.default_level)


def _copying(fleet: Fleet, around: Surroundings) -> MigrationCosts:
    limit = fleet.migration.bandwidth if fleet.migration is not None else None
    return MigrationCosts(bandwidth=min(around.network, limit or around.network))


def _replica_rules(fleet: Fleet, scaling: ScalingRules | None, around: Surroundings) -> ReplicaRules:
    return ReplicaRules(
        migration=migration_of(fleet),
        scaling=scaling,
        levels=_levels(fleet),
        copying=_copying(fleet, around),
    )


def _with_scaling(rules: RingRules, fleet: Fleet, scaling: ScalingRules | None, around: Surroundings) -> RingRules:
    rolling = None
    if scaling is not None:
        least, most = max(1, scaling.minimum), scaling.maximum
        rolling = RollingScaling(patience=scaling.hold, idle=_IDLE, least=least, most=most)
    return replace(
        rules,
        scaling=rolling,
        migration=migration_of(fleet),
        levels=_levels(fleet),
        copying=_copying(fleet, around),
    )


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
