"""Which costs a plan was made with, for each model where it has a place."""

from __future__ import annotations

from collections.abc import Sequence

from muxserve.costs.latency import EngineShape, LatencyModel
from muxserve.costs.sources import CostsUsed, source_of
from muxserve.planning.candidates.device_pool import CPU
from placement.cluster import Placement
from placement.demand import Demand


def costs_used(latency: LatencyModel, demands: Sequence[Demand], placement: Placement) -> CostsUsed:
    """The sources of the costs of all models that have a place."""
    by_name = {demand.name: demand for demand in demands}
    found = {}
    for unit in placement.units:
        tp = 1 if unit.device == CPU else len(unit.devices) // unit.stages
        for placed in unit.models:
            demand = by_name[placed.model]
            machines = placement.cluster.machines(unit.devices) if unit.device != CPU and unit.stages == 1 else 1
            shape = EngineShape(unit.device, tp, 1.0, demand.dtype, demand.graphs, machines)
            found[demand.name, unit.device] = source_of(latency, demand.architecture, shape)
    return CostsUsed(tuple((name, device, source) for (name, device), source in found.items()))
