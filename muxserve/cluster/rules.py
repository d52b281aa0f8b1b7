"""From a fleet file to the rules by which replicas are started, stopped, chosen and relieved."""

from __future__ import annotations

from muxserve.config import Fleet
from muxserve.deployment import WatchdogRules
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import Level
from muxserve.replicas.scaling import ScalingRules


def scaling_of(fleet: Fleet) -> dict[str, ScalingRules]:
    """Rules by model, of those whose number of replicas changes by itself."""
    return {
        model.name: ScalingRules(
            minimum=r.min,
            maximum=r.max,
            low=r.low,
            high=r.high,
            hold=r.hold,
            idle_seconds=r.idle,
            wake_limit=r.wake,
        )
        for model in fleet.models
        if (r := model.replicas).scales
    }


def migration_of(fleet: Fleet) -> MigrationRules | None:
    """By which running requests move; None: they stay where they are."""
    given = fleet.migration
    if given is None:
        return None
    return MigrationRules(given.source_below, given.destination_above, given.in_flight)


def watchdog_of(fleet: Fleet) -> WatchdogRules | None:
    """When a silent process is suspect, and when it hangs; None: nobody looks."""
    given = fleet.watchdog
    return None if given is None else WatchdogRules(given.suspect, given.hung)


def levels_of(fleet: Fleet) -> tuple[Level, ...]:
    """The priority levels, from the highest."""
    levels = [Level(name, level.rank, level.target_load) for name, level in fleet.priorities.items()]
    return tuple(sorted(levels, key=lambda level: -level.rank))
