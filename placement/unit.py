"""Plans one unit on one machine: pools, block sizes, quotas, lengths and compute shares.

Quotas start in proportion to a model's demand for pages, as in MuxServe (section 3.3 of arXiv:2404.02015): its request
rate times its layers times its KV heads. Where models of a fleet have different head sizes the demand is counted in
bytes, so that a page that holds fewer tokens counts accordingly.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from muxserve.costs.architecture import ModelArchitecture
from placement.demand import splits_evenly
from placement.format import enumerate_words, format_size
from placement.pools import BLOCK_STEP, KVShape, PoolGroup, group_pools
from placement.unit_types import (
    Machine,
    ModelDemand,
    ModelPlan,
    PlanError,
    PlanProblem,
    PoolPlan,
    TablePlan,
    UnitPlan,
    kept_weights,
)

HEAD_DIMS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})  # of the CPU attention kernel
# By head without the rotated part: sizes of a key and of a value with which prompts are computed on GPUs.
LATENT_HEADS = ((64, 128), (128, 128), (192, 256))
LATENT = (512, 64)  # latent and rotated part that the kernels for latent attention have
FLASH_STEP, FLASH_MOST = 8, 256  # head sizes of FlashAttention: multiples of 8 up to 256
FORCED_MEMORY = 0.50  # of the machine's memory: what a pool of size auto may take if one sequence per model needs it
_TABLE_ENTRY = 4  # bytes of a page table per page
_LEAST_PAGE = 1 << 12  # bytes of a page that nobody takes


def check_models(models: Sequence[ModelDemand], machine: Machine, cores: int) -> None:
    """Each model by itself can be served on its device, with `cores` of the machine.

    Raises:
        PlanError: what is wrong, and what to change.
    """
    problems = []
    if cores > machine.cores:
        problems.append(
            PlanProblem(f"{cores} cores are asked for, but this machine has {machine.cores}", "cluster.cores")
        )
    for model in models:
        architecture, device = model.architecture, model.device
        if device == "cuda" and not architecture.causal and not model.private:
            message = "its tokens see what comes after them, and attention of that kind is served on CPU only"
            problems.append(PlanProblem(message, "path", model.name))
        if architecture.adapter_slots and model.ranks > 1:
            message = f"LoRA adapters are served by engines of one rank, not of {model.ranks}; leave them out"
            problems.append(PlanProblem(message, "adapters", model.name))
        if architecture.latent is not None and not model.private:
            problems += _latent_problems(model)
        paged = architecture.latent is None and not model.private
        known = _unknown_head_dim(architecture.head_dim, device) if paged else ""
        if known:
            message = f"its head size {architecture.head_dim} is not one that the attention kernel has ({known})"
            problems.append(PlanProblem(message, "path", model.name))
        if not splits_evenly(architecture, model.tensor_parallel):
            message = f"its {_split_parts(architecture)} cannot be split over {model.tensor_parallel} ranks"
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


def _latent_problems(model: ModelDemand) -> list[PlanProblem]:
    """What keeps a model with latent attention from being served."""
    latent, device, problems = model.architecture.latent, model.device, []
    if latent is not None and (latent.rank, latent.rope) != LATENT:
        message = (
            f"its latent of {latent.rank} + {latent.rope} numbers is not the one that the kernels for latent attention "
            f"have ({LATENT[0]} + {LATENT[1]})"
        )
        problems.append(PlanProblem(message, "path", model.name))
    if latent is not None and device == "cuda" and (latent.nope, latent.value) not in LATENT_HEADS:
        known = ", ".join(f"{key} and {value}" for key, value in LATENT_HEADS)
        message = (
            f"its heads have keys of {latent.nope} numbers and values of {latent.value}, with which no kernel for "
            f"latent attention computes prompts ({known})"
        )
        problems.append(PlanProblem(message, "path", model.name))
    if model.ranks > 1 and device == "cpu":
        message = "latent attention is served by engines of one rank on CPU; here there would be several"
        problems.append(PlanProblem(message, "path", model.name))
    return problems


def _split_parts(architecture: ModelArchitecture) -> str:
    """What is split over ranks, in words."""
    parts = [f"{architecture.heads} heads", f"{architecture.kv_heads} KV heads"]
    if architecture.states is not None:
        split = architecture.states.heads
        parts.append(f"{split.heads} heads with states in {split.groups} groups")
    return enumerate_words([*parts, f"MLP of {architecture.intermediate} columns"])


def _unmappable(group: PoolGroup, model: ModelDemand) -> PlanProblem:
    message = (
        f"its states would lie in pages of {group.page_bytes} bytes, and engines can map multiples of "
        f"{model.machine_page} only (heads of another size, or float32, have others)"
    )
    return PlanProblem(message, "path", model.name)


def _unknown_head_dim(head_dim: int, device: str) -> str:
    """What the attention kernel has instead of that head size; empty if it has it."""
    if device == "cuda":
        good = head_dim % FLASH_STEP == 0 and head_dim <= FLASH_MOST
        return "" if good else f"multiples of {FLASH_STEP} up to {FLASH_MOST}"
    return "" if head_dim in HEAD_DIMS else enumerate_words([str(dim) for dim in sorted(HEAD_DIMS)])


def check_pool(models: Sequence[ModelDemand], total: int, needed: int) -> None:
    """Pools of `total` bytes on each rank can hold what is `needed` for one sequence of every model, or of those that
    can be awake together.

    Raises:
        PlanError: what is wrong, and what to change.
    """
    if needed <= total:
        return
    at_least = f"{math.ceil(needed / _MIB)}MiB"
    largest = max(models, key=lambda m: (m.max_len or 0) * m.bytes_per_token)
    where = "" if largest.device == "cpu" else " of each GPU"
    every = "all models that can be awake together" if any(model.sleeps for model in models) else "every model"
    message = f"{format_size(max(0, total))}{where} cannot hold one sequence of {every}; it must be at least {at_least}"
    if largest.max_len:
        size = format_size(largest.max_len * largest.bytes_per_token)
        message += f", or lower max_len: {largest.max_len} tokens of {largest.name} alone take {size}"
    raise PlanError([PlanProblem(message, "kv_pool.size")])


def check_memory(
    models: Sequence[ModelDemand], machine: Machine, total: int, needed: int, asked: int | None, private: int = 0
) -> None:
    """Weights, pools and private caches fit into the machine's memory; `total`, `needed` and `asked` are bytes of all
    KV on each rank, of which `private` are in no pool.

    Raises:
        PlanError: what is wrong, and what to change.
    """
    problems = []
    at_least = f"{math.ceil(needed / _MIB)}MiB"
    total *= models[0].ranks  # all ranks are on this machine
    shared = machine.shared_memory_bytes
    pooled = total - private * models[0].ranks
    if shared is not None and pooled > shared:
        message = (
            f"the pool takes {format_size(pooled)}, but only {format_size(shared)} of shared memory (/dev/shm) "
            f"are free; make /dev/shm larger (docker run --shm-size, or mount -o remount,size=...) or the pool smaller"
        )
        problems.append(PlanProblem(message, "kv_pool.size"))
    if asked is None and total > machine.memory_bytes * FORCED_MEMORY:
        message = (
            f"one sequence of every model needs a pool of {at_least}, more than half of the memory "
            f"({format_size(machine.memory_bytes)}); lower max_len, or set kv_pool.size yourself"
        )
        problems.append(PlanProblem(message, "kv_pool.size"))
    weights = kept_weights(models)
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
    tables = sum(_TABLE_ENTRY * plans[model.name].table.num_blocks * model.pages_per_block for model in models)
    shared = machine.shared_memory_bytes
    if shared is not None and tables > shared:
        message = (
            f"the page tables take {format_size(tables)}, but only {format_size(shared)} of shared memory (/dev/shm) "
            f"are free; make /dev/shm larger (docker run --shm-size, or mount -o remount,size=...) or the pool smaller"
        )
        raise PlanError([PlanProblem(message, "kv_pool.size")])


def share_out(total: int, weights: Sequence[float], minimums: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`, none below its minimum; they add up to `total`.

    Whoever would get less than the minimum gets the minimum, and the others share what is left.

    Raises:
        ValueError: the minimums do not fit, or a weight is not positive.
    """
    if len(weights) != len(minimums) or not weights:
        raise ValueError("weights and minimums must be equally many, and at least one")
    if any(weight <= 0 for weight in weights):
        raise ValueError("weights must be positive")
    if sum(minimums) > total:
        raise ValueError(f"minimums of {sum(minimums)} do not fit into {total}")
    free = set(range(len(weights)))
    left = total
    parts = [float(minimum) for minimum in minimums]
    while free:
        scale = left / sum(weights[i] for i in free)
        pinned = {i for i in free if weights[i] * scale < minimums[i]}
        if not pinned:
            for i in free:
                parts[i] = weights[i] * scale
            break
        free -= pinned
        left -= sum(minimums[i] for i in pinned)
    whole = [max(int(part), minimum) for part, minimum in zip(parts, minimums, strict=True)]
    by_remainder = sorted(range(len(parts)), key=lambda i: (whole[i] - parts[i], i))
    rest = total - sum(whole)
    for n in range(abs(rest)):
        # Rounding of floats may have given one too much as well as too little.
        i = by_remainder[n % len(parts)] if rest > 0 else max(range(len(parts)), key=lambda i: whole[i] - minimums[i])
        whole[i] += 1 if rest > 0 else -1
    return whole


