"""What `muxserve deploy` serves: one unit of this machine, on its CPU or its GPUs, planned here or by a plan file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from muxserve.cluster.checkpoints import Hub
from muxserve.cluster.plan import FleetPlan, plan_fleet
from muxserve.config import Fleet, FleetError, Problem
from muxserve.gpu.nvml import Machine as GpuMachine
from muxserve.planning.cpu import CPU
from muxserve.planning.gpus import gpu_unit
from muxserve.planning.planfile import load_plan
from placement import Machine
from placement.cluster import PlacedUnit


def plan_to_serve(
    fleet: Fleet,
    machine: Machine,
    gpus: Callable[[], GpuMachine],
    plan_file: str | os.PathLike[str] | None = None,
    hub: Hub | None = None,
) -> FleetPlan:
    """The plan of this machine.

    Args:
        gpus: asked for the machine's GPUs if the fleet or its plan wants some.
        plan_file: what `muxserve plan -o` has written.

    Raises:
        FleetError: the fleet does not fit, its models cannot be served, or the plan is not for one unit here.
    """
    if fleet.cluster.nodes:
        message = "this version serves one machine; write `gpus` instead (nodes are for muxserve plan and simulate)"
        raise FleetError([fleet.problem(("cluster", "nodes"), message)])
    placed = None if plan_file is None else placed_unit(fleet, plan_file)
    wants_gpus = bool(fleet.cluster.gpus or fleet.cluster.gpu_ids)
    if placed is None:
        return plan_fleet(fleet, machine, hub, gpu_unit(fleet, gpus(), hub) if wants_gpus else None)
    if placed.device == CPU:
        if wants_gpus:
            raise _wrong(plan_file, "the plan is for a CPU, but the fleet file wants GPUs; make it anew")
        return plan_fleet(_on_cpu(fleet, placed, machine.cores), machine, hub)
    if wants_gpus and len(placed.devices) != (len(fleet.cluster.gpu_ids) or fleet.cluster.gpus):
        have = len(fleet.cluster.gpu_ids) or fleet.cluster.gpus
        raise _wrong(plan_file, f"the plan's unit has {len(placed.devices)} GPUs, the fleet file {have}; make it anew")
    fleet = _with_rates(fleet, placed)
    return plan_fleet(fleet, machine, hub, gpu_unit(fleet, gpus(), hub, placed))


def placed_unit(fleet: Fleet, path: str | os.PathLike[str]) -> PlacedUnit:
    """The only unit of a plan file.

    Raises:
        FleetError: the plan is not one of this fleet, or has several units.
    """
    units = load_plan(path, fleet).units
    if len(units) != 1:
        raise _wrong(path, f"the plan has {len(units)} units; this version serves one unit on one machine")
    return units[0]


def _on_cpu(fleet: Fleet, unit: PlacedUnit, cores: int) -> Fleet:
    """The fleet with the plan's size of the pool, rates, and threads (a model's prefill and decode engines run on the
    same number; the larger share counts)."""
    shares = {each.model: max(each.prefill_share, each.decode_share) for each in unit.models}
    models = [
        model.model_copy(update={"threads": max(1, min(cores, round(shares[model.name] * cores)))})
        for model in _with_rates(fleet, unit).models
    ]
    pool = fleet.kv_pool.model_copy(update={"size": unit.kv_bytes})
    return fleet.model_copy(update={"models": models, "kv_pool": pool})


def _with_rates(fleet: Fleet, unit: PlacedUnit) -> Fleet:
    """The fleet with the plan's rates. On GPUs the pool's size is left to what is measured there."""
    rates = {each.model: each.rate for each in unit.models}
    models = [model.model_copy(update={"rate": rates[model.name]}) for model in fleet.models]
    return fleet.model_copy(update={"models": models})


def _wrong(path: str | os.PathLike[str] | None, message: str) -> FleetError:
    return FleetError([Problem(message, str(Path(path or "")), 1)])
