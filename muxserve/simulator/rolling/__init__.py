"""Prefill and decode in time and space, simulated: EcoServe's rolling prefill, whose policies are those of
`muxserve.rolling`, beside what it is compared with. Every step is an event.

`Rolling` (EcoServe), `Independent` (vLLM's prefill priority; Sarathi's chunks with a budget) and `Split` (DistServe's
instances within a node, MoonCake's over a network) are arrangements of engines; `run` plays a workload on one.
"""

from muxserve.simulator.rolling.chunked import largest_budget
from muxserve.simulator.rolling.clock import Arrangement, StuckError
from muxserve.simulator.rolling.independent import Independent
from muxserve.simulator.rolling.result import PhasedResult, met, times
from muxserve.simulator.rolling.rolling import Rolling, RollingOptions
from muxserve.simulator.rolling.split import Split, SplitOptions, division

__all__ = [
    "Arrangement",
    "Independent",
    "PhasedResult",
    "Rolling",
    "RollingOptions",
    "Split",
    "SplitOptions",
    "StuckError",
    "division",
    "largest_budget",
    "met",
    "times",
]
