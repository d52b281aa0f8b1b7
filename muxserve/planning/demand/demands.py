"""From a fleet file to what the planner wants: demands, a cluster, and where costs come from."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from muxserve.config import AUTO, Fleet, FleetError, Model, Problem
from muxserve.config.adapters import AdapterError, slots_of
from muxserve.config.problems import shown
from muxserve.config.schema import MOST_GPUS
from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.calibration import graphs_of
from muxserve.costs.devices import device
from muxserve.costs.latency import CostError
from muxserve.planning.demand.checkpoints import (
    CheckpointError,
    Hub,
    HuggingFaceHub,
    architecture_of,
    kv_cache_of,
)
from muxserve.planning.demand.known_models import known_config, planned_architecture
from muxserve.planning.demand.private import private_because
from muxserve.workload import Context
from placement.cluster import Cluster, Node, ShapeName
from placement.demand import Demand

_NODES = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})(?::(.+))?")


class Batch(NamedTuple):
    """What a step may hold: sequences, and tokens of them."""

    seqs: int
    tokens: int


CPU_BATCH = Batch(64, 2048)
SMALL_GPU_BATCH = Batch(256, 2048)


def gpu_batch(name: str, memory_bytes: int) -> Batch:
    """What vLLM's API server gives a step on a GPU (`EngineArgs.get_batch_defaults`; a test compares them)."""
    if memory_bytes >= 160 << 30:
        return Batch(1024, 16384)
    if memory_bytes >= 70 << 30 and "a100" not in name.lower():
        return Batch(1024, 8192)
    return SMALL_GPU_BATCH


def least_batch(gpus: Iterable[tuple[str, int]]) -> Batch:
    """The smallest of several GPUs' defaults, of which names and bytes are given; of none that of a CPU."""
    return min((gpu_batch(name, memory) for name, memory in gpus), default=CPU_BATCH)


def default_batch(fleet: Fleet, gpus: Iterable[tuple[str, int]]) -> Batch:
    """What a step of a model holds where the fleet file does not say it. Each awake engine keeps the memory of its
    largest step: where memory decides which models are awake, those are the steps of GPUs with little memory."""
    default = least_batch(gpus)
    return default if fleet.memory is None else min(default, SMALL_GPU_BATCH)


def batch_of(model: Model, default: Batch) -> Batch:
    """What a step of a model holds: as the fleet file says, else the default, made to fit what it says."""
    seqs, tokens = model.max_num_seqs, model.max_num_batched_tokens
    if isinstance(seqs, int):
        return Batch(seqs, tokens if isinstance(tokens, int) else max(seqs, default.tokens))
    if isinstance(tokens, int):
        return Batch(min(default.seqs, tokens), tokens)
    return default


def demands_of(
    fleet: Fleet, base: Path, hub: Hub | None = None, gpus: Collection[tuple[str, int]] = ()
) -> list[Demand]:
    """What each model of the fleet asks for. `base` is the fleet file's directory, `gpus` are names and bytes of the
    devices that it may be served on (none: the CPU).

    On a GPU, checkpoints in float32 whose dtype is auto are planned in bfloat16, as nobody serves them otherwise there.

    Raises:
        FleetError: a model's architecture cannot be had or served; with file and line.
    """
    hub, default = hub or HuggingFaceHub(), default_batch(fleet, gpus)
    problems: list[Problem] = []
    demands: list[Demand] = []
    # All at a time: a hub takes long to answer, or not to.
    with ThreadPoolExecutor(max_workers=len(fleet.models)) as threads:
        asked = [threads.submit(_architecture, model, base, hub, bool(gpus)) for model in fleet.models]
    for index, (model, found) in enumerate(zip(fleet.models, asked, strict=True)):
        key = "path" if model.path else "hub" if model.hub else "architecture"
        try:
            architecture = found.result()
            key = "adapters" if model.adapters is not None else key
            architecture = with_adapters(model, architecture, bool(gpus))
        except (CheckpointError, ValueError) as error:
            problems.append(fleet.problem(("models", index, key), str(error)))
            continue
        if words := no_choice(model, architecture):
            problems.append(fleet.problem(("models", index, "engines"), words))
            continue
        demands.append(demand_of(model, architecture, bool(gpus), batch_of(model, default)))
    if problems:
        raise FleetError(problems)
    return demands


