"""The part of a fleet's plan that memory decides at run time: its limit, and what each model is expected to take; live
and simulated. The memory is this machine's, or that of each of its GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from muxserve.cluster.machine import usable_memory
from muxserve.config import AUTO, Fleet, FleetError, MemorySection, Model
from muxserve.costs import ModelArchitecture
from muxserve.costs.architecture import ITEM_BYTES
from muxserve.costs.calibration import host_bandwidth
from muxserve.gpu.budget import at_rest
from muxserve.gpu.nvml import device_name
from muxserve.gpu.unit import GpuUnit
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.scheduling.residency_types import KvRules, ResidencyRules, WakeCosts, WakeRules
from muxserve.scheduling.turns import TurnRules
from muxserve.simulator import SimResidency, SimUnit, WakeContention
from muxserve.spec import DECODE_NICENESS, ResidencySpec, public_name
from placement import Machine
from placement.format import format_size

# `auto`: other programs of the machine have the rest.
AUTO_PART = 0.9
# What a step takes for a moment, and whatever nobody foresaw, stays free.
HEADROOM = 0.05
# Expected until it is measured, of processes of the pinned vLLM on CPU (docs/residency.md has the measured ones): a
# fleet in which every model sleeps, without its pools, and in that for each model; and a model's processes besides its
# weights.
FLEET_BYTES = 1 << 30
DECLARED_BYTES = 8 << 20
MODEL_BYTES = 200 << 20
# What is no model, and an awake model, may come to take more before it is measured again: 2 to 5 s. Measured: 20 MiB of
# each awake model's are counted as of what is no model, two of which may be woken meanwhile; and 8 MiB are what a model
# takes more under load than when it was woken.
FIXED_MARGIN, MODEL_MARGIN = 48 << 20, 12 << 20
# The same when it has been measured for a few seconds, for what is simulated.
LEARNT_FLEET_BYTES, LEARNT_DECLARED_BYTES, LEARNT_MODEL_BYTES = 880 << 20, 7 << 19, 90 << 20
# While a model is loaded, so much of its files is mapped besides (`engine.cpu.weight_files`: a window of 32 MiB, a
# tensor that reaches beyond it, and what safetensors reads ahead).
MAPPED_BYTES = 48 << 20
# Loaders that a user asks for by these have all of a file in memory at once.
_OTHER_LOADERS = ("load_format", "safetensors_load_strategy", "model_loader_extra_config")
# A first token within this time where a model has no objective.
TTFT_SECONDS = 5.0
# And a token in this time after the one before.
TPOT_SECONDS = 0.1
# How long a wake takes alone until one was measured: 0.40 s with next to no weights (benchmarks/results/startup.json),
# and 0.75 s with 273 MiB in a fleet that serves (docs/residency.md, Simulated).
WAKE_SECONDS, WAKE_BANDWIDTH = 0.4, (273 << 20) / (0.75 - 0.4)
# Until an idle model's memory is free, until that was measured; and how much longer than alone a wake takes for each
# other wake or busy model per core (`scheduling.wake_times` learns its own).
SLEEP_SECONDS, WAKE_DRAG = 0.3, 1.5
# What a thread gets of a core that is contended, for each level that it is nicer than another (Linux, sched(7)).
_WEIGHT_OF_A_LEVEL = 1 / 1.25
# More at a time would take memory that others wait for, and come up no sooner.
MOST_WAKES = 4
# The same of GPUs, where weights are copied by one process, and engines start meanwhile. Until one was measured a wake
# is taken to last as long as over stand-ins of the driver, where engines are started or have stayed
# (benchmarks/results/wakes_stand_ins.json: 2.4 s, and 0.02 s in which the driver's work is next to none), and as its
# weights are copied. (The first GPU had three small models up 19 s after vLLM was imported, beside three other fleets:
# docs/gpu.md.)
GPU_WAKES = 2
GPU_WAKE_SECONDS, GPU_RESTED_SECONDS = 2.5, 0.1
# Until an idle model's memory is free, until that was measured: where its engines end, and where those of all models
# rest. Over stand-ins of the driver a fleet learnt 0.15 to 0.3 s for the latter, on two cores with other work.
GPU_SLEEP_SECONDS, GPU_REST_SECONDS = 1.0, 0.3
# Part of the host's memory for the weights of models that sleep on GPUs.
HOST_COPIES_PART = 0.5


def with_residency(unit: SimUnit, spec: ResidencySpec) -> SimUnit:
    """The simulated unit of a fleet in which memory decides which models are awake. What never sleeps is awake, and
    what it takes is part of the rules already."""
    if not spec.on_gpus:
        spec = _learnt(spec)
    models = {model.name: spec.models.get(model.name) or WakeCosts(0, pinned=True) for model in unit.models}
    awake = [name for name, costs in models.items() if costs.pinned]
    if spec.on_gpus and spec.rules.wakes.ahead:
        awake += _awake_ahead(spec)
    residency = SimResidency(
        spec.rules,
        models,
        tuple(awake),
        WakeContention() if spec.on_gpus else WakeContention(WAKE_DRAG, _WEIGHT_OF_A_LEVEL**DECODE_NICENESS),
        spec.turns,
        resting=spec.resting,
        started_seconds=GPU_WAKE_SECONDS - GPU_RESTED_SECONDS if spec.on_gpus else 0.0,
    )
    return replace(unit, residency=residency)


def _awake_ahead(spec: ResidencySpec) -> list[str]:
    """The models that are awake before anybody has asked for one: as many as have room, that of another wake apart."""
    room = spec.rules.limit - spec.rules.always
    found: list[str] = []
    for name, costs in spec.models.items():
        others = [each.bytes for other, each in spec.models.items() if other not in (*found, name)]
        if costs.bytes + max(others, default=0) <= room:
            found.append(name)
            room -= costs.bytes
    return found


def _learnt(spec: ResidencySpec) -> ResidencySpec:
    """What is set aside when it has been measured, as on the machine where it was."""
    declared = FLEET_BYTES + len(spec.models) * DECLARED_BYTES
    learnt = LEARNT_FLEET_BYTES + len(spec.models) * LEARNT_DECLARED_BYTES + FIXED_MARGIN
    models = {
        # A wake takes no more than what stays: engines write their part after the weights are loaded.
        name: replace(each, bytes=each.bytes - MODEL_BYTES + LEARNT_MODEL_BYTES + MODEL_MARGIN, load_bytes=0)
        for name, each in spec.models.items()
    }
    rules = replace(spec.rules, fixed=spec.rules.fixed - max(0, declared - learnt))
    return msgspec.structs.replace(spec, rules=rules, models=models)


def within_limit(fleet: Fleet, machine: Machine) -> Machine:
    """The machine with as much memory as the fleet may take.

    Raises:
        FleetError: it may take more than there is.
    """
    if fleet.memory is None:
        return machine
    limit = fleet.memory.limit
    if limit == AUTO:
        return replace(machine, memory_bytes=int(AUTO_PART * machine.memory_bytes))
    if limit > machine.memory_bytes:
        message = f"{format_size(limit)} are more than there is ({format_size(machine.memory_bytes)})"
        raise FleetError([fleet.problem(("memory", "limit"), message)])
    return replace(machine, memory_bytes=limit)


def wake_seconds(weights: int) -> float:
    """How long waking a model with so many bytes of weights takes on this machine's CPU, as far as was measured: its
    processes come up, and its weights are copied out of the page cache."""
    return WAKE_SECONDS + weights / WAKE_BANDWIDTH


def load_bytes(model: Model, architecture: ModelArchitecture, dtype: str) -> int:
    """Bytes that loading the model takes besides its weights: what is mapped of its files meanwhile."""
    weights = architecture.weight_bytes(dtype)
    in_windows = any(Path(model.path or "").glob("*.safetensors")) and not set(_OTHER_LOADERS) & set(model.engine_args)
    if not in_windows:
        return weights
    # No tensor is larger than that of the embeddings.
    return min(weights, MAPPED_BYTES + ITEM_BYTES[dtype] * architecture.vocab * architecture.hidden)


def host_copies_of(plan: ResolvedUnit) -> int:
    """Bytes of the host's memory for the weights of models that sleep, of a unit on GPUs; 0 elsewhere."""
    memory = plan.fleet.memory
    if memory is None or plan.gpu is None or memory.host_copies == "off":
        return 0
    whole = memory.host_copies
    return (whole if isinstance(whole, int) else int(HOST_COPIES_PART * plan.machine.memory_bytes)) // plan.units


