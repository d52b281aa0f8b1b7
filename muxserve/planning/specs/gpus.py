"""The GPUs of this machine as the unit that `muxserve deploy` serves a fleet on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from muxserve.config import AUTO, Fleet, FleetError, MemorySection
from muxserve.costs.devices import device
from muxserve.costs.latency import CostError, LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.gpu.budget import estimated
from muxserve.gpu.nvml import Gpu, GpuChoiceError, GpuMachine, choose, device_name
from muxserve.gpu.unit import GpuUnit, SmShares
from muxserve.planning.candidates.layouts import stages_of
from muxserve.planning.demand.checkpoints import Hub
from muxserve.planning.demand.demands import demands_of
from muxserve.planning.demand.private import has_one_engine
from muxserve.spec import SmSharing
from muxserve.spec.unit import share_steps
from placement.candidates import Candidates
from placement.cluster import PlacedUnit
from placement.demand import Demand, Member, Mesh
from placement.engines import SHARED, Engines
from placement.estimator import Estimator
from placement.format import format_size
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.values import Values

# Where nothing is known of a GPU's speed: a prefill beside decode, as in MuxServe's examples.
UNPLANNED = SmShares(prefill=0.6, decode=0.4)
# Shares of engines that take turns, or that no lease is withheld from.
ALL_SMS = SmShares(prefill=1.0, decode=1.0)


def pretended_gpus(fleet: Fleet) -> GpuMachine:
    """The GPUs that the fleet file names, as if this machine had them: as many as it wants, of its `gpu_type`.

    Raises:
        FleetError: it names no type, or one of which nothing is known.
    """
    cluster = fleet.cluster
    if cluster.gpu_type is None:
        message = "say what the GPUs are that are pretended, such as H100"
        raise FleetError([fleet.problem(("cluster", "gpu_type"), message)])
    try:
        kind = device(cluster.gpu_type)
    except CostError as error:
        raise FleetError([fleet.problem(("cluster", "gpu_type"), str(error))]) from None
    numbers = [each for each in cluster.gpu_ids if isinstance(each, int)]
    count = max(cluster.gpus, len(cluster.gpu_ids), *(number + 1 for number in numbers), 0)
    named = [each for each in cluster.gpu_ids if isinstance(each, str)] + [None] * count
    gpus = (Gpu(n, named[n] or f"simulated-{n}", kind.name, kind.memory_bytes) for n in range(count))
    return GpuMachine(tuple(gpus), where="the fleet file")


def gpu_unit(fleet: Fleet, found: GpuMachine, hub: Hub | None = None, placed: PlacedUnit | None = None) -> GpuUnit:
    """Choose GPUs for the fleet, and how its models share them if MPS works there.

    Args:
        found: the GPUs of this machine, or those that units may get on others.
        placed: what a plan says of the models; without it they are planned here, with the costs of a roofline.

    Raises:
        FleetError: there are no such GPUs, or a model cannot be served.
    """
    ids = fleet.cluster.gpu_ids
    count = len(ids) or fleet.cluster.gpus or (len(placed.devices) if placed else 0)
    try:
        gpus = choose(found, count, ids)
    except GpuChoiceError as error:
        raise FleetError([fleet.problem(("cluster", error.key), str(error))]) from None
    # Checkpoints have been found before, so that no directory is asked for here.
    demands = demands_of(fleet, Path(), hub, [(gpu.name, gpu.memory_bytes) for gpu in gpus])
    one_engine = tuple(
        model.name
        for model, demand in zip(fleet.models, demands, strict=True)
        if has_one_engine(model, demand.architecture)
    )
    alone = len(one_engine) == len(fleet.models) == 1
    stages, problem = stages_of(fleet, fleet.models[0], len(gpus))
    if problem:
        raise FleetError([problem])
    named = fleet.cluster.sm_sharing
    # Planned as if by percentages; what is done is decided where the GPUs are.
    sharing: SmSharing = "off" if fleet.cluster.mps == "off" else "mps" if named == "auto" else named
    split = sharing == "green_contexts" and len(gpus) > stages and not alone
    if split:
        sharing = "mps"
    sets = 1 if alone else max(1, share_steps(sharing, fleet.policy))
    rules = MemoryRules.served(_utilisation(fleet, gpus), 1 if len(one_engine) == len(fleet.models) else 2, sets)
    kind = device_name(gpus[0])
    notes = [
        f"{demand.name} is served in bfloat16, since FlashAttention has no float32 (its checkpoint is in float32)"
        for demand in demands
        if demand.architecture.dtype == "float32" and demand.dtype == "bfloat16"
    ]
    if split:
        notes.append(
            "engines of several ranks share the SMs by percentages of MPS: NCCL would leave their green contexts with "
            "each collective operation"
        )
    wanted = fleet.cluster.gpu_type
    if wanted is not None and _type(wanted) != kind:
        notes.append(f"the fleet file says {wanted}, but {found.where} has {gpus[0].name}; it is served on that")
    if placed is not None and kind is not None and placed.device != kind:
        message = f"the plan is for {placed.device}, but {found.where} has {gpus[0].name}; make it anew"
        raise FleetError([fleet.problem(("cluster",), message)])
    sleeps = fleet.memory is not None and placed is None
    sleeping = [model.name for model in fleet.models if sleeps and model.keep == "auto"]
    if alone:
        shares = {demand.name: ALL_SMS for demand in demands}
        if fleet.models[0].sm.decode is not None:
            notes.append(f"`sm` of {fleet.models[0].name} says nothing here: its one engine is alone and has all SMs")
    elif placed is not None:
        shares = {each.model: SmShares(each.prefill_share, each.decode_share) for each in placed.models}
    elif sleeping:
        # Which of them compute beside each other is decided while they are served.
        shares = {demand.name: UNPLANNED for demand in demands}
    elif named == "auto" and len(gpus) > stages:
        # Over several GPUs there are percentages only, which are for who asks for them.
        shares = {demand.name: ALL_SMS for demand in demands}
    else:
        shares, note = _planned(fleet, demands, gpus, kind, rules)
        notes += [note] if note else []
    if sleeping:
        notes.append(
            f"{len(sleeping)} of {len(demands)} models sleep until somebody asks for them; everything together takes "
            f"at most {format_size(int(rules.utilisation * gpus[0].memory_bytes))} of each GPU"
        )
    unit = GpuUnit(
        gpus=gpus,
        sharing=sharing,
        shares=shares
        if alone
        else _with_overrides(fleet, shares if placed else _for_one_engine(fleet, shares, one_engine)),
        needs=tuple(estimated(demands, len(gpus), rules, stages, one_engine)),
        rules=rules,
        notes=tuple(notes),
        one_engine=one_engine,
        stages=stages,
        elsewhere=fleet.cluster.launcher == "ray",
        named=named != "auto" or alone,
        green_sets=1 if alone else max(1, share_steps("green_contexts", fleet.policy)),
    )
    made = _with_sleeping(unit, sleeping, fleet)
    if unit.named or not (words := made.too_many_clients()):
        return made
    unshared = replace(unit, sharing="off", notes=(*unit.notes, f"engines alternate, since {words}"))
    return _with_sleeping(unshared, sleeping, fleet)


def _with_sleeping(unit: GpuUnit, sleeping: Sequence[str], fleet: Fleet) -> GpuUnit:
    """The unit where those of its models sleep until they are woken."""
    if not sleeping or fleet.memory is None:
        return unit
    pools = fleet.kv_pool.size
    reserve = unit.rules.reserve_bytes + copier_bytes(fleet.memory, unit.rules)
    unit = replace(unit, rules=replace(unit.rules, reserve_bytes=reserve))
    unit = unit.with_sleeping(sleeping, resting_bytes(fleet.memory), pools if isinstance(pools, int) else None)
    if unit.resting_room is None:
        return unit
    words = f"{format_size(unit.resting_room.bytes)} of each GPU are for engines that stay while their models sleep"
    return replace(unit, notes=(*unit.notes, words))


def copier_bytes(memory: MemorySection, rules: MemoryRules) -> int:
    """Bytes of each GPU for the context of the process that copies weights back; nothing where weights are loaded."""
    return 0 if memory.host_copies == "off" else rules.context_bytes


def resting_bytes(memory: MemorySection) -> int | None:
    """Bytes of each GPU for engines that stay while their models sleep, as the fleet file says; None: see
    `gpu.budget.resting_room`. Without copies of weights in the host's memory none stay."""
    asked = memory.resting_engines
    if memory.host_copies == "off" or asked == "off":
        return 0
    return asked if isinstance(asked, int) else None