MIN_AUTO_LEN = 256  # tokens that a model with max_len auto gets at least
AUTO_MEMORY = 0.10  # of the machine's memory: what a pool of size auto takes at most, unless one sequence needs more
SHARED_MEMORY = 0.80  # of the free shared memory (/dev/shm), where the pool lies
_RESIDENCE = 10.0  # seconds that a request is assumed to hold pages, for the size of an auto pool
MAX_BLOCKS = 1 << 20  # of one page table, the memory manager's limit; met by toy models on large GPUs alone
_MIB = 1 << 20


def plan_unit(
    models: Sequence[ModelDemand],
    machine: Machine,
    cores: int | None = None,
    pool_bytes: int | None = None,
    units: int = 1,
    together: int | None = None,
) -> UnitPlan:
    """Plan all `models` onto `machine`.

    A model's longest sequence is what its pool can hold, whoever shares it. Its floor is what it can count on beside
    those that can be awake together: whoever sleeps has no pages.

    Args:
        models: all split over the same number of ranks, and for the same device. The memory of GPUs is the budget's
            business, not checked here.
        cores: cores for the engines; None: all of the machine.
        pool_bytes: memory of all pools together on each rank; None: from the models' demand, within a tenth of the
            memory. For GPUs it must be given: it is what their budget leaves.
        units: how many such units the machine's memory is for; without `pool_bytes` this one takes its part.
        together: how many of the models that sleep can be awake at a time; None: as many as have room for their
            weights in the machine's memory, or all on GPUs.

    Raises:
        PlanError: the models do not fit; every reason found, and what to change.
        ValueError: no models, or GPUs without the size of the pools.
    """
    if not models:
        raise ValueError("a unit needs at least one model")
    device = models[0].device
    if device == "cuda" and pool_bytes is None:
        raise ValueError("the pools of a GPU have the size that its budget leaves")
    cores = machine.cores if cores is None else cores
    check_models(models, machine, cores)
    groups = pool_groups(models)
    by_name = {model.name: model for model in models}
    block_tokens = {name: tokens for g in groups for name, tokens in zip(g.models, g.block_tokens, strict=True)}
    if together is None and device == "cpu":
        together = awake_together(models, machine.memory_bytes)
    private = [model for model in models if model.private]
    least = [*_least_sizes(models, groups, together), *map(_private_needed, private)]
    needed = sum(_sizes_of_all(models, groups, together)) + sum(map(_private_needed, private))
    total = _pool_size(models, machine, pool_bytes, needed, units)
    check_pool(models, total, sum(least))
    weights = [sum(by_name[name].demand for name in group.models) for group in groups]
    weights += [model.demand for model in private]
    sizes = share_out(total, weights, least) if least else []
    caches = dict(zip([model.name for model in private], sizes[len(groups) :], strict=True))
    if device == "cpu":
        check_memory(models, machine, total, needed, pool_bytes, sum(caches.values()))

    notes: list[str] = []
    pools, plans = [], {}
    for index, (group, size) in enumerate(zip(groups, sizes, strict=False)):
        members = [by_name[name] for name in group.models]
        most = 1 + (MAX_BLOCKS - 1) * min(member.pages_per_block for member in members)
        num_pages = min(size // group.page_bytes, most)
        stateful = [member for member in members if member.state_bytes] if device == "cpu" else []
        if any(group.page_bytes % member.machine_page for member in stateful):
            raise PlanError([_unmappable(group, member) for member in stateful])
        pool = PoolPlan(f"pool{index}", group.dtype, group.page_bytes, num_pages, group.models)
        pools.append(pool)
        if num_pages == most:
            notes.append(f"{pool.name} takes no more: a page table has at most {MAX_BLOCKS} blocks")
        each = zip(members, group.block_tokens, strict=True)
        lengths = [_length(member, group, tokens, num_pages - 1) for member, tokens in each]
        floors = _floors(members, group, num_pages - 1, together)
        zeroed = any(member.state_bytes and group.dtype != "float32" for member in members)
        quotas = share_out(num_pages - 1, [member.demand for member in members], _begin_with(members, floors))
        for member, length, floor, quota in zip(members, lengths, floors, quotas, strict=True):
            wished = member.context
            if length < wished:
                notes.append(
                    f"max_len of {member.name} is {length} tokens instead of {wished}: the pool is too small for more"
                )
            if member.state_bytes:
                notes.append(
                    f"{member.name} keeps states, {format_size(member.state_bytes)} of each sequence beside K and V of "
                    "its tokens; its prefixes are cached with `prefix_caching: true` only"
                )
            threads = _threads(member, models, cores)
            # Any block that the pool could ever hold for this model, and the null block.
            num_blocks = (num_pages - 1) // member.pages_per_block + 1
            states = member.state_blocks(group.page_bytes)
            plans[member.name] = ModelPlan(
                name=member.name,
                pool=pool.name,
                table=TablePlan(block_tokens[member.name], num_blocks, states, zeroed),
                max_len=length,
                threads=threads,
                share=min(1.0, threads * member.ranks / cores),
                quota_pages=quota,
                floor_pages=floor,
            )
    described = _describe(pools, groups)
    if not pools:  # a memory manager has at least one, of the null page and another
        pools.append(PoolPlan("pool0", models[0].dtype, _LEAST_PAGE, 2, ()))
    for model in models:
        if model.name not in plans:
            cache = caches.get(model.name, 0)
            plans[model.name] = _without_pages(model, pools[0].name, _threads(model, models, cores), cores, cache)
            notes.append(
                f"{model.name} has {format_size(cache)} of KV cache of its own (kv: private): {model.private}"
                if cache
                else f"{model.name} keeps no KV and takes no pages"
            )
    if device == "cuda":
        check_tables(models, plans, machine)
    return UnitPlan(cores, tuple(pools), tuple(plans[m.name] for m in models), (*described, *notes))


def _threads(model: ModelDemand, models: Sequence[ModelDemand], cores: int) -> int:
    # Beside the engines that decode, one of those of prompts alone computes at a time.
    at_once = len(models) + any(not each.one_engine for each in models)
    return model.threads or max(1, cores // at_once // model.ranks)


def _private_needed(model: ModelDemand) -> int:
    return model.cache_bytes(model.max_len or _least_auto(model))


def _private_length(model: ModelDemand, cache: int) -> int:
    """Longest sequence of a model with `cache` bytes of its own: as many tokens as two sequences may have."""
    wished = model.architecture.default_max_len
    steps = range(1, wished // BLOCK_STEP + 1)
    fitting = bisect.bisect_right(steps, cache, key=lambda n: 2 * model.cache_bytes(n * BLOCK_STEP))
    return min(wished, max(MIN_AUTO_LEN, fitting * BLOCK_STEP))


def _without_pages(model: ModelDemand, pool: str, threads: int, cores: int, cache: int = 0) -> ModelPlan:
    """The plan of a model that takes no pages: it keeps no KV, or has a `cache` of so many bytes. Its table has the
    null block and another, as small as one can be."""
    length = _private_length(model, cache) if cache else model.architecture.default_max_len
    return ModelPlan(
        name=model.name,
        pool=pool,
        table=TablePlan(model.block_tokens or BLOCK_STEP, num_blocks=2),
        max_len=model.max_len or length,
        threads=threads,
        share=min(1.0, threads * model.ranks / cores),
        cache_bytes=cache,
    )


def pool_groups(models: Sequence[ModelDemand]) -> list[PoolGroup]:
    """The pools of `models`, and who shares them; those that take no pages are in none."""
    return group_pools(
        [
            KVShape(
                m.name,
                m.architecture.head_dim,
                m.architecture.kv_dtype(m.dtype),
                m.block_tokens,
                m.least_page_bytes,
            )
            for m in models
            if m.pages_per_block
        ]
    )


def least_pool_bytes(models: Sequence[ModelDemand], together: int | None = None) -> int:
    """Bytes of all pools and private caches together, on each rank, with which the models can be served; `together` as
    of `plan_unit`."""
    pools = _least_sizes(models, pool_groups(models), together)
    return sum(pools) + sum(_private_needed(m) for m in models if m.private)


def awake_together(models: Sequence[ModelDemand], room: int) -> int:
    """The most models that sleep which can be awake at a time: their weights have `room`, bytes of each rank, beside
    those of the models that never sleep, whatever engines take."""
    weights = [model.architecture.weight_bytes(model.dtype) // model.ranks for model in models]
    room -= sum(size for model, size in zip(models, weights, strict=True) if not model.sleeps)
    taken = itertools.accumulate(sorted(size for model, size in zip(models, weights, strict=True) if model.sleeps))
    return max(1, sum(size <= room for size in taken))


def _pages_together(models: Sequence[ModelDemand], pages: Sequence[int], together: int | None) -> int:
    """Pages that the models need when those are awake that need most; `pages` are those of each."""
    asleep = sorted((count for model, count in zip(models, pages, strict=True) if model.sleeps), reverse=True)
    return sum(count for model, count in zip(models, pages, strict=True) if not model.sleeps) + sum(asleep[:together])


def _begin_with(models: Sequence[ModelDemand], floors: Sequence[int]) -> list[int]:
    """What each quota is at least: whoever sleeps gets its floor when it is woken."""
    return [0 if model.sleeps else floor for model, floor in zip(models, floors, strict=True)]


def _sizes_of_all(models: Sequence[ModelDemand], groups: Sequence[PoolGroup], together: int | None) -> list[int]:
    """Bytes of each pool that hold one sequence of every model, or of those that can be awake together."""
    return [_size(models, group, together, lambda m: m.max_len or _least_auto(m))[0] for group in groups]


def _least_sizes(models: Sequence[ModelDemand], groups: Sequence[PoolGroup], together: int | None) -> list[int]:
    """Bytes of each pool that hold a short sequence of all those models, and any one of the lengths asked for."""
    short = [_size(models, group, together, lambda m: min(m.context, MIN_AUTO_LEN))[0] for group in groups]
    asked = [_size(models, group, together, lambda m: m.max_len or _least_auto(m))[1] for group in groups]
    return [max(both) for both in zip(short, asked, strict=True)]


def _size(
    models: Sequence[ModelDemand], group: PoolGroup, together: int | None, length: Callable[[ModelDemand], int]
) -> tuple[int, int]:
    """Bytes of a pool that holds a sequence of that length of all models that can be awake together, and of one that
    holds any one of these."""
    by_name = {model.name: model for model in models}
    members = [by_name[name] for name in group.models]
    pages = [_pages(m, group, tokens, length(m)) for m, tokens in zip(members, group.block_tokens, strict=True)]
    return (1 + _pages_together(members, pages, together)) * group.page_bytes, (1 + max(pages)) * group.page_bytes


def _least_auto(model: ModelDemand) -> int:
    return min(MIN_AUTO_LEN, model.architecture.default_max_len)


def _pages(model: ModelDemand, group: PoolGroup, block_tokens: int, length: int) -> int:
    """Pages of one sequence of `length` tokens, on each rank."""
    blocks = math.ceil(length / block_tokens) + model.state_blocks(group.page_bytes)
    return blocks * model.pages_per_block


def _pool_size(models: Sequence[ModelDemand], machine: Machine, asked: int | None, needed: int, units: int) -> int:
    """Bytes for all pools together on each rank."""
    if asked is not None:
        return asked
    wanted = 0.0
    for model in models:
        sequences = min(model.max_num_seqs, max(4, math.ceil(model.rate * _RESIDENCE)))
        length = model.context
        wanted += sequences * model.sequence_bytes(length)  # pools of GPUs are given
    limit = machine.memory_bytes * AUTO_MEMORY
    if machine.shared_memory_bytes is not None:
        limit = min(limit, machine.shared_memory_bytes * SHARED_MEMORY)
    size = max(min(wanted, limit / models[0].ranks / units), needed)
    return math.ceil(size / _MIB) * _MIB


def _length(model: ModelDemand, group: PoolGroup, block_tokens: int, pages: int) -> int:
    """Longest sequence of a model of a pool of so many `pages`: its context if the pool holds that, else as many whole
    steps of tokens as it does."""
    if _pages(model, group, block_tokens, model.context) <= pages:
        return model.context
    blocks = pages // model.pages_per_block - model.state_blocks(group.page_bytes)
    return max(_least_auto(model), blocks * block_tokens // BLOCK_STEP * BLOCK_STEP)


def _floors(models: Sequence[ModelDemand], group: PoolGroup, pages: int, together: int | None) -> list[int]:
    """Pages of each model of a pool that it can count on: for one sequence of its longest length, if all such sequences
    together take at most half of the pool, so that quotas can still move; otherwise of the longest common length with
    which they do. `together` as of `plan_unit`."""

    def floors(cap: int) -> list[int]:
        each = zip(models, group.block_tokens, strict=True)
        return [_pages(model, group, tokens, min(cap, model.context)) for model, tokens in each]

    steps = range(BLOCK_STEP, max(model.context for model in models) + BLOCK_STEP, BLOCK_STEP)
    fitting = bisect.bisect_right(steps, pages // 2, key=lambda n: _pages_together(models, floors(n), together))
    return floors(max(MIN_AUTO_LEN, BLOCK_STEP * fitting))


def _describe(pools: Sequence[PoolPlan], groups: Sequence[PoolGroup]) -> list[str]:
    """The split in words."""
    notes = []
    for pool, group in zip(pools, groups, strict=True):
        blocks: dict[int, list[str]] = {}
        for name, tokens in zip(group.models, group.block_tokens, strict=True):
            blocks.setdefault(tokens, []).append(name)
        holds = enumerate_words([f"{count} tokens of {enumerate_words(who)}" for count, who in sorted(blocks.items())])
        size = format_size(pool.num_pages * pool.page_bytes)
        page = f"{pool.num_pages} pages of {format_size(pool.page_bytes)}"
        notes.append(f"{pool.name}: {size} in {page} ({pool.dtype}); a page is one KV head's K and V of {holds}")
    if len(pools) > 1:
        notes.append("models whose pages cannot be made equally large have pools of their own, sized by demand")
    return notes
