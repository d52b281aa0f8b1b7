"""Many instances of one model, simulated: continuous batching in each, a global scheduler over them, live migration
between them, and instances that come and go. What decides is `muxserve.replicas`, the very objects that serve.

An instance steps as vLLM does without chunked prefill, which is how Llumnix's evaluation ran it; every step is an
event. `cluster.simulate` runs a workload, `setup` has what can be chosen.
"""

from muxserve.simulator.instances.cluster import Cluster, simulate
from muxserve.simulator.instances.result import ClusterResult
from muxserve.simulator.instances.setup import InstanceSpec, MigrationCosts, ReplicaOptions

__all__ = ["Cluster", "ClusterResult", "InstanceSpec", "MigrationCosts", "ReplicaOptions", "simulate"]
