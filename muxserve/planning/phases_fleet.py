"""Arrangements for a whole fleet: on which devices each model is compared, and the fleet as it was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from muxserve.cluster.checkpoints import Hub
from muxserve.config import Fleet, Model
from muxserve.costs.latency import LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.gpu.nvml import Gpu, device_name
from muxserve.planning.fleets import demands_of
from muxserve.planning.parts import possible_units
from muxserve.planning.phases import Tell, choose_phases, silent
from muxserve.planning.phases_figures import ChosenPhases
from muxserve.planning.phases_ground import GpuGround, ground_on_cpu
from muxserve.planning.phases_layout import Ground
from placement import Machine
from placement.memory import MemoryRules


def choose_at_deploy(
    fleet: Fleet,
    machine: Machine,
    gpus: Sequence[Gpu] = (),
    hub: Hub | None = None,
    latency: LatencyModel | None = None,
    tell: Tell = silent,
) -> dict[str, ChosenPhases]:
    """The arrangement of every model that says `phases: auto`, by its name, for a fleet that is about to be served
    without a plan. Replicas are as many as the file says.

    A GPU of which no costs are known is compared as nothing: its models stay multiplexed, and are left out here.

    Args:
        machine: cores and memory of this machine, before anything is started.
        gpus: those that the fleet is served on; none: the CPU.
        latency: the roofline by default.

    Raises:
        muxserve.config.FleetError: a model's architecture cannot be had or served.
    """
    if not any(model.phases == "auto" for model in fleet.models):
        return {}
    grounds: dict[str, Ground] = {}
    for model in fleet.models:
        if model.phases == "auto":
            ground = _on_gpus(fleet, model, gpus) if gpus else _on_cpu(fleet, machine)
            if ground is None:
                return {}
            grounds[model.name] = ground
    demands = demands_of(fleet, Path(), hub, gpu=bool(gpus))
    return choose_phases(fleet, demands, grounds.__getitem__, latency or Roofline(), tell=tell)


def with_choices(fleet: Fleet, chosen: Mapping[str, ChosenPhases]) -> Fleet:
    """The fleet with these arrangements in place of `auto`; what was not chosen is multiplexed."""
    models = []
    for model in fleet.models:
        if model.phases == "auto":
            choice = chosen.get(model.name)
            update: dict[str, object] = {"phases": choice.phases if choice else "multiplexed"}
            if choice and choice.phases == "pipelined":
                update["stages"] = choice.stages
            model = model.model_copy(update=update)
        models.append(model)
    return fleet.with_models(models)


def _on_cpu(fleet: Fleet, machine: Machine) -> Ground:
    cluster = fleet.cluster
    return ground_on_cpu(machine, cluster.cores, fleet.kv_pool.size, cluster.ranks)


def _on_gpus(fleet: Fleet, model: Model, gpus: Sequence[Gpu]) -> Ground | None:
    """The GPUs of all of the model's units, as if each were its own."""
    kind = device_name(gpus[0])
    if kind is None:
        return None
    alone = fleet.with_models(
        [each.model_copy(update={"phases": "rolling"}) if each.name == model.name else each for each in fleet.models]
    )
    count = len(gpus) // possible_units(alone) * max(1, model.replicas.at_start)
    rules = MemoryRules.served(fleet.cluster.gpu_memory)
    return GpuGround(kind, (max(1, count),), min(gpu.memory_bytes for gpu in gpus), rules)
