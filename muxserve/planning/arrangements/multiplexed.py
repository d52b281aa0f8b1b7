"""An engine for prefill and one for decode, on shares of the same devices, which models may share, too (MuxServe)."""

from __future__ import annotations

from dataclasses import replace

from muxserve.config import Fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.arrangements.base import (
    Arrangement,
    DevicePool,
    GpuDevices,
    NoPlaceError,
    ReplicaLayout,
    SimulatedLayout,
    Wanted,
    fleet_model,
    single_stage,
)
from muxserve.simulator import SimulationError, SimUnit, sim_unit
from muxserve.spec import PolicyName
from placement import ModelPlan
from placement.cluster import PlacedModel, PlacedUnit


class MultiplexedArrangement(Arrangement):
    """See the module."""

    name = "multiplexed"
    dedicated = False

    def policy(self, fleet: Fleet) -> PolicyName:
        """See `Arrangement`."""
        return fleet.policy

    def on_gpus(self, pool: GpuDevices, wanted: Wanted, layout: ReplicaLayout) -> SimulatedLayout:
        """See `Arrangement`."""
        return replace(single_stage(pool, wanted, layout, pool.rules), blocks=())

    def on_cpu(self, place: SimulatedLayout, model: ModelPlan, units: int, ranks: int) -> SimulatedLayout:
        """See `Arrangement`."""
        # A replica's engines take what their threads can use, beside those of the others; units of other models have
        # their parts.
        share = min(model.share, place.layout.replicas / units) / ranks
        return replace(place, prefill_share=model.share, decode_share=model.share, cost_share=share)

    def trial_unit(
        self, wanted: Wanted, pool: DevicePool, place: SimulatedLayout, latency: LatencyModel, rate: float
    ) -> SimUnit:
        """See `Arrangement`."""
        demand = wanted.demand
        prefill, decode = pool.shares(replace(demand, rate=rate), place, latency)
        models = (PlacedModel(demand.name, rate, prefill, decode),)
        unit = PlacedUnit("unit", place.shape.device, tuple(range(place.layout.tp)), models, place.kv_bytes)
        try:
            simulated = sim_unit(unit, {demand.name: fleet_model(demand)})
        except SimulationError as error:
            raise NoPlaceError(str(error)) from None
        if place.cost_share is None:
            return simulated
        return replace(simulated, models=tuple(replace(each, cost_share=place.cost_share) for each in simulated.models))

    def unit_words(self, unit: PlacedUnit) -> str:
        """See `Arrangement`."""
        return ""

    def plan_keys(self, unit: PlacedUnit) -> dict[str, object]:
        """See `Arrangement`."""
        return {}
