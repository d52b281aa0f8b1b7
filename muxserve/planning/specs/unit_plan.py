"""The units of a fleet: which models each has, and a plan of each that fits its machine.

Without a plan file, units are formed by the numbers of replicas (`parts_of`); `as_placed` and `arranged` follow a plan
file. `resolve_unit` reads every model's architecture and divides memory and threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from muxserve.config import AUTO, Fleet, FleetError, Model, Problem
from muxserve.costs.architecture import ModelArchitecture, split_layers
from muxserve.gpu.budget import BudgetError
from muxserve.gpu.nvml import Gpu
from muxserve.gpu.unit import GpuPlan, GpuUnit
from muxserve.planning.candidates.device_pool import CPU
from muxserve.planning.candidates.layouts import stages_of
from muxserve.planning.demand.checkpoints import (
    CheckpointError,
    Hub,
    HuggingFaceHub,
    architecture_of,
    without_chat_template,
)
from muxserve.planning.demand.demands import CPU_BATCH, Batch, batch_of, demand_of, least_batch, no_choice
from muxserve.planning.demand.private import LOST, has_one_engine, private_because, unpooled
from muxserve.spec import ModelSpec, PolicyName
from muxserve.vllm.quantisation import beyond_cores, uncomputable, unshareable
from placement import Machine, ModelDemand, PlanError, PlanProblem, UnitPlan, plan_unit
from placement.cluster import PlacedUnit
from placement.demand import Demand
from placement.format import enumerate_words, format_size
from placement.unit_types import Device

UNIT = "u0"
# With it vLLM splits the layers of every model in a process as it says, whatever stages there are.
PARTITION = "VLLM_PP_LAYER_PARTITION"


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
        part = part.model_copy(update={"policy": unit.policy})
    if unit.device != CPU:
        return part
    return part.model_copy(update={"kv_pool": fleet.kv_pool.model_copy(update={"size": unit.kv_bytes})})


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
    """The model with the engines, and the batching, that a plan gives it in a unit."""
    model = model.with_engines(unit.shape_of(model.name), unit.stages, unit.rolls)
    return model.model_copy(update={"batching": unit.batching}) if unit.batching else model


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


def check_together(fleet: Fleet, plans: Sequence[ResolvedUnit], machine: Machine) -> None:
    """Each unit fits; together they may not."""
    if len(plans) == 1:
        return
    pools = sum(plan.unit.pool_bytes * plan.demands[0].ranks for plan in plans)
    caches = sum(plan.unit.kv_bytes * plan.demands[0].ranks for plan in plans) - pools
    weights = sum(d.architecture.weight_bytes(d.dtype) for plan in plans for d in plan.demands)
    count, shared = len(plans), machine.shared_memory_bytes
    key = ("kv_pool", "size") if fleet.kv_pool.size != AUTO else ("models",)
    if shared is not None and pools > shared:
        message = (
            f"the pools of {count} units take {format_size(pools)} together, but only {format_size(shared)} of shared "
            "memory (/dev/shm) are free; make it larger (docker run --shm-size), or the pools smaller (kv_pool.size)"
        )
        raise FleetError([fleet.problem(key, message)])
    kept = pools + caches
    if kept + weights > machine.memory_bytes:
        message = (
            f"{count} units need {format_size(weights)} for weights (every unit loads its own) and "
            f"{format_size(kept)} for KV, but the memory is {format_size(machine.memory_bytes)}; "
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


# ---------------------------------------------------------------- a unit that fits its machine


@dataclass(frozen=True)
class ResolvedUnit:
    """A unit that fits the machine: `fleet` has its models alone. `unit` has the planner's notes for the user; `gpu` is
    None for serving on CPU. `serves` are the models that have engines from the beginning; None: all. `units`: how
    many units the machine's memory is for."""

    fleet: Fleet
    unit: UnitPlan
    demands: tuple[ModelDemand, ...]
    machine: Machine
    gpu: GpuUnit | None = None
    name: str = UNIT
    serves: tuple[str, ...] | None = None
    units: int = 1

    @property
    def architectures(self) -> tuple[ModelArchitecture, ...]:
        """Those of the models, in their order."""
        return tuple(demand.architecture for demand in self.demands)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided for the user, in words."""
        templates = filter(None, map(without_chat_template, self.fleet.models))
        lost = [f"what a private cache does without: {LOST}"] if any(d.private for d in self.demands) else []
        how = self.gpu.describe() if self.gpu else self._on_cpu()
        return (*how, *self.unit.notes, *lost, *estimated_in_words(self.demands), *templates)

    def _on_cpu(self) -> Iterator[str]:
        model, stages = self.fleet.models[0], self.demands[0].stages
        if stages > 1:
            yield f"{model.name} has one engine of both phases, its layers over {stages} processes"
        if model.rolls:
            yield f"{model.name} has one engine of both phases, and prefill rolls over its replicas"
        generating = [demand for demand in self.demands if not demand.architecture.pooling]
        if names := [demand.name for demand in generating if not demand.one_engine]:
            yield f"{enumerate_words(names)} {'has' if len(names) == 1 else 'have'} an engine for each phase"

    @property
    def policy(self) -> PolicyName:
        """By which the unit's scheduler decides."""
        if self.gpu is not None and self.gpu.one_at_a_time:
            return "fcfs"
        (model, *_) = self.fleet.models
        if model.rolls:
            return "rolling"
        # A replica that has its devices to itself shares them with nobody, so that no lease is withheld.
        alone = len(self.demands) == 1 and self.demands[0].one_engine
        return "free" if alone else self.fleet.policy

    @property
    def served(self) -> tuple[str, ...]:
        """The models that have engines from the beginning."""
        return tuple(model.name for model in self.fleet.models) if self.serves is None else self.serves

    def with_fleet(self, fleet: Fleet) -> ResolvedUnit:
        """The same plan for the same fleet with other model paths."""
        return replace(self, fleet=fleet)

    def with_paths(self, fleet: Fleet) -> ResolvedUnit:
        """The same plan with the model paths of `fleet`, which has these models and perhaps others."""
        models = [each.model_copy(update={"path": fleet.model(each.name).path}) for each in self.fleet.models]
        return replace(self, fleet=self.fleet.with_models(models))

    def with_gpu(self, gpu: GpuUnit) -> ResolvedUnit:
        """The same plan with the GPUs shared in another way."""
        return replace(self, gpu=gpu)

    def gpu_plan(self) -> GpuPlan | None:
        """What a host has to know of the GPUs; None for serving on CPU."""
        if self.gpu is None:
            return None
        cluster = self.fleet.cluster
        size = _known(self.fleet.kv_pool.size)
        return GpuPlan(self.gpu, self.demands, self.machine, _known(cluster.cores), size, cluster.mps)


