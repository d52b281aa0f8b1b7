"""What the controller decided and every process is told: units, the fleet of them, addresses and keys.

Written as JSON before anything starts. The files hold no secrets of clients other than `gateway.api_keys`, and are
readable by their owner only.
"""

from muxserve.spec.fleet import (
    FleetSpec,
    ResidencySpec,
    Suspect,
    TenantSpec,
    UnitEntry,
    fleet_of,
    load_fleet,
    offered,
    save_fleet,
)
from muxserve.spec.network import Keys, Listen
from muxserve.spec.unit import (
    SHARES_PER_LEASE,
    UNIT_FILE,
    AdapterSlots,
    Batching,
    EnginePhase,
    GatewaySpec,
    GpuSpec,
    GrammarLimits,
    ModelSpec,
    PhasesName,
    PolicyName,
    PoolIpc,
    PoolSpec,
    ResponsesSpec,
    SimulatedSpec,
    SmSharing,
    UnitSpec,
    WatchdogRules,
    load,
    save,
)

__all__ = [
    "SHARES_PER_LEASE",
    "UNIT_FILE",
    "AdapterSlots",
    "Batching",
    "EnginePhase",
    "FleetSpec",
    "GatewaySpec",
    "GpuSpec",
    "GrammarLimits",
    "Keys",
    "Listen",
    "ModelSpec",
    "PhasesName",
    "PolicyName",
    "PoolIpc",
    "PoolSpec",
    "ResidencySpec",
    "ResponsesSpec",
    "SimulatedSpec",
    "SmSharing",
    "Suspect",
    "TenantSpec",
    "UnitEntry",
    "UnitSpec",
    "WatchdogRules",
    "fleet_of",
    "load",
    "load_fleet",
    "offered",
    "save",
    "save_fleet",
]
