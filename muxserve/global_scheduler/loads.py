"""A replica's load as it is on the wire, and as the policies have it."""

from __future__ import annotations

from muxserve.replicas.views import InstanceLoad
from muxserve.wire import Load


def as_instance(unit: str, load: Load) -> InstanceLoad:
    """The load of the replica in `unit`, as the policies see it."""
    return refresh(InstanceLoad(unit, load.capacity), load)


def refresh(instance: InstanceLoad, load: Load) -> InstanceLoad:
    """Bring `instance` up to date; `terminating` and the freeness stay, since the policies decide these."""
    instance.model, instance.capacity, instance.layout = load.model, load.capacity, load.layout
    instance.used, instance.running, instance.waiting = load.used, load.running, load.waiting
    instance.head_demand, instance.queued_demand = load.head_demand, load.queued_demand
    instance.levels = load.levels
    instance.moving_in, instance.moving_out = load.moving_in, load.moving_out
    return instance


def as_load(instance: InstanceLoad) -> Load:
    """The load as other units are told it."""
    return Load(
        model=instance.model,
        capacity=instance.capacity,
        layout=instance.layout,
        used=instance.used,
        running=instance.running,
        waiting=instance.waiting,
        head_demand=instance.head_demand,
        queued_demand=instance.queued_demand,
        levels=instance.levels,
        terminating=instance.terminating,
        moving_in=instance.moving_in,
        moving_out=instance.moving_out,
    )
