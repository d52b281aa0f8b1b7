"""A plan file as what `muxserve deploy` can serve: one unit on the CPU of this machine."""

from __future__ import annotations

import os

from muxserve.config import Fleet, FleetError, Problem
from muxserve.planning.cpu import CPU
from muxserve.planning.planfile import load_plan


def with_plan(fleet: Fleet, path: str | os.PathLike[str], cores: int) -> Fleet:
    """The fleet as the plan file at `path` has it on a machine of `cores`: size of the pool, rates, and threads (a
    unit's prefill and decode engines run on the same number; the larger share counts).

    Raises:
        FleetError: the plan is not one of this fleet, or not for one machine without GPUs.
    """
    placement = load_plan(path, fleet)
    problem = None
    gpus = sorted({unit.device for unit in placement.units} - {CPU})
    if gpus:
        problem = f"the plan is for {', '.join(gpus)}; this version serves on CPU"
    elif len(placement.units) != 1:
        problem = f"the plan has {len(placement.units)} units; this version serves one unit on one machine"
    if problem:
        raise FleetError([Problem(problem, str(path), 1)])
    (unit,) = placement.units
    planned = {each.model: each for each in unit.models}
    models = []
    for model in fleet.models:
        place = planned[model.name]
        threads = max(1, min(cores, round(max(place.prefill_share, place.decode_share) * cores)))
        models.append(model.model_copy(update={"rate": place.rate, "threads": threads}))
    pool = fleet.kv_pool.model_copy(update={"size": unit.kv_bytes})
    return fleet.model_copy(update={"models": models, "kv_pool": pool})
