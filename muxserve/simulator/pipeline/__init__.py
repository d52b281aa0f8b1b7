"""One engine whose layers are spread over several stages, simulated: micro-batches follow each other through the
stages, and what each of them holds is decided by a `TokenBudget` of `muxserve.scheduling.token_throttling`, the object
that decides in a live engine.

`pipeline.simulate` runs a workload, `setup` has what can be chosen, `stages` what each stage costs and can hold.
"""

from muxserve.simulator.pipeline.pipeline import Pipeline, simulate
from muxserve.simulator.pipeline.result import PipelineResult
from muxserve.simulator.pipeline.setup import PipelineSpec
from muxserve.simulator.pipeline.stages import kv_blocks
from muxserve.simulator.setup import Link

__all__ = ["Link", "Pipeline", "PipelineResult", "PipelineSpec", "kv_blocks", "simulate"]