def residency_of(fleet: Fleet, plans: Sequence[ResolvedUnit], machine: Machine) -> dict[str, ResidencySpec]:
    """By what memory decides which models are awake, by planned unit; nothing if it does not. On a CPU there is one.

    Args:
        machine: as `within_limit` has it.

    Raises:
        FleetError: the limit has no room for the models that never sleep and one of the others.
    """
    if fleet.memory is None:
        return {}
    if plans[0].gpu is not None:
        return {p.name: _on_gpus(fleet.memory, p, p.gpu, machine) for p in plans if p.gpu is not None}
    limit = machine.memory_bytes
    costs: dict[str, WakeCosts] = {}
    for plan in plans:
        for model, demand in zip(plan.fleet.models, plan.demands, strict=True):
            cache = plan.unit.model(model.name).cache_bytes * demand.ranks
            costs[model.name] = cpu_wake_costs(model, demand.architecture, demand.dtype, cache)
    kv = KvRules.of(sum(plan.unit.pool_bytes * max(demand.ranks for demand in plan.demands) for plan in plans))
    fixed = FLEET_BYTES + len(costs) * DECLARED_BYTES
    fixed += sum(each.bytes for each in costs.values() if each.pinned)
    sleeping = {name: each for name, each in costs.items() if not each.pinned}
    largest = max(sleeping, key=lambda name: sleeping[name].bytes + sleeping[name].load_bytes, default=None)
    always = fixed + kv.least
    needed = always if largest is None else always + sleeping[largest].bytes + sleeping[largest].load_bytes
    most = _most(limit)
    if needed > most:
        parts = f"processes, the least of the KV pool and models that never sleep take about {_mib(always)}"
        if largest is not None:
            parts += f", and waking {largest} {_mib(needed - always)}"
        message = (
            f"{_mib(limit)} are not enough: {parts}; {HEADROOM:.0%} of the limit stay free. Give at least "
            f"{_mib(math.ceil(needed / (1 - HEADROOM)))}, or a smaller kv_pool.size"
        )
        raise FleetError([fleet.problem(("memory", "limit"), message)])
    rules = ResidencyRules(
        most,
        min_residence=fleet.memory.min_residence,
        # Loading is work of one core.
        wakes=WakeRules(max(1, min(machine.cores, MOST_WAKES)), max(1, machine.cores)),
        sleep_seconds=SLEEP_SECONDS,
        fixed=fixed,
        fixed_margin=FIXED_MARGIN,
        kv=kv,
        # The limit is what the user wants; beyond this the kernel ends processes.
        ceiling=max(most, usable_memory()),
    )
    spec = ResidencySpec(rules, sleeping)
    return {plans[0].name: msgspec.structs.replace(spec, turns=_turns(spec, fleet.memory))}


