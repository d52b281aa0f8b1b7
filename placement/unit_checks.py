"""What keeps models from being served together on one machine, in words for its user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from placement.demand import splits_evenly
from placement.unit_types import Machine, ModelDemand, ModelPlan, PlanError, PlanProblem
from placement.words import enumerate_words, format_size

HEAD_DIMS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})  # of the CPU attention kernel
FLASH_STEP, FLASH_MOST = 8, 256  # head sizes of FlashAttention: multiples of 8 up to 256
FORCED_MEMORY = 0.50  # of the machine's memory: what a pool of size auto may take if one sequence per model needs it
_TABLE_ENTRY = 4  # bytes of a page table per page
_MIB = 1 << 20


def check_models(models: Sequence[ModelDemand], machine: Machine, cores: int, device: str) -> None:
    """Each model by itself can be served on `device`, one of "cpu" and "cuda", with `cores` of the machine.

    Raises:
        PlanError: what is wrong, and what to change.
    """
    problems = []
    if cores > machine.cores:
        problems.append(
            PlanProblem(f"{cores} cores are asked for, but this machine has {machine.cores}", "cluster.cores")
        )
    for model in models:
        architecture = model.architecture
        known = _unknown_head_dim(architecture.head_dim, device)
        if known:
            message = f"its head size {architecture.head_dim} is not one that the attention kernel has ({known})"
            problems.append(PlanProblem(message, "path", model.name))
        if not splits_evenly(architecture, model.tensor_parallel):
            message = (
                f"its {architecture.heads} heads, {architecture.kv_heads} KV heads and MLP of "
                f"{architecture.intermediate} columns cannot be split over {model.tensor_parallel} ranks"
            )
            problems.append(PlanProblem(message, "path", model.name))
        if model.stages > architecture.layers:
            message = f"{model.stages} stages are more than the model has layers ({architecture.layers})"
            problems.append(PlanProblem(message, "stages", model.name))
        if model.max_len is not None and model.max_len > architecture.max_len:
            message = f"{model.max_len} tokens are more than the model was made for ({architecture.max_len})"
            problems.append(PlanProblem(message, "max_len", model.name))
        if model.threads is not None and model.threads > cores:
            message = f"{model.threads} threads are more than the {cores} cores of the cluster"
            problems.append(PlanProblem(message, "threads", model.name))
    if problems:
        raise PlanError(problems)


def _unknown_head_dim(head_dim: int, device: str) -> str:
    """What the attention kernel has instead of that head size; empty if it has it."""
    if device == "cuda":
        good = head_dim % FLASH_STEP == 0 and head_dim <= FLASH_MOST
        return "" if good else f"multiples of {FLASH_STEP} up to {FLASH_MOST}"
    return "" if head_dim in HEAD_DIMS else enumerate_words([str(dim) for dim in sorted(HEAD_DIMS)])


def check_pool(models: Sequence[ModelDemand], total: int, needed: int, device: str) -> None:
    """Pools of `total` bytes on each rank can hold what is `needed` for one sequence of every model.

    Raises:
        PlanError: what is wrong, and what to change.
    """
    if needed <= total:
        return
    at_least = f"{math.ceil(needed / _MIB)}MiB"
    largest = max(models, key=lambda m: (m.max_len or 0) * m.bytes_per_token)
    where = "" if device == "cpu" else " of each GPU"
    message = (
        f"{format_size(max(0, total))}{where} cannot hold one sequence of every model; it must be at least {at_least}"
    )
    if largest.max_len:
        size = format_size(largest.max_len * largest.bytes_per_token)
        message += f", or lower max_len: {largest.max_len} tokens of {largest.name} alone take {size}"
    raise PlanError([PlanProblem(message, "kv_pool.size")])


def check_memory(models: Sequence[ModelDemand], machine: Machine, total: int, needed: int, asked: int | None) -> None:
    """Weights and pools fit into the machine's memory; `total`, `needed` and `asked` are bytes on each rank.

    Raises:
        PlanError: what is wrong, and what to change.
    """
    problems = []
    at_least = f"{math.ceil(needed / _MIB)}MiB"
    total *= models[0].ranks  # all ranks are on this machine
    shared = machine.shared_memory_bytes
    if shared is not None and total > shared:
        message = (
            f"the pool takes {format_size(total)}, but only {format_size(shared)} of shared memory (/dev/shm) "
            f"are free; make /dev/shm larger (docker run --shm-size, or mount -o remount,size=...) or the pool smaller"
        )
        problems.append(PlanProblem(message, "kv_pool.size"))
    if asked is None and total > machine.memory_bytes * FORCED_MEMORY:
        message = (
            f"one sequence of every model needs a pool of {at_least}, more than half of the memory "
            f"({format_size(machine.memory_bytes)}); lower max_len, or set kv_pool.size yourself"
        )
        problems.append(PlanProblem(message, "kv_pool.size"))
    weights = sum(model.architecture.weight_bytes(model.resolved_dtype) for model in models)
    if weights + total > machine.memory_bytes:
        message = (
            f"the weights (about {format_size(weights)}) and the pool ({format_size(total)}) do not fit into the "
            f"memory ({format_size(machine.memory_bytes)}); serve fewer or smaller models, or use dtype: bfloat16"
        )
        problems.append(PlanProblem(message, "models"))
    if problems:
        raise PlanError(problems)


def check_tables(models: Sequence[ModelDemand], plans: Mapping[str, ModelPlan], machine: Machine) -> None:
    """Page tables fit into shared memory, where they are even if pools are in GPUs.

    Raises:
        PlanError: they do not.
    """
    tables = sum(_TABLE_ENTRY * plans[model.name].num_blocks * model.pages_per_block for model in models)
    shared = machine.shared_memory_bytes
    if shared is not None and tables > shared:
        message = (
            f"the page tables take {format_size(tables)}, but only {format_size(shared)} of shared memory (/dev/shm) "
            f"are free; make /dev/shm larger (docker run --shm-size, or mount -o remount,size=...) or the pool smaller"
        )
        raise PlanError([PlanProblem(message, "kv_pool.size")])
