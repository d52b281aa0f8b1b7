"""Arrangements for models that leave them open, when the fleet is about to be served without a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muxserve.cluster.checkpoints import Hub
from muxserve.config import AUTO, Fleet
from muxserve.gpu.nvml import Gpu
from placement import Machine


def arranged_by_simulation(
    fleet: Fleet, machine: Machine, gpus: Sequence[Gpu], hub: Hub, tell: Callable[[float, str], None]
) -> tuple[Fleet, list[str]]:
    """`fleet` with an arrangement for every model that says `phases: auto`, and why, in words.

    Args:
        gpus: those that it is served on; none: the CPU.
        tell: told how far it is, a part in 0..1, and what is being simulated; it takes seconds for each model.

    Raises:
        muxserve.config.FleetError: a model cannot be served.
    """
    if all(model.phases != AUTO for model in fleet.models):
        return fleet, []
    # Loads the simulator.
    from muxserve.planning.phases_fleet import choose_at_deploy, with_choices

    chosen = choose_at_deploy(fleet, machine, gpus, hub, tell=tell)
    reasons = [
        f"{model.name} is {chosen[model.name].phases}: {chosen[model.name].reason}"
        if model.name in chosen
        else f"{model.name} is multiplexed: nothing is known of the speed of a {gpus[0].name}"
        for model in fleet.models
        if model.phases == AUTO
    ]
    return with_choices(fleet, chosen), reasons