def _mib(size: int) -> str:
    """Whole MiB, rounded up: sums of these can be checked, and are as the fleet file takes them."""
    return f"{math.ceil(size / (1 << 20))}MiB"


def _most(limit: int) -> int:
    """Bytes of a CPU fleet's memory limit that models may take."""
    return int((1 - HEADROOM) * limit)


class _Objectives(NamedTuple):
    ttft: float
    tpot: float


def _objectives(model: Model) -> _Objectives:
    """For the first token, and between tokens, seconds."""
    return _Objectives(
        ttft=TTFT_SECONDS if model.slo.ttft_ms is None else model.slo.ttft_ms / 1000,
        tpot=TPOT_SECONDS if model.slo.tpot_ms is None else model.slo.tpot_ms / 1000,
    )


def cpu_wake_costs(model: Model, architecture: ModelArchitecture, dtype: str, cache: int = 0) -> WakeCosts:
    """The costs of a model that a CPU serves in that type, with a `cache` of so many bytes of its own."""
    weights, objectives = architecture.weight_bytes(dtype), _objectives(model)
    return WakeCosts(
        bytes=weights + cache + MODEL_BYTES,
        load_bytes=load_bytes(model, architecture, dtype),
        seconds=wake_seconds(weights),
        ttft=objectives.ttft,
        tpot=objectives.tpot,
        pinned=model.keep == "always",
        margin=MODEL_MARGIN,
    )


def gpu_wake_costs(
    size: int, weights: int, device: str, ttft: float = TTFT_SECONDS, tpot: float = TPOT_SECONDS
) -> WakeCosts:
    """The costs of a model that takes `size` bytes of each of its GPUs, of type `device`, if its engines have ended; so
    many of them are `weights`, which are copied there."""
    return WakeCosts(size, seconds=GPU_WAKE_SECONDS + weights / host_bandwidth(device), ttft=ttft, tpot=tpot)


