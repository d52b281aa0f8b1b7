"""What jobs cost: seconds of prefill and decode steps, bytes of weights and KV. Pure; imports nothing live.

architecture = read_architecture(config)                       # of a checkpoint's config.json
costs = latency_model.engine(architecture, placement)          # of one engine
costs.prefill(tokens=512, pairs=512 * 513 // 2, sequences=1)   # seconds

`Roofline` (costs.roofline) and `ProfileModel` (costs.measured, over a file that costs.profile reads) are the latency
models. Names of devices are in costs.devices.
"""

from muxserve.costs.architecture import ModelArchitecture, UnsupportedModelError, read_architecture
from muxserve.costs.latency import CostError, Decode, EngineCosts, EngineShape, LatencyModel, Load

__all__ = [
    "CostError",
    "Decode",
    "EngineCosts",
    "EngineShape",
    "LatencyModel",
    "Load",
    "ModelArchitecture",
    "UnsupportedModelError",
    "read_architecture",
]