def resolve_unit(
    fleet: Fleet,
    machine: Machine,
    hub: Hub | None = None,
    gpu: GpuUnit | None = None,
    *,
    units: int = 1,
    block_tokens: Mapping[str, int] | None = None,
) -> ResolvedUnit:
    """Read every model's architecture and plan one unit of all of them.

    Args:
        gpu: the GPUs to serve on; None: the CPU.
        units: how many units the machine's memory is for.
        block_tokens: tokens of a block of models that have replicas elsewhere.

    Raises:
        FleetError: a model cannot be served or the fleet does not fit; all reasons, with file and line.
        ValueError: a model that has a unit to itself is not the only one.
    """
    if len(fleet.models) > 1 and any(model.has_own_unit for model in fleet.models):
        raise ValueError(
            "models over several stages, and those over whose replicas prefill rolls, have units to themselves"
        )
    default = least_batch((each.name, each.memory_bytes) for each in gpu.gpus) if gpu else CPU_BATCH
    fleet = fleet.with_models([with_batch(model, batch_of(model, default)) for model in fleet.models])
    demands = model_demands(fleet, machine, hub, gpu, block_tokens or {}, units)
    return ResolvedUnit(fleet, _unit(fleet, demands, machine, gpu, units), demands, machine, gpu, units=units)


def with_batch(model: Model, batch: Batch) -> Model:
    """The model with sizes of its steps."""
    return model.model_copy(update={"max_num_seqs": batch.seqs, "max_num_batched_tokens": batch.tokens})


