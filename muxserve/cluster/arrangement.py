"""How a model of the fleet file is laid out over time and stages, as a unit's processes are told it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from muxserve.config import AUTO, Fleet, Model, Problem
from muxserve.costs.architecture import split_layers
from muxserve.spec import Batching, PhasesName, PolicyName

# With it vLLM splits the layers of every model in a process as it says, whatever stages there are.
PARTITION = "VLLM_PP_LAYER_PARTITION"
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


def partition_problem(
    fleet: Fleet, model: Model, layers: int, stages: int, environ: Mapping[str, str]
) -> Problem | None:
    """Why the layers would not be split as the pools are sized for: vLLM is told otherwise by its environment variable,
    which all engines inherit."""
    told = environ.get(PARTITION)
    if told is None or stages > layers:
        return None
    split = ",".join(map(str, split_layers(layers, stages)))
    if told.replace(" ", "") == split:
        return None
    over = f"its {layers} layers are over {stages} stages as {split}" if stages > 1 else f"it has one stage of {layers}"
    message = f"the environment variable {PARTITION} is {told!r}, which vLLM would split every model by, but {over}"
    return fleet.model_problem(model.name, "stages", f"{message}; unset it")