def with_adapters(model: Model, architecture: ModelArchitecture, on_gpus: bool) -> ModelArchitecture:
    """The architecture with the room that the model's engines keep for LoRA adapters.

    Raises:
        AdapterError: the fleet file gives the model adapters that it cannot have.
    """
    slots = slots_of(model)
    if slots is None:
        return architecture
    if architecture.pooling:
        raise AdapterError("adapters are served with models that generate text, and this one answers with vectors")
    if on_gpus:
        raise AdapterError("LoRA adapters are served on CPU only; leave them out, or serve the model on a CPU")
    return replace(architecture, adapter_slots=slots.count, adapter_rank=slots.rank)


def _architecture(model: Model, base: Path, hub: Hub, on_gpus: bool) -> ModelArchitecture:
    """
    Raises:
        CheckpointError, ValueError: it cannot be had or served.
    """
    if model.path is None and model.hub is None:
        return _named(model, model.architecture or "", base, hub)
    try:
        return architecture_of(model, hub, on_gpus)
    except CheckpointError:
        if model.hub is None or model.revision is not None or known_config(model.hub) is None:
            raise
        found = _named(model, model.hub, base, hub)
        note = f"its config.json is one that is known here for {model.hub}, which the hub did not give"
        return replace(found, estimated=found.estimated or note)


def _named(model: Model, name: str, base: Path, hub: Hub) -> ModelArchitecture:
    """What is in the local cache is not asked for over the network."""
    cached = HuggingFaceHub(reaches=lambda: False)
    found = planned_architecture(name, base, (cached, hub) if isinstance(hub, HuggingFaceHub) else (hub,))
    return replace(found, kv_cache=kv_cache_of(model) or found.kv_cache)


def no_choice(model: Model, architecture: ModelArchitecture) -> str:
    """Why the fleet file must not choose the engines that it does; empty if it may."""
    if not architecture.pooling or not (model.engines == "one" or model.has_own_unit):
        return ""
    return (
        "the model answers with vectors, and has one engine anyway: its prefill is all there is to a request; leave "
        "`engines` out"
    )


def demand_of(model: Model, architecture: ModelArchitecture, gpu: bool, batch: Batch) -> Demand:
    """What a model asks for, on a GPU or a CPU, with steps of that size."""
    dtype = architecture.dtype if model.dtype == AUTO else model.dtype
    if gpu and model.dtype == AUTO and dtype == "float32":
        dtype = "bfloat16"
    slo = model.slo
    max_len = model.max_len if isinstance(model.max_len, int) else None
    prompt, output = _lengths(model, max_len or architecture.default_max_len, architecture.pooling)
    return Demand(
        name=model.name,
        architecture=architecture.on_gpus() if gpu else architecture,
        rate=model.rate,
        prompt_tokens=prompt,
        output_tokens=output,
        dtype=dtype,
        slo_ttft=None if slo.ttft_ms is None else slo.ttft_ms / 1000,
        slo_tpot=None if slo.tpot_ms is None else slo.tpot_ms / 1000,
        max_num_seqs=batch.seqs,
        own_batch=isinstance(model.max_num_seqs, int),
        max_num_batched_tokens=batch.tokens,
        graphs=graphs_of(model.engine_args),
        ahead=gpu and schedules_ahead(model, architecture),
        # The simulator knows no snapshots of states.
        prefix_caching=model.prefix_caching and architecture.causal and architecture.states is None,
        max_len=max_len,
        shape=_shape(model, architecture),
        **_replicas(model),
    )


def schedules_ahead(model: Model, architecture: ModelArchitecture) -> bool:
    """Whether engines of the model that decode on one GPU schedule a step while the one before is computed."""
    asked = bool(model.engine_args.get("async_scheduling")) and not architecture.pooling
    unlike = architecture.states is not None or architecture.sees_images
    return asked and (not unlike or bool(private_because(model, architecture)))


