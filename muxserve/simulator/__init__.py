"""Simulates a fleet on a workload: discrete events on a virtual clock, under the live unit's own ledger and policies.

units = units_of(placement, models, mode_of("muxserve"))
result = simulate(units, workload, latency_model)              # result.records: list[RequestRecord]
"""

from muxserve.simulator.alone import Alone
from muxserve.simulator.apart import Apart, ApartResult, PipelinedModel, Replica, RollingModel
from muxserve.simulator.fleet import FleetResult, simulate
from muxserve.simulator.modes import MODES, FleetModel, Mode, adapt, mode_of, sim_unit, units_of
from muxserve.simulator.setup import Options, Overheads, SimModel, SimUnit
from muxserve.simulator.timeline import write_timeline
from muxserve.simulator.world import SimulationError, UnitResult

__all__ = [
    "MODES",
    "Alone",
    "Apart",
    "ApartResult",
    "FleetModel",
    "FleetResult",
    "Mode",
    "Options",
    "Overheads",
    "PipelinedModel",
    "Replica",
    "RollingModel",
    "SimModel",
    "SimUnit",
    "SimulationError",
    "UnitResult",
    "adapt",
    "mode_of",
    "sim_unit",
    "simulate",
    "units_of",
    "write_timeline",
]
