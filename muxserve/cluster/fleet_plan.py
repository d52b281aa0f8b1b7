"""From planned units to what the controller starts and what every process of the fleet is told."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import msgspec

from muxserve.cluster.deploying import gateway_of, unit_spec_of
from muxserve.cluster.plan import FleetPlan
from muxserve.cluster.rules import levels_of, migration_of, rolling_of, scaling_of, watchdog_of
from muxserve.cluster.units import PlannedUnit
from muxserve.config import Fleet
from muxserve.spec import FleetSpec, Keys, ModelSpec, UnitEntry


def planned_unit(
    plan: FleetPlan, run_dir: str, host: str | None = None, port: int | None = None, keys: Keys | None = None
) -> PlannedUnit:
    """What starts a planned unit whose models are all local.

    Args:
        run_dir: of the fleet; the unit's is below it.
        host, port: of the endpoint, instead of the fleet file's.
        keys: the fleet's, if it is reached from other machines.
    """
    unit_spec = unit_spec_of(plan, os.path.join(run_dir, plan.name), host, port)
    unit_spec = msgspec.structs.replace(unit_spec, keys=keys)
    return PlannedUnit(unit_spec, plan.served, plan.gpu_plan(), rolling_of(plan))


def fleet_spec_of(
    fleet: Fleet,
    units: Sequence[PlannedUnit],
    run_dir: str,
    host: str | None = None,
    port: int | None = None,
    keys: Keys | None = None,
    tokens_host: str = "",
) -> FleetSpec:
    """The fleet as it is at the start. Arguments are those of `planned_unit`; `tokens_host` is the address under which
    engines of other machines reach the gateways."""
    return FleetSpec(
        run_dir=run_dir,
        gateway=gateway_of(fleet, host, port),
        models=offered((unit.unit_spec.models for unit in units), [model.name for model in fleet.models]),
        units=[
            UnitEntry(unit.unit_spec, unit.unit_spec.unit_address, unit.unit_spec.migrator_address, list(unit.serves))
            for unit in units
        ],
        scaling=scaling_of(fleet),
        migration=migration_of(fleet),
        levels=levels_of(fleet),
        default_level=fleet.default_level,
        key_levels=fleet.gateway.key_priorities,
        keys=keys,
        tokens_host=tokens_host,
        watchdog=watchdog_of(fleet),
        # Replicas of a model are alike, so that any of them says how long prefills take.
        rolling={model.name: unit.rolling for unit in units if unit.rolling for model in unit.unit_spec.models},
    )


def offered(units: Iterable[Iterable[ModelSpec]], order: Sequence[str]) -> list[ModelSpec]:
    """The models as the endpoint offers them, in that order: where replicas differ, the one with the shortest length.
    Models that no unit has are left out."""
    smallest: dict[str, ModelSpec] = {}
    for models in units:
        for model in models:
            known = smallest.get(model.name)
            if known is None or model.max_len < known.max_len:
                smallest[model.name] = model
    return [smallest[name] for name in order if name in smallest]
