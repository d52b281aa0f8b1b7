"""Parts of a fleet file, each of which becomes a unit; and whether they fit together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from muxserve.cluster.plan import FleetPlan
from muxserve.config import AUTO, Fleet, FleetError, Model, Problem
from muxserve.gpu.nvml import Gpu
from muxserve.planning.arrangements import arrangement, arrangement_of
from muxserve.planning.cpu import CPU
from muxserve.spec import ModelSpec
from placement import Machine
from placement.cluster import PlacedUnit
from placement.format import enumerate_words, format_size


class Part(NamedTuple):
    """The models of one unit, and which of them have engines from the beginning."""

    fleet: Fleet
    serves: tuple[str, ...]


def together(fleet: Fleet) -> Fleet:
    """The models that share units; perhaps none."""
    return fleet.with_models([model for model in fleet.models if not arrangement_of(model).dedicated])


def units_at_start(fleet: Fleet) -> int:
    """How many units a fleet begins with, without a plan: as many as the most replicas of a model that shares, and one
    for each replica of a model that does not."""
    shared = max((_prepared(model) for model in together(fleet).models), default=0)
    return shared + sum(_prepared(model) for model in fleet.models if arrangement_of(model).dedicated)


def possible_units(fleet: Fleet) -> int:
    """How many units there can be when every model has as many replicas as it may."""
    return units_at_start(fleet) + sum(model.replicas.max - _prepared(model) for model in fleet.models)


def _prepared(model: Model) -> int:
    """Units that a model has at the start. One that sleeps has one, where it can be woken soonest."""
    return max(1, model.replicas.at_start)


def parts_of(fleet: Fleet) -> Iterator[Part]:
    """What the units have at the start: those that are shared, then those of one model, each with its part of the
    rate."""
    shared = together(fleet)
    most = max((_prepared(model) for model in shared.models), default=0)
    groups = [(number, [m for m in shared.models if _prepared(m) > number]) for number in range(most)]
    groups += [(number, [m]) for m in fleet.models if arrangement_of(m).dedicated for number in range(_prepared(m))]
    for number, models in groups:
        parts = [model.model_copy(update={"rate": model.rate / _prepared(model)}) for model in models]
        serves = tuple(model.name for model in models if model.replicas.at_start > number)
        yield Part(fleet.with_models(parts), serves)


def like(model: Model, offered: ModelSpec | None) -> Model:
    """A replica more of a model that is offered."""
    if offered is None:
        return model
    return model.model_copy(update={"rate": offered.rate, "max_len": offered.max_len})


def on_gpus(fleet: Fleet, gpus: Sequence[Gpu]) -> Fleet:
    """The same fleet on these GPUs."""
    ids = {"gpu_ids": [gpu.uuid for gpu in gpus], "gpus": 0}
    return fleet.model_copy(update={"cluster": fleet.cluster.model_copy(update=ids)})


def as_placed(fleet: Fleet, unit: PlacedUnit, cores: int) -> Fleet:
    """The models of a planned unit with the plan's rates; on CPU also with its size of the pool and, where they are
    multiplexed, threads (a model's prefill and decode engines run on the same number; the larger share counts). On GPUs
    the pool's size is left to what is measured there."""
    models = []
    for each in unit.models:
        update: dict[str, object] = {"rate": each.rate}
        if unit.device == CPU and not arrangement(unit.phases).dedicated:
            share = max(each.prefill_share, each.decode_share)
            update["threads"] = max(1, min(cores, round(share * cores)))
        models.append(fleet.model(each.model).model_copy(update=update))
    part = fleet.with_models(models)
    if unit.device != CPU:
        return part
    return part.model_copy(update={"kv_pool": fleet.kv_pool.model_copy(update={"size": unit.kv_bytes})})


def arranged(fleet: Fleet, path: str | os.PathLike[str], units: Sequence[PlacedUnit]) -> Fleet:
    """The fleet with its models arranged as the plan has them.

    Raises:
        FleetError: the fleet file wants it otherwise, or the plan wants what it has no objectives for.
    """
    models = []
    for model in fleet.models:
        unit = next(unit for unit in units if any(each.model == model.name for each in unit.models))
        given = model.model_fields_set
        if "phases" in given and model.phases not in (AUTO, unit.phases):
            message = f"the plan has {model.name} {unit.phases}, the fleet file {model.phases}"
            raise wrong(path, f"{message}; make it anew, or change `phases` to auto")
        if unit.phases == "pipelined" and model.stages not in (AUTO, unit.stages):
            message = f"the plan has {model.name} over {unit.stages} stages, the fleet file over {model.stages}"
            raise wrong(path, f"{message}; make it anew, or change `stages`")
        how = arrangement(unit.phases)
        if how.needs_objectives and (model.slo.ttft_ms is None or model.slo.tpot_ms is None):
            message = f"the plan has {model.name} {how.name}, which needs slo.ttft_ms and slo.tpot_ms in the fleet file"
            raise wrong(path, message)
        models.append(how.declare(model, unit.stages))
    return fleet.with_models(models)


def check_replicas(fleet: Fleet, path: str | os.PathLike[str], units: Sequence[PlacedUnit]) -> None:
    """Where the fleet file says how many replicas there are, the plan must agree."""
    for model in fleet.models:
        bounds = model.replicas
        count = sum(model.name == each.model for unit in units for each in unit.models)
        replicas = f"{count} replica{'' if count == 1 else 's'}"
        if bounds.scales and not bounds.min <= count <= bounds.max:
            message = f"the plan has {replicas} of {model.name}, the fleet file {bounds.min} to {bounds.max}"
        elif not bounds.scales and bounds.max not in (1, count):
            message = f"the plan has {replicas} of {model.name}, the fleet file {bounds.max}"
        else:
            continue
        # Planning anew would not help: the planner finds the number by itself.
        raise wrong(path, f"{message}; change `replicas`, or deploy without the plan")


def check_together(fleet: Fleet, plans: Sequence[FleetPlan], machine: Machine) -> None:
    """Each unit fits; together they may not."""
    if len(plans) == 1:
        return
    pools = sum(plan.unit.pool_bytes * plan.demands[0].ranks for plan in plans)
    weights = sum(d.architecture.weight_bytes(d.resolved_dtype) for plan in plans for d in plan.demands)
    count, shared = len(plans), machine.shared_memory_bytes
    key = ("kv_pool", "size") if fleet.kv_pool.size != AUTO else ("models",)
    if shared is not None and pools > shared:
        message = (
            f"the pools of {count} units take {format_size(pools)} together, but only {format_size(shared)} of shared "
            "memory (/dev/shm) are free; make it larger (docker run --shm-size), or the pools smaller (kv_pool.size)"
        )
        raise FleetError([fleet.problem(key, message)])
    if pools + weights > machine.memory_bytes:
        message = (
            f"{count} units need {format_size(weights)} for weights (every unit loads its own) and "
            f"{format_size(pools)} for pools, but the memory is {format_size(machine.memory_bytes)}; "
            "have fewer replicas, or smaller pools (kv_pool.size is of one unit)"
        )
        raise FleetError([fleet.problem(key, message)])


def who_replicates(fleet: Fleet) -> str:
    """The models with several replicas, in words."""
    several = {model.name: model.replicas.max for model in fleet.models if model.replicas.max > 1}
    return enumerate_words(
        [f"{name}: {'up to ' if fleet.model(name).replicas.scales else ''}{count}" for name, count in several.items()]
    )


def wrong(path: str | os.PathLike[str], message: str) -> FleetError:
    """A plan file that cannot be served."""
    return FleetError([Problem(message, str(Path(path)), 1)])
