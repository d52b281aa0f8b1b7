"""Simulates a fleet on a workload: discrete events on a virtual clock, under the live unit's own ledger and policies.

units = units_of(placement, models, mode_of("muxserve"))
result = simulate(units, workload, latency_model)              # result.records: list[RequestRecord]
"""

from muxserve.simulator.alone import AloneSimulation
from muxserve.simulator.clock import SimulationError
from muxserve.simulator.fleet import Rules, coupled, simulate
from muxserve.simulator.modes import MODES, Mode, adapt, lone_unit, mode_of, sim_unit, units_of
from muxserve.simulator.moves import MigrationCosts
from muxserve.simulator.replicas import ReplicaRules
from muxserve.simulator.result import FleetResult, ReplicasResult, ResidencyResult, UnitResult
from muxserve.simulator.ring import RingRules
from muxserve.simulator.setup import Link, Options, Pipeline, SimModel, SimResidency, SimUnit, WakeContention
from muxserve.simulator.timeline import write_timeline

__all__ = [
    "MODES",
    "AloneSimulation",
    "FleetResult",
    "Link",
    "MigrationCosts",
    "Mode",
    "Options",
    "Pipeline",
    "ReplicaRules",
    "ReplicasResult",
    "ResidencyResult",
    "RingRules",
    "Rules",
    "SimModel",
    "SimResidency",
    "SimUnit",
    "SimulationError",
    "UnitResult",
    "WakeContention",
    "adapt",
    "coupled",
    "lone_unit",
    "mode_of",
    "sim_unit",
    "simulate",
    "units_of",
    "write_timeline",
]
