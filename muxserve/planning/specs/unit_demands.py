"""What the models of a unit need of it, and why they cannot have what the fleet file asks for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from muxserve.config import Fleet, FleetError, Model, Problem
from muxserve.config.adapters import AdapterError
from muxserve.costs.architecture import ModelArchitecture, split_layers
from muxserve.gpu.unit import GpuUnit
from muxserve.planning.candidates.layouts import stages_of
from muxserve.planning.demand.checkpoints import CheckpointError, Hub, HuggingFaceHub, architecture_of
from muxserve.planning.demand.demands import CPU_BATCH, batch_of, demand_of, no_choice, with_adapters
from muxserve.planning.demand.private import has_one_engine, private_because, unpooled
from muxserve.vllm.quantisation import beyond_cores, uncomputable, unshareable
from placement import Machine, ModelDemand, PlanError
from placement.cluster import PlacedUnit
from placement.demand import Demand
from placement.format import enumerate_words
from placement.unit import check_models
from placement.unit_types import Device

# With it vLLM splits the layers of every model in a process as it says, whatever stages there are.
PARTITION = "VLLM_PP_LAYER_PARTITION"


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
    cores = known(fleet.cluster.cores) or machine.cores
    for key in ("gpus", "nodes"):
        if getattr(fleet.cluster, key) and gpu is None:
            message = f"this works on the CPU of this machine only; leave {key} out here"
            problems.append(fleet.problem(("cluster", key), message))
    for model in fleet.models:
        try:
            architecture = architecture_of(model, hub, gpu is not None)
        except CheckpointError as error:
            problems.append(fleet.model_problem(model.name, "path" if model.path else "hub", str(error)))
            continue
        try:
            architecture = with_adapters(model, architecture, gpu is not None)
        except AdapterError as error:
            problems.append(fleet.model_problem(model.name, "adapters", str(error)))
            continue
        stages, problem = stages_of(fleet, model, gpu.ranks if gpu else 0)
        split = _partition_problem(fleet, model, architecture.layers, stages, os.environ)
        problems += [each for each in (problem, split) if each]
        ranks = fleet.cluster.ranks * stages if gpu is None else gpu.ranks
        if words := no_choice(model, architecture):
            problems.append(fleet.model_problem(model.name, "engines", words))
        device: Device = "cpu" if gpu is None else "cuda"
        private, one_engine = private_because(model, architecture), has_one_engine(model, architecture)
        if words := unpooled(model, architecture):
            problems.append(fleet.model_problem(model.name, "kv", words))
        asked = demand_of(model, architecture, gpu is not None, batch_of(model, CPU_BATCH))
        demand = replace(
            ModelDemand.of(replace(asked, shape="one" if one_engine else "split")),
            threads=known(model.threads) or _threads(fleet, one_engine, cores, ranks, units),
            ranks=ranks,
            block_tokens=block_tokens.get(model.name),
            stages=stages,
            sleeps=fleet.memory is not None and model.keep == "auto",
            device=device,
            private=private,
            machine_page=machine.page_bytes,
        )
        demands.append(demand)
        problems += unservable(fleet, model, architecture, demand.dtype, ranks, machine, gpu is not None)
    if problems:
        raise FleetError(problems)
    return tuple(demands)


def unservable(
    fleet: Fleet,
    model: Model,
    architecture: ModelArchitecture,
    dtype: str,
    ranks: int,
    machine: Machine,
    on_gpus: bool,
) -> list[Problem]:
    """Why no engine of `ranks` ranks on GPUs, or else on the CPU of the machine, can serve a model in that type as the
    fleet file asks for it."""
    problems: list[Problem] = []
    private, where = private_because(model, architecture), "path" if model.path else "hub"
    if on_gpus and dtype == "float32":
        message = "FlashAttention has no float32; use bfloat16 or float16 on a GPU, or leave dtype out"
        problems.append(fleet.model_problem(model.name, "dtype", message))
    if not on_gpus and model.engine_args.get("async_scheduling"):
        message = (
            "async_scheduling: on a CPU it costs about what it hides, since the thread that schedules takes the cores "
            "that compute; leave it out"
        )
        problems.append(fleet.model_problem(model.name, "engine_args", message))
    if not on_gpus and (words := uncomputable(architecture.quantisation, dtype)):
        problems.append(fleet.model_problem(model.name, "dtype", words))
    if not on_gpus and (words := beyond_cores(architecture.quantisation, machine.avx512, machine.amx)):
        problems.append(fleet.model_problem(model.name, where, words))
    if private:
        problems += _private_problems(fleet, model, architecture, ranks, on_gpus)
    kinds = [*_unlike(architecture), *(["images"] if architecture.sees_images else [])]
    for kind in kinds if not private else ():
        problems += _kind_problems(fleet, model, kind)
    if architecture.sees_images:
        problems += _image_problems(fleet, model, 1 if private else ranks)
    if not private and (words := _unspeculative(model, architecture, ranks, on_gpus)):
        problems.append(fleet.model_problem(model.name, "engine_args", f"no speculative_config: {words}"))
    if architecture.kv_cache and not private and (words := _kv_cache_problem(architecture, on_gpus, machine)):
        problems.append(fleet.model_problem(model.name, "engine_args", words))
    if on_gpus and (words := unshareable(architecture.quantisation, model.engine_args)):
        problems.append(fleet.model_problem(model.name, where, words))
    if not on_gpus and architecture.gpu_only:
        message = f"{architecture.name} needs {architecture.gpu_only}, which vLLM's kernels on CPU do not compute"
        problems.append(fleet.model_problem(model.name, where, message))
    if on_gpus and architecture.cpu_only and not private:
        message = f"{architecture.name} needs {architecture.cpu_only}, which engines on GPUs do not compute yet"
        problems.append(fleet.model_problem(model.name, where, message))
    return problems


def refused(fleet: Fleet, unit: PlacedUnit, demands: Mapping[str, Demand], machine: Machine) -> list[str]:
    """What `muxserve deploy` refuses of a planned unit on GPUs, a sentence for each reason; `demands` are by model."""
    found: list[str] = []
    for placed in unit.models:
        model, demand, ranks = fleet.model(placed.model), demands[placed.model], len(unit.devices)
        problems = unservable(fleet, model, demand.architecture, demand.dtype, ranks, machine, on_gpus=True)
        messages = [each.message for each in problems]
        private = private_because(model, demand.architecture)
        asked = replace(ModelDemand.of(demand), ranks=ranks, stages=unit.stages, device="cuda", private=private)
        try:
            check_models([asked], machine, machine.cores)
        except PlanError as error:
            messages += [each.message for each in error.problems]
        found += [f"`muxserve deploy` refuses {model.name} on GPUs: {message}" for message in messages]
    return found


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


def known(value: int | str) -> int | None:
    """A number of the fleet file; None where it says auto."""
    return value if isinstance(value, int) else None


def estimated_in_words(models: Iterable[Demand | ModelDemand]) -> list[str]:
    """What of the models does not follow from config.json."""
    return [f"{each.name}: {each.architecture.estimated}" for each in models if each.architecture.estimated]


def _unlike(architecture: ModelArchitecture) -> list[str]:
    """What the model keeps instead of K and V by head."""
    return ["latent attention"] * (architecture.latent is not None) + ["states"] * (architecture.states is not None)


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


def _partition_problem(
    fleet: Fleet, model: Model, layers: int, stages: int, environ: Mapping[str, str]
) -> Problem | None:
    """Why the layers would not be split as the pools are sized for: vLLM's environment variable, which all engines
    inherit, says otherwise."""
    told = environ.get(PARTITION)
    if told is None or stages > layers:
        return None
    split = ",".join(map(str, split_layers(layers, stages)))
    if told.replace(" ", "") == split:
        return None
    over = f"its {layers} layers are over {stages} stages as {split}" if stages > 1 else f"it has one stage of {layers}"
    message = f"the environment variable {PARTITION} is {told!r}, which vLLM would split every model by, but {over}"
    return fleet.model_problem(model.name, "stages", f"{message}; unset it")