def resident_costs(model: Model, architecture: ModelArchitecture, dtype: str, gpu: GpuUnit, size: int) -> WakeCosts:
    """The costs of a model that takes `size` bytes of each GPU of a unit, in that type."""
    kind = device_name(gpu.gpus[0]) or gpu.gpus[0].name
    return gpu_wake_costs(size, architecture.weight_bytes(dtype) // gpu.ranks, kind, *_objectives(model))


def gpu_residency(
    memory: MemorySection,
    models: Mapping[str, WakeCosts],
    limit: int,
    fixed: int,
    kv: KvRules,
    cores: int,
    resting: int,
) -> ResidencySpec:
    """By what memory decides in a unit on GPUs, of each of which everything may take `limit` bytes, and what is awake
    all the time takes `fixed`. Weights that have been loaded once are kept in the host's memory, and the engines of
    `resting` models stay."""
    rules = ResidencyRules(
        limit,
        min_residence=memory.min_residence,
        # Those that wait for an idle model to leave wait long enough for the wake itself.
        residence_factor=1.0,
        wakes=WakeRules(min(max(1, cores), GPU_WAKES), max(1, cores), memory.host_copies != "off"),
        sleep_seconds=GPU_REST_SECONDS if resting >= len(models) else GPU_SLEEP_SECONDS,
        fixed=fixed,
        kv=kv,
        ceiling=limit,
    )
    spec = ResidencySpec(rules, dict(models), on_gpus=True, resting=resting)
    return msgspec.structs.replace(spec, turns=_turns(spec, memory))


def _turns(spec: ResidencySpec, memory: MemorySection) -> TurnRules | None:
    """By what rules busy models stop for others; None: they do not. On a CPU a wake takes as long as many tokens; on
    GPUs it does, too, unless engines stay."""
    wanted = spec.resting > 0 if memory.turns == AUTO else memory.turns
    if not wanted:
        return None
    return TurnRules() if spec.on_gpus else TurnRules(cores=spec.rules.wakes.cores)


def _on_gpus(memory: MemorySection, plan: ResolvedUnit, gpu: GpuUnit, machine: Machine) -> ResidencySpec:
    """The same where the memory is that of each of the unit's GPUs. That there is room for the models that never sleep
    and one of the others was looked at when the unit was planned."""
    taken, resting = gpu.taken(gpu.sleeping), gpu.resting(gpu.sleeping)
    rest = at_rest(resting.values(), gpu.resting_room)
    models = {
        model.name: resident_costs(model, demand.architecture, demand.dtype, gpu, taken[model.name])
        for model, demand in zip(plan.fleet.models, plan.demands, strict=True)
        if model.name in taken
    }
    limit = min(each.lines[0].bytes for each in gpu.budgets(plan.demands))
    awake = sum(gpu.taken([each for each in gpu.needs if each.model in taken]).values())
    fixed = gpu.used(plan.demands, plan.unit.pool_bytes) - plan.unit.pool_bytes - awake
    return gpu_residency(memory, models, limit, fixed, KvRules.of(plan.unit.pool_bytes), machine.cores, rest)


# ---------------------------------------------------------------- while the fleet serves


class NoMemoryError(ValueError):
    """What is asked for has no room in the memory; the message says why and what to do."""


def with_model(spec: ResidencySpec, model: Model, costs: WakeCosts) -> ResidencySpec:
    """The same with a model more, which sleeps until somebody asks for it.

    Raises:
        NoMemoryError: it has no room beside what is awake all the time, or is to be awake itself.
    """
    if model.keep == "always":
        message = "`keep: always` needs memory of its own from the start: deploy again with it in the fleet's file"
        raise NoMemoryError(message)
    rules = replace(spec.rules, fixed=spec.rules.fixed + (0 if spec.on_gpus else DECLARED_BYTES))
    made = msgspec.structs.replace(spec, rules=rules, models={**spec.models, model.name: costs})
    _check_room(made)
    return made


def without_model(spec: ResidencySpec, model: str) -> ResidencySpec:
    """The same without a model, if it has it."""
    if model not in spec.models:
        return spec
    rules = replace(spec.rules, fixed=spec.rules.fixed - (0 if spec.on_gpus else DECLARED_BYTES))
    others = {name: costs for name, costs in spec.models.items() if name != model}
    return msgspec.structs.replace(spec, rules=rules, models=others)


def as_declared(spec: ResidencySpec, fleet: Fleet, limit: int) -> ResidencySpec:
    """The same by the rules of `fleet`: residences, waits, turns, objectives of models; and on a CPU with `limit` bytes
    for everything.

    Raises:
        NoMemoryError: a model could not be woken with that.
    """
    memory = fleet.memory or MemorySection()
    most = spec.rules.limit if spec.on_gpus else _most(limit)
    rules = replace(spec.rules, limit=most, min_residence=memory.min_residence)
    declared = {model.name: _objectives(model) for model in fleet.models}
    models = {}
    for name, costs in spec.models.items():
        objectives = declared.get(public_name(name))
        models[name] = costs if objectives is None else replace(costs, ttft=objectives.ttft, tpot=objectives.tpot)
    made = msgspec.structs.replace(spec, rules=rules, models=models)
    _check_room(made)
    return msgspec.structs.replace(made, turns=_turns(made, memory))


def _check_room(spec: ResidencySpec) -> None:
    sizes = {name: costs.bytes + costs.load_bytes for name, costs in spec.models.items()}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if largest is None or spec.rules.always + sizes[largest] <= spec.rules.limit:
        return
    where = " of each GPU" if spec.on_gpus else ""
    left = max(0, spec.rules.limit - spec.rules.always)
    raise NoMemoryError(
        f"waking {largest} takes about {format_size(sizes[largest])}{where}, and {format_size(left)} are left for it; "
        "raise memory.limit"
    )
