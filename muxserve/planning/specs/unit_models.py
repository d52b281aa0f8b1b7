"""Which models the units of a fleet have: at the start by the numbers of replicas (`parts_of`), or as a plan file has
it (`as_placed`, `arranged`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from muxserve.config import AUTO, Fleet, FleetError, Model, Problem
from muxserve.gpu.nvml import Gpu
from muxserve.planning.candidates.device_pool import CPU
from muxserve.spec import ModelSpec
from placement.cluster import PlacedUnit
from placement.format import enumerate_words


class UnitModels(NamedTuple):
    """The models of one unit, and which of them have engines from the beginning."""

    fleet: Fleet
    serves: tuple[str, ...]


def together(fleet: Fleet) -> Fleet:
    """The models that share units; perhaps none."""
    return fleet.with_models([model for model in fleet.models if not model.has_own_unit])


def units_at_start(fleet: Fleet) -> int:
    """How many units a fleet begins with, without a plan: as many as the most replicas of a model that shares, and one
    for each replica of a model that does not."""
    shared = max((_prepared(model) for model in together(fleet).models), default=0)
    return shared + sum(_prepared(model) for model in fleet.models if model.has_own_unit)


def possible_units(fleet: Fleet) -> int:
    """How many units there can be when every model has as many replicas as it may."""
    return units_at_start(fleet) + sum(model.replicas.max - _prepared(model) for model in fleet.models)


def _prepared(model: Model) -> int:
    """Units that a model has at the start. One that sleeps has one, where it can be woken soonest."""
    return max(1, model.replicas.at_start)


def parts_of(fleet: Fleet) -> Iterator[UnitModels]:
    """What the units have at the start: those that are shared, then those of one model, each with its part of the
    rate."""
    shared = together(fleet)
    most = max((_prepared(model) for model in shared.models), default=0)
    groups = [(number, [m for m in shared.models if _prepared(m) > number]) for number in range(most)]
    groups += [(number, [m]) for m in fleet.models if m.has_own_unit for number in range(_prepared(m))]
    for number, models in groups:
        parts = [model.model_copy(update={"rate": model.rate / _prepared(model)}) for model in models]
        serves = tuple(model.name for model in models if model.replicas.at_start > number)
        yield UnitModels(fleet.with_models(parts), serves)


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
    """The models of a planned unit with the plan's rates; on CPU also with its size of the pool and, where they
    share it, threads (a model's prefill and decode engines run on the same number; the larger share counts). On GPUs
    the pool's size is left to what is measured there."""
    models = []
    for each in unit.models:
        update: dict[str, object] = {"rate": each.rate}
        if unit.device == CPU and not unit.alone:
            share = max(each.prefill_share, each.decode_share)
            update["threads"] = max(1, min(cores, round(share * cores)))
        models.append(fleet.model(each.model).model_copy(update=update))
    part = fleet.with_models(models)
    if unit.policy and not unit.rolls:
        part = part.with_policy(unit.policy)
    if unit.device != CPU:
        return part
    return part.with_pool_size(unit.kv_bytes)


def as_deployed(fleet: Fleet, unit: PlacedUnit) -> PlacedUnit:
    """A planned unit as `muxserve deploy` serves it on GPUs. What the fleet file says of the KV pool's size and of the
    shares of a model's engines goes before the plan; without MPS ranks of several engines would not compute at the same
    time, so that one engine does (`GpuUnit.one_at_a_time`). An engine that has its GPUs to itself has all of them, and
    waits for nobody."""
    if unit.device == CPU:
        return unit
    if isinstance(fleet.kv_pool.size, int):
        unit = replace(unit, kv_bytes=min(unit.kv_bytes, fleet.kv_pool.size))
    if unit.alone:
        models = tuple(replace(each, prefill_share=1.0, decode_share=1.0) for each in unit.models)
        return replace(unit, models=models, policy=unit.policy if unit.rolls else "free")
    given = {each.model: fleet.model(each.model).sm for each in unit.models}
    models = tuple(
        replace(
            each,
            prefill_share=given[each.model].prefill or each.prefill_share,
            decode_share=given[each.model].decode or each.decode_share,
        )
        for each in unit.models
    )
    in_turn = fleet.cluster.mps == "off" and len(unit.devices) > unit.stages
    return replace(unit, models=models, policy="fcfs" if in_turn else unit.policy)


def arranged(fleet: Fleet, path: str | os.PathLike[str], units: Sequence[PlacedUnit]) -> Fleet:
    """The fleet with the engines that the plan gives its models.

    Raises:
        FleetError: the fleet file wants it otherwise, or the plan wants what it has no objectives for.
    """
    models = []
    for model in fleet.models:
        unit = next(unit for unit in units if any(each.model == model.name for each in unit.models))
        shape = unit.shape_of(model.name)
        if model.engines not in (AUTO, shape):
            message = f"the plan has {model.name} with `engines: {shape}`, the fleet file `{model.engines}`"
            raise wrong(path, f"{message}; make it anew, or change `engines` to auto")
        if model.stages not in (AUTO, unit.stages):
            message = f"the plan has {model.name} over {unit.stages} stages, the fleet file over {model.stages}"
            raise wrong(path, f"{message}; make it anew, or change `stages`")
        if model.rolls and not unit.rolls:
            message = f"prefill of {model.name} does not roll over its replicas in the plan, as the fleet file says"
            raise wrong(path, f"{message}; make it anew, or leave `dispatch` out")
        if unit.rolls and (model.slo.ttft_ms is None or model.slo.tpot_ms is None):
            message = f"the plan has {model.name} rolling, which needs slo.ttft_ms and slo.tpot_ms in the fleet file"
            raise wrong(path, message)
        models.append(as_unit_has(model, unit))
    return fleet.with_models(models)


def as_unit_has(model: Model, unit: PlacedUnit) -> Model:
    """The model with the engines that a plan gives it in a unit."""
    return model.with_engines(unit.shape_of(model.name), unit.stages, unit.rolls)


def check_awake(fleet: Fleet) -> None:
    """A plan file is of models that are all awake.

    Raises:
        FleetError: memory decides which models of the fleet are.
    """
    if fleet.memory is not None:
        message = "decides at run time who is awake, and a plan file beforehand; leave one of the two out"
        raise FleetError([fleet.problem(("memory",), message)])


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


def who_replicates(fleet: Fleet) -> str:
    """The models with several replicas, in words."""
    several = {model.name: model.replicas.max for model in fleet.models if model.replicas.max > 1}
    return enumerate_words(
        [f"{name}: {'up to ' if fleet.model(name).replicas.scales else ''}{count}" for name, count in several.items()]
    )


def wrong(path: str | os.PathLike[str], message: str) -> FleetError:
    """A plan file that cannot be served."""
    return FleetError([Problem(message, str(Path(path)), 1)])