def model_demands(
    fleet: Fleet,
    machine: Machine,
    hub: Hub | None,
    gpu: GpuUnit | None,
    block_tokens: Mapping[str, int],
    units: int = 1,
) -> tuple[ModelDemand, ...]:
    """What the models need of a unit; arguments and errors are those of `resolve_unit`."""
    hub = hub or HuggingFaceHub()
    problems: list[Problem] = []
    demands: list[ModelDemand] = []
    cores = _known(fleet.cluster.cores) or machine.cores
    for key in ("gpus", "nodes"):
        if getattr(fleet.cluster, key) and gpu is None:
            message = f"this works on the CPU of this machine only; leave {key} out here"
            problems.append(fleet.problem(("cluster", key), message))
    for model in fleet.models:
        try:
            architecture = architecture_of(model, hub)
        except CheckpointError as error:
            problems.append(fleet.model_problem(model.name, "path" if model.path else "hub", str(error)))
            continue
        stages, problem = stages_of(fleet, model, gpu.ranks if gpu else 0)
        split = _partition_problem(fleet, model, architecture.layers, stages, os.environ)
        problems += [each for each in (problem, split) if each]
        ranks = fleet.cluster.ranks * stages if gpu is None else gpu.ranks
        if words := no_choice(model, architecture):
            problems.append(fleet.model_problem(model.name, "engines", words))
        device: Device = "cpu" if gpu is None else "cuda"
        private, one_engine = private_because(model, architecture), has_one_engine(model, architecture, device)
        if words := unpooled(model, architecture):
            problems.append(fleet.model_problem(model.name, "kv", words))
        asked = demand_of(model, architecture, gpu is not None, batch_of(model, CPU_BATCH))
        demand = replace(
            ModelDemand.of(replace(asked, shape="one" if one_engine else "split")),
            threads=_known(model.threads) or _threads(fleet, one_engine, cores, ranks, units),
            ranks=ranks,
            block_tokens=block_tokens.get(model.name),
            stages=stages,
            sleeps=fleet.memory is not None and model.keep == "auto",
            device=device,
            private=private,
            machine_page=machine.page_bytes,
        )
        demands.append(demand)
        if gpu is not None and demand.dtype == "float32":
            message = "FlashAttention has no float32; use bfloat16 or float16 on a GPU, or leave dtype out"
            problems.append(fleet.model_problem(model.name, "dtype", message))
        if gpu is None and (words := uncomputable(architecture.quantisation, demand.dtype)):
            problems.append(fleet.model_problem(model.name, "dtype", words))
        if gpu is None and (words := beyond_cores(architecture.quantisation, machine.avx512, machine.amx)):
            problems.append(fleet.model_problem(model.name, "path" if model.path else "hub", words))
        if private:
            problems += _private_problems(fleet, model, architecture, ranks, gpu is not None)
        kinds = [*_unlike(architecture), *(["images"] if architecture.sees_images else [])]
        for kind in kinds if not private else ():
            problems += _kind_problems(fleet, model, kind)
        if architecture.sees_images:
            problems += _image_problems(fleet, model, ranks)
        if not private and (words := _unbudgeted(model, architecture, gpu is not None)):
            problems.append(fleet.model_problem(model.name, "batching", words))
        if not private and (words := _unspeculative(model, architecture, ranks, gpu is not None)):
            problems.append(fleet.model_problem(model.name, "engine_args", f"no speculative_config: {words}"))
        if (
            architecture.kv_cache
            and not private
            and (words := _kv_cache_problem(architecture, gpu is not None, machine))
        ):
            problems.append(fleet.model_problem(model.name, "engine_args", words))
        if gpu is not None and (words := unshareable(architecture.quantisation, model.engine_args)):
            problems.append(fleet.model_problem(model.name, "path" if model.path else "hub", words))
        if gpu is None and architecture.gpu_only:
            message = f"{architecture.name} needs {architecture.gpu_only}, which vLLM's kernels on CPU do not compute"
            problems.append(fleet.model_problem(model.name, "path" if model.path else "hub", message))
        if gpu is not None and architecture.cpu_only and not private:
            message = f"{architecture.name} needs {architecture.cpu_only}, which engines on GPUs do not compute yet"
            problems.append(fleet.model_problem(model.name, "path" if model.path else "hub", message))
    if problems:
        raise FleetError(problems)
    return tuple(demands)


def _private_problems(
    fleet: Fleet, model: Model, architecture: ModelArchitecture, ranks: int, on_gpus: bool
) -> list[Problem]:
    """What a model with a cache of its own is asked for that it cannot have."""
    if not architecture.causal:
        message = f"{model.name} keeps no KV, in the pool or elsewhere; leave kv out"
        return [fleet.model_problem(model.name, "kv", message)]
    if on_gpus and fleet.memory is not None:
        message = "on GPUs `memory` does not decide over models with caches of their own; leave one of the two out"
        return [fleet.model_problem(model.name, "kv", message)]
    why = architecture.private or "the fleet file asks for it"
    for key, asked in (
        ("engines", model.engines == "split"),
        ("stages", model.stage_count > 1),
        ("dispatch", model.rolls),
    ):
        if asked:
            message = f"is for models on the pool; {model.name} has a cache of its own: {why}"
            return [fleet.model_problem(model.name, key, message)]
    if ranks > 1 and architecture.pooling:
        message = f"a model that answers with vectors has a cache of its own on one rank, not on {ranks}"
        return [fleet.model_problem(model.name, "kv", message)]
    return []


def estimated_in_words(models: Iterable[Demand | ModelDemand]) -> list[str]:
    """What of the models does not follow from config.json."""
    return [f"{each.name}: {each.architecture.estimated}" for each in models if each.architecture.estimated]


def _unlike(architecture: ModelArchitecture) -> list[str]:
    """What the model keeps instead of K and V by head."""
    return ["latent attention"] * (architecture.latent is not None) + ["states"] * (architecture.states is not None)


