"""Arrangements for models that leave them open (`phases: auto`), when a fleet is about to be served without a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from muxserve.config import Fleet, Model
from muxserve.costs.latency import LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.gpu.nvml import Gpu, device_name
from muxserve.planning.arrangements import arrangement, is_open
from muxserve.planning.arrangements.base import DevicePool
from muxserve.planning.checkpoints import Hub
from muxserve.planning.comparison import ChosenPhases, Tell, choose_phases, silent
from muxserve.planning.demands import demands_of
from muxserve.planning.device_pool import GpuPool, cpu_pool
from muxserve.planning.unit_plan import possible_units
from placement import Machine
from placement.memory import MemoryRules


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
    if not any(map(is_open, fleet.models)):
        return fleet, []
    chosen = choose_at_deploy(fleet, machine, gpus, hub, tell=tell)
    reasons = [
        f"{model.name} is {chosen[model.name].phases}: {chosen[model.name].reason}"
        if model.name in chosen
        else f"{model.name} is multiplexed: nothing is known of the speed of a {gpus[0].name}"
        for model in fleet.models
        if is_open(model)
    ]
    return with_choices(fleet, chosen), reasons


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
    if not any(map(is_open, fleet.models)):
        return {}
    pools: dict[str, DevicePool] = {}
    for model in fleet.models:
        if is_open(model):
            pool = _on_gpus(fleet, model, gpus) if gpus else _on_cpu(fleet, machine)
            if pool is None:
                return {}
            pools[model.name] = pool
    demands = demands_of(fleet, Path(), hub, [(gpu.name, gpu.memory_bytes) for gpu in gpus])
    return choose_phases(fleet, demands, pools.__getitem__, latency or Roofline(), tell=tell)


def with_choices(fleet: Fleet, chosen: Mapping[str, ChosenPhases]) -> Fleet:
    """The fleet with these arrangements in place of `auto`; what was not chosen is multiplexed."""
    models = []
    for model in fleet.models:
        if is_open(model):
            choice = chosen.get(model.name)
            how = arrangement(choice.phases if choice else "multiplexed")
            model = how.declare(model, choice.stages if choice else 1)
        models.append(model)
    return fleet.with_models(models)


def _on_cpu(fleet: Fleet, machine: Machine) -> DevicePool:
    cluster = fleet.cluster
    return cpu_pool(machine, cluster.cores, fleet.kv_pool.size, cluster.ranks)


def _on_gpus(fleet: Fleet, model: Model, gpus: Sequence[Gpu]) -> DevicePool | None:
    """The GPUs of all of the model's units, as if each were its own."""
    kind = device_name(gpus[0])
    if kind is None:
        return None
    alone = fleet.with_models(
        [each.model_copy(update={"phases": "rolling"}) if each.name == model.name else each for each in fleet.models]
    )
    count = len(gpus) // possible_units(alone) * max(1, model.replicas.at_start)
    rules = MemoryRules.served(fleet.cluster.gpu_memory)
    return GpuPool(kind, (max(1, count),), min(gpu.memory_bytes for gpu in gpus), rules)
