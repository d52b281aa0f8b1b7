"""How a model of the fleet file is laid out over time and stages, as a unit's processes are told it. Pure."""

from __future__ import annotations

from muxserve.config import AUTO, Fleet, Model, Problem
from muxserve.deployment import Batching, PhasesName, PolicyName

# Of a pipeline on CPU when the fleet file leaves it open.
CPU_STAGES = 2


def phases_of(model: Model) -> PhasesName:
    """The arrangement of a model; what nobody has chosen yet (`auto`) is multiplexed."""
    return "multiplexed" if model.phases == AUTO else model.phases


def alone(model: Model) -> bool:
    """Whether each replica of the model has a unit to itself: one engine of both phases needs no other beside it."""
    return phases_of(model) != "multiplexed"


def policy_of(fleet: Fleet) -> PolicyName:
    """The policy of a unit with the models of `fleet`."""
    phases = phases_of(fleet.models[0])
    return fleet.policy if phases == "multiplexed" else phases


def batching_of(model: Model) -> Batching:
    """What a step of the model's engines may hold; only pipelined ones leave that not to vLLM."""
    if phases_of(model) != "pipelined":
        return Batching()
    given = model.batching
    return Batching(given.policy, given.iterations, given.max_prefill, given.min_prefill, given.kv_threshold)


def stages_of(fleet: Fleet, model: Model, layers: int, gpus: int) -> tuple[int, Problem | None]:
    """Stages that a replica's layers are split over, and why that cannot be.

    Args:
        layers: of the model.
        gpus: of the unit; 0: it is on CPU.
    """
    if phases_of(model) != "pipelined":
        return 1, None
    if model.stages == AUTO:
        return gpus or min(CPU_STAGES, layers), None
    if gpus and gpus % model.stages:
        message = f"{model.stages} stages do not divide the {gpus} GPUs of a unit evenly"
        hint = "those of a stage split its tensors; give a divisor, or another number of GPUs"
        return model.stages, fleet.model_problem(model.name, "stages", f"{message} ({hint})")
    return model.stages, None
