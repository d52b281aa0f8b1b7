"""What running units leave of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muxserve.cluster.checkpoints import CheckpointError, Hub, architecture_of
from muxserve.config import Fleet
from muxserve.spec import UnitSpec
from placement import Machine


def left_of(machine: Machine, fleet: Fleet, units: Sequence[UnitSpec], hub: Hub) -> Machine:
    """The machine without what the weights and pools of `units` take; `fleet` declares their models."""
    pools = sum(pool.num_pages * pool.page_bytes * unit.ranks for unit in units for pool in unit.pools)
    weights = sum(_weights(fleet, unit, hub) for unit in units)
    shared = machine.shared_memory_bytes
    return replace(
        machine,
        memory_bytes=max(0, machine.memory_bytes - pools - weights),
        shared_memory_bytes=None if shared is None else max(0, shared - pools),
    )


def _weights(fleet: Fleet, unit: UnitSpec, hub: Hub) -> int:
    total = 0
    for model in unit.models:
        try:
            architecture = architecture_of(fleet.model(model.name), hub)
        except (KeyError, CheckpointError):
            continue  # removed meanwhile: its weights are gone
        total += architecture.weight_bytes(model.dtype)
    return total
