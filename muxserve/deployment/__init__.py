"""What the controller decided and every process is told: units, the fleet of them, addresses and keys.

Written as JSON before anything starts. The files hold no secrets of clients other than the gateway's API keys, and are
readable by their owner only.
"""

from muxserve.deployment.fleet import (
    FleetDeployment,
    Suspect,
    UnitEntry,
    fleet_of,
    load_fleet_deployment,
    save_fleet,
)
from muxserve.deployment.network import Keys, Listen
from muxserve.deployment.unit import (
    Batching,
    Deployment,
    EnginePhase,
    GatewayDeployment,
    GpuDeployment,
    GrammarLimits,
    ModelDeployment,
    PhasesName,
    PolicyName,
    PoolDeployment,
    PoolIpc,
    SmSharing,
    WatchdogRules,
    load,
    save,
)

__all__ = [
    "Batching",
    "Deployment",
    "EnginePhase",
    "FleetDeployment",
    "GatewayDeployment",
    "GpuDeployment",
    "GrammarLimits",
    "Keys",
    "Listen",
    "ModelDeployment",
    "PhasesName",
    "PolicyName",
    "PoolDeployment",
    "PoolIpc",
    "SmSharing",
    "Suspect",
    "UnitEntry",
    "WatchdogRules",
    "fleet_of",
    "load",
    "load_fleet_deployment",
    "save",
    "save_fleet",
]
