"""What a GPU has to do with the end of a part of a unit, in words."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muxserve.cluster.events import PartId
from muxserve.deployment import GpuDeployment
from muxserve.gpu import last_words, nvml

_NVML_SECONDS = 5.0  # a lost GPU may keep the driver busy
_ON_GPUS = ("weights", "engine", "memory", "mps")


async def explain(gpu: GpuDeployment | None, part: PartId, tail: Sequence[str]) -> str:
    """What the driver says of the unit's GPUs, or else what the last lines of the part's log mean; empty if neither
    tells anything, or the part uses no GPU."""
    if gpu is None or part.kind not in _ON_GPUS:
        return ""
    try:
        found = await asyncio.wait_for(asyncio.to_thread(nvml.machine), _NVML_SECONDS)
    except TimeoutError:
        return "the GPU driver does not answer"
    for uuid in gpu.uuids:
        state = found.by_uuid(uuid)
        if found.gpus and (state is None or state.fault):
            number = uuid if state is None else str(state.index)
            return f"GPU {number}: {state.fault if state else 'it is no longer there'}"
    return last_words.explain(tail)