def _unbudgeted(model: Model, architecture: ModelArchitecture, on_gpus: bool) -> str:
    """Why the steps of the model cannot have the budget that its `batching` asks for; empty if they can."""
    if model.step_batching == "vllm" or on_gpus or architecture.latent is None:
        return ""
    return "must be vllm: vLLM computes prompts with latent attention in one piece on CPU, and a budget cuts them"


def _unspeculative(model: Model, architecture: ModelArchitecture, ranks: int, on_gpus: bool) -> str:
    """Why the model cannot speculate, which it is to do; empty if it can, or is not asked to."""
    if not model.engine_args.get("speculative_config"):
        return ""
    if on_gpus:
        return "speculation was not tried on GPUs, where a decode batch's graphs have one token of each sequence"
    if ranks > 1:
        return f"speculation is for engines of one rank, not of {ranks}"
    if architecture.pooling:
        return "a model that answers with vectors has no next token"
    kinds = ["images"] * architecture.sees_images + [*_unlike(architecture)]
    if kinds:
        return f"with {enumerate_words(kinds)} speculation was not tried"
    return "with adapters speculation was not tried" if model.adapters is not None else ""


def _image_problems(fleet: Fleet, model: Model, ranks: int) -> list[Problem]:
    """What a model that sees images is asked for that it cannot have."""
    found = []
    where = "path" if model.path else "hub"
    if ranks > 1:
        message = f"models with images are served by engines of one rank, not of {ranks}"
        found.append(fleet.model_problem(model.name, where, message))
    if fleet.cluster.launcher == "ray":
        message = "engines read images from files of the gateway, so models with images are served on its machine only"
        found.append(fleet.model_problem(model.name, where, message))
    return found


def _kind_problems(fleet: Fleet, model: Model, kind: str) -> list[Problem]:
    """What a model with latent attention, states or images is asked for that it cannot have."""
    found = []
    if model.stage_count > 1:
        message = f"models with {kind} are served in one stage; leave `stages` out"
        found.append(fleet.model_problem(model.name, "stages", message))
    if model.adapters is not None:
        message = f"LoRA adapters are not served with models with {kind}; leave them out"
        found.append(fleet.model_problem(model.name, "adapters", message))
    return found


def _kv_cache_problem(architecture: ModelArchitecture, gpu: bool, machine: Machine) -> str:
    """Why the KV cache cannot be of the type that `engine_args` ask for; empty if it can."""
    if architecture.states is not None:
        return "kv_cache_dtype: models that keep states have a cache in the model's dtype; leave it out"
    if architecture.latent is not None and not gpu:
        return "kv_cache_dtype: vLLM's latent attention on CPU keeps its cache in the model's dtype; leave it out"
    if gpu:
        return "kv_cache_dtype: the attention of engines on GPUs has 16-bit pages only; leave it out"
    if architecture.head_dim % 32:
        return (
            f"kv_cache_dtype: FP8 needs a head size that is a multiple of 32, not {architecture.head_dim}; leave it out"
        )
    if not machine.avx512:
        return (
            "kv_cache_dtype: FP8 needs a CPU with AVX-512 or AMX, which this machine has not; leave it out, or serve "
            "the model on a machine that has one"
        )
    return ""


def _threads(fleet: Fleet, one_engine: bool, cores: int, ranks: int, units: int) -> int | None:
    """Threads of each rank of a model's engines where they do not follow from the number of models; see docs."""
    if len(fleet.models) == 1 and one_engine:
        # The only engine of its unit. Those of other units compute at the same time.
        return max(1, cores // units // ranks)
    # With temporal multiplexing an engine has the whole machine while it runs.
    return max(1, cores // ranks) if fleet.policy == "fcfs" else None


def _unit(fleet: Fleet, demands: Sequence[ModelDemand], machine: Machine, gpu: GpuUnit | None, units: int) -> UnitPlan:
    size, cores = _known(fleet.kv_pool.size), _known(fleet.cluster.cores)
    try:
        if gpu is None:
            return plan_unit(demands, machine, cores, size, units=units)
        if words := gpu.too_many_clients():
            words += "; serve fewer models in a unit, or set `cluster.mps: off`"
            raise FleetError([fleet.problem(("models",), words)])
        together = gpu.together(demands)
        return plan_unit(demands, machine, cores, gpu.pool(demands, size), together=together)
    except BudgetError as error:
        raise FleetError([fleet.problem(("cluster", "gpu_memory"), str(error))]) from None
    except PlanError as error:
        raise FleetError(_problem(fleet, problem) for problem in error.problems) from None


def _problem(fleet: Fleet, problem: PlanProblem) -> Problem:
    if problem.model is None:
        return fleet.problem(tuple(problem.key.split(".")), problem.message)
    return fleet.model_problem(problem.model, problem.key, problem.message)


def _known(value: int | str) -> int | None:
    return value if isinstance(value, int) else None


def _partition_problem(
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