def _shape(model: Model, architecture: ModelArchitecture) -> ShapeName | None:
    """The engines that a model must have; None: the fleet file leaves them to the plan. A model that answers with
    vectors has an engine for prefill alone, as it has beside another one for decode, and one with a cache of its own
    has one engine."""
    if architecture.pooling:
        return "split"
    if private_because(model, architecture):
        return "one"
    if model.is_open:
        return None
    return "one" if model.has_own_unit or model.engines == "one" else "split"


def _lengths(model: Model, context: int, pooling: bool) -> tuple[int, int]:
    """Mean tokens of prompts and answers: those that are declared, and defaults as far as these leave room for them."""
    workload = model.workload
    if pooling:
        # What a prefill ends with is the answer.
        declared = "prompt_tokens" in workload.model_fields_set
        return workload.prompt_tokens if declared else min(workload.prompt_tokens, context), 1
    prompt, output = workload.prompt_tokens, workload.output_tokens
    if "prompt_tokens" not in workload.model_fields_set:
        left = context // 2 if "output_tokens" not in workload.model_fields_set else context - output
        prompt = max(1, min(prompt, left))
    if "output_tokens" not in workload.model_fields_set:
        output = max(1, min(output, context - prompt))
    return prompt, output


def contexts_of(demands: Iterable[Demand]) -> dict[str, Context]:
    """What requests to each model must fit into."""
    return {demand.name: Context(demand.context, not demand.architecture.pooling) for demand in demands}


def check_lengths(fleet: Fleet, demands: Iterable[Demand]) -> None:
    """The requests that the file declares fit into their models' contexts.

    Raises:
        FleetError: some do not, so that no engine could serve them; with file and line.
    """
    index = {model.name: index for index, model in enumerate(fleet.models)}
    problems = []
    for demand in demands:
        found = _too_long(fleet.model(demand.name), demand)
        if found is not None:
            key, text = found
            problems.append(fleet.problem(("models", index[demand.name], "workload", key), text))
    if problems:
        raise FleetError(problems)


def _too_long(model: Model, demand: Demand) -> tuple[str, str] | None:
    """The key and what is wrong, if the declared requests of a model do not fit into its context."""
    declared = model.workload.model_fields_set
    if not declared & {"prompt_tokens", "output_tokens"}:
        return None
    context, prompt, output = demand.context, demand.prompt_tokens, demand.output_tokens
    where = "its checkpoint allows"
    if isinstance(model.max_len, int):
        where = "max_len gives"
    elif context < demand.architecture.default_max_len:
        where = "this machine has memory for"
    limit = f"the {context:,} tokens of context that {where}"
    least = 0 if demand.architecture.pooling else 1
    if "prompt_tokens" in declared and prompt + least > context:
        return "prompt_tokens", f"prompts of {prompt:,} tokens do not fit into {limit}; at most {context - least:,} do"
    if least and prompt + output > context:
        text = f"answers of {output:,} tokens behind prompts of {prompt:,} do not fit into {limit}"
        return "output_tokens", f"{text}; at most {max(0, context - prompt):,} do"
    return None


def _replicas(model: Model) -> dict[str, int]:
    """Bounds, where the fleet file has some: one replica for good is the default, which leaves the number open."""
    bounds = model.replicas
    if not bounds.scales and bounds.max == 1:
        return {}
    return {"least": max(1, bounds.min), "most": bounds.max}


class ClusterError(ValueError):
    """GPUs given on the command line make no sense; the message says why."""