def resident_rules(fleet: Fleet, gpus: Sequence[Gpu]) -> MemoryRules:
    """Memory that models of a fleet with `memory` are taken to need when they are divided among GPUs.

    Raises:
        FleetError: `memory.limit` is more than a GPU has.
    """
    rules, memory = MemoryRules.served(_utilisation(fleet, gpus)), fleet.memory or MemorySection()
    more = copier_bytes(memory, rules) + (resting_bytes(memory) or 0)
    return replace(rules, reserve_bytes=rules.reserve_bytes + more)


def _utilisation(fleet: Fleet, gpus: Sequence[Gpu]) -> float:
    """The part of each GPU's memory that everything together may take.

    Raises:
        FleetError: `memory.limit` is more than a GPU has.
    """
    limit = AUTO if fleet.memory is None else fleet.memory.limit
    if not isinstance(limit, int):
        return fleet.cluster.gpu_memory
    try:
        return part_of_gpu(limit, min(gpu.memory_bytes for gpu in gpus))
    except ValueError as error:
        raise FleetError([fleet.problem(("memory", "limit"), str(error))]) from None


def part_of_gpu(limit: int, memory_bytes: int) -> float:
    """The part of a GPU with so much memory that `memory.limit` is, in place of `cluster.gpu_memory`.

    Raises:
        ValueError: it is more than the GPU has.
    """
    if limit > memory_bytes:
        raise ValueError(
            f"{format_size(limit)} are more than a GPU has ({format_size(memory_bytes)}); it is of each GPU"
        )
    # Rounded down again, it is the same number of bytes.
    return (limit + 0.5) / memory_bytes