def cluster_of(
    fleet: Fleet, gpus: int | None = None, gpu_type: str | None = None, nodes: str | None = None
) -> Cluster | None:
    """The GPUs to plan for: those of the fleet file, or those given instead. None: no GPUs, the CPU of this machine.

    Args:
        gpus: their number, in machines of the file's `gpus_per_node`.
        gpu_type: their type.
        nodes: machines, as `4x8:A100-80GB,2x4:L20` (count, GPUs of each, type).

    Raises:
        FleetError: the fleet file names an unknown type or none, or more GPUs than a plan may have.
        ClusterError: the arguments do not go together, or name an unknown type or too many GPUs.
    """
    own = fleet.cluster
    if gpus is not None and not 0 <= gpus <= MOST_GPUS:
        raise ClusterError(f"--gpus: a plan has at most {MOST_GPUS:,} GPUs, not {gpus:,}")
    if nodes is not None:
        if gpus is not None:
            raise ClusterError("--gpus and --nodes exclude each other")
        if gpu_type is not None and all(":" in part for part in nodes.split(",")):
            raise ClusterError("--gpu-type has no effect: --nodes says the type of each machine's GPUs")
        return _parsed(nodes, gpu_type or own.gpu_type)
    if gpus is None and gpu_type is None and own.nodes:
        return Cluster(tuple(_file_nodes(fleet)))
    count = (len(own.gpu_ids) or own.gpus) if gpus is None else gpus
    if count == 0:
        if gpu_type is not None:
            raise ClusterError("--gpu-type needs --gpus, or gpus in the fleet file")
        return None
    kind = gpu_type or own.gpu_type
    if kind is None and own.nodes:
        kind = own.nodes[0].gpu_type
    if kind is None and gpus is None:
        key = "gpu_ids" if own.gpu_ids else "gpus"
        message = "needs `gpu_type`, e.g. A100-80GB; or give --gpu-type"
        raise FleetError([fleet.problem(("cluster", key), message)])
    if kind is None:
        raise ClusterError("the type of the GPUs is not known; give --gpu-type, or gpu_type in the fleet file")
    return equal_nodes(count, _known(fleet, kind, gpu_type is None), own.gpus_per_node)


def equal_nodes(gpus: int, kind: str, per_node: int) -> Cluster:
    """`gpus` devices in machines of `per_node`; the last has what is left."""
    full, rest = divmod(gpus, per_node)
    return Cluster((Node(kind, per_node),) * full + ((Node(kind, rest),) if rest else ()))


def memory_of(cluster: Cluster) -> dict[str, int]:
    """Bytes of each device type."""
    return {node.device: device(node.device).memory_bytes for node in cluster.nodes}


def _file_nodes(fleet: Fleet) -> list[Node]:
    nodes, problems = [], []
    total = sum(each.gpus * each.count for each in fleet.cluster.nodes)
    if total > MOST_GPUS:
        message = f"have {total:,} GPUs together, and a plan has at most {MOST_GPUS:,}"
        raise FleetError([fleet.problem(("cluster", "nodes"), message)])
    for index, each in enumerate(fleet.cluster.nodes):
        try:
            nodes += [Node(device(each.gpu_type).name, each.gpus)] * each.count
        except CostError as error:
            problems.append(fleet.problem(("cluster", "nodes", index, "gpu_type"), str(error)))
    if problems:
        raise FleetError(problems)
    return nodes


def _known(fleet: Fleet, kind: str, from_file: bool) -> str:
    try:
        return device(kind).name
    except CostError as error:
        if from_file:
            raise FleetError([fleet.problem(("cluster", "gpu_type"), str(error))]) from None
        raise ClusterError(f"--gpu-type: {error}") from None


def _parsed(text: str, kind: str | None) -> Cluster:
    nodes: list[Node] = []
    total = 0
    for part in text.split(","):
        match = _NODES.fullmatch(part.strip())
        if match is None or not int(match[2]) or match[1] == "0":
            raise ClusterError(f"--nodes: {shown(part)} is not COUNTxGPUS:TYPE such as 4x8:A100-80GB")
        total += int(match[1] or 1) * int(match[2])
        if total > MOST_GPUS:
            raise ClusterError(f"--nodes: a plan has at most {MOST_GPUS:,} GPUs, and {shown(text)} has more")
        name = match[3] or kind
        if name is None:
            raise ClusterError(f"--nodes: {part!r} has no type; write {part.strip()}:A100-80GB, or give --gpu-type")
        try:
            nodes += [Node(device(name).name, int(match[2]))] * int(match[1] or 1)
        except CostError as error:
            raise ClusterError(f"--nodes: {error}") from None
    return Cluster(tuple(nodes))