def _type(name: str) -> str:
    """The name of the cost model for a type that a user wrote."""
    try:
        return device(name).name
    except CostError:
        return name


def _planned(
    fleet: Fleet, demands: Sequence[Demand], gpus: Sequence[Gpu], kind: str | None, rules: MemoryRules
) -> tuple[dict[str, SmShares], str]:
    """Shares by the planner, and a note if it could not plan."""
    unplanned = {demand.name: UNPLANNED for demand in demands}
    default = f"every model gets {UNPLANNED.prefill:.0%} of the SMs for prefill and {UNPLANNED.decode:.0%} for decode"
    if kind is None:
        return unplanned, f"nothing is known of the speed of a {gpus[0].name}: {default}; `sm` of a model sets others"
    memory = min(gpu.memory_bytes for gpu in gpus)
    shares = unit_shares(demands, kind, len(gpus), memory, rules, Roofline(), turns=fleet.policy == "fcfs")
    if shares is None:
        return unplanned, f"the planner sees no room for this fleet on these GPUs: {default}"
    return shares, ""


def unit_shares(
    demands: Sequence[Demand],
    kind: str,
    ranks: int,
    memory_bytes: int,
    rules: MemoryRules,
    latency: LatencyModel,
    turns: bool = False,
) -> dict[str, SmShares] | None:
    """The SM shares that serve most when all models are one unit; None if they do not fit or costs are not known.

    With objectives in the fleet file those count, as in `muxserve plan`.
    """
    mesh = Mesh(kind, ranks)
    members = tuple(Member(index) for index in range(len(demands)))
    engines = Engines(demands, latency, {kind: memory_bytes}, rules, sharing=None if turns else SHARED)
    has_objectives = any(demand.slo_ttft is not None or demand.slo_tpot is not None for demand in demands)
    values = Values(Estimator(Candidates(engines)), Objective("slo" if has_objectives else "throughput"))
    try:
        estimate = values.estimate(mesh, members)
    except ValueError:
        return None
    return {
        demands[model.member.model].name: SmShares(estimate.prefill_share, model.decode_share)
        for model in estimate.models
    }


def unplanned_shares(fleet: Fleet, one_engine: Collection[str]) -> dict[str, SmShares]:
    """The shares of models whose speed is not looked at, where those of `one_engine` have one."""
    shares = dict.fromkeys((model.name for model in fleet.models), UNPLANNED)
    return _with_overrides(fleet, _for_one_engine(fleet, shares, one_engine))


def resident_policy(fleet: Fleet, one_engine: Collection[str]) -> str:
    """The policy of a unit of models that sleep. Which of them are awake together is not known beforehand, so that no
    shares for life would fit: where each has one engine and the file names no policy, no lease is withheld."""
    if "policy" in fleet.model_fields_set or len(one_engine) < len(fleet.models):
        return fleet.policy
    return "free"


def _for_one_engine(fleet: Fleet, shares: Mapping[str, SmShares], one_engine: Collection[str]) -> dict[str, SmShares]:
    """Shares where models of one engine have the larger one of what two would have: its steps hold both phases. None
    limits them under the policy `free`, by which the hardware shares."""
    found = dict(shares)
    for name in one_engine:
        share = 1.0 if fleet.policy == "free" else max(shares[name].prefill, shares[name].decode)
        found[name] = SmShares(share, share)
    return found


def _with_overrides(fleet: Fleet, shares: Mapping[str, SmShares]) -> dict[str, SmShares]:
    """What the fleet file says of a model goes before the planner."""
    return {
        model.name: SmShares(
            shares[model.name].prefill if model.sm.prefill is None else model.sm.prefill,
            shares[model.name].decode if model.sm.decode is None else model.sm.decode,
        )
        for model in fleet.models
    }
