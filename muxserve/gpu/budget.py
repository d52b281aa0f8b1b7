"""What of a GPU's memory goes to what, and what is left for the page pool. Pure.

Before anything runs the figures are estimates (`placement.memory`); once the weight holders have loaded and measured
their models (`Needs.measured`), the pool is made of what is really left. Nobody else takes memory afterwards, so the
order in which engines start does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from muxserve.spec import RestingSpec
from placement.demand import Demand
from placement.format import format_size
from placement.memory import MemoryRules, activation_bytes, weight_bytes

_MIB = 1 << 20
# Pools are a multiple of this, the granularity of the driver's memory on all GPUs so far.
GRANULARITY = 2 * _MIB
# Part of a GPU's memory for engines that stay while their models sleep.
RESTING_PART = 0.5
# What a weight holder says while others load and measure: they do so one after another.
WAITING = "waiting for the GPU"
_TABLE_ENTRY = 4  # bytes of an engine's page table on the GPU, per page


@dataclass(frozen=True, slots=True)
class Needs:
    """One model on one GPU, in bytes. Weights are there once; each of its `engine_count` engines has activations,
    graphs and a CUDA context of its own, and a process that holds the weights a context. `measured`: by the holder, not
    estimated."""

    model: str
    rank: int
    weights_bytes: int
    activation_bytes: int
    context_bytes: int
    graph_bytes: int
    engine_count: int = 2
    measured: bool = False

    def engines(self, rules: MemoryRules) -> int:
        """Bytes of its engines beside the weights."""
        return self.engine_count * self.activation_bytes + self.resting(rules)

    def resting(self, rules: MemoryRules) -> int:
        """Bytes of its engines while they rest: without weights and activations."""
        processes = self.engine_count + rules.processes - rules.engines
        return self.engine_count * rules.graph_sets * self.graph_bytes + processes * self.context_bytes


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a budget."""

    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """One GPU. `pool_bytes` is what is left for pages, negative if there is less than nothing; each page has entries in
    `tables` page tables."""

    gpu: str
    total_bytes: int
    lines: tuple[Line, ...]
    pool_bytes: int
    tables: int

    def used(self, pools_bytes: int, page_bytes: int) -> int:
        """Bytes of all that the budget has with pools of `pools_bytes`, whose smallest page has `page_bytes`."""
        tables = pools_bytes // page_bytes * self.tables * _TABLE_ENTRY
        # The last line has the page tables of a pool of all that is left.
        return sum(line.bytes for line in self.lines[1:-1]) + tables + pools_bytes


class BudgetError(ValueError):
    """A GPU's memory is not enough; the message says what takes it and what to lower, and by how much."""


class NotFreeError(BudgetError):
    """The driver has less free than is needed: of what has just ended, or of somebody else."""


def estimated(
    demands: Sequence[Demand], ranks: int, rules: MemoryRules, stages: int = 1, one_engine: Collection[str] = ()
) -> list[Needs]:
    """The needs of models that have not been measured, on each of `ranks` GPUs, which are `stages` of a pipeline. Those
    named in `one_engine` have one of both phases."""
    return [
        Needs(
            model=demand.name,
            rank=rank,
            weights_bytes=weight_bytes(demand, ranks // stages, stages),
            activation_bytes=activation_bytes(demand, ranks // stages),
            context_bytes=rules.context_bytes,
            graph_bytes=0 if demand.graphs == "eager" else rules.graph_bytes,
            engine_count=1 if demand.name in one_engine or demand.architecture.pooling else 2,
        )
        for rank in range(ranks)
        for demand in demands
    ]


def measured(event: Mapping[str, object]) -> Needs:
    """What a weight holder said in its event `measured`.

    Raises:
        ValueError: it is no such event.
    """
    try:
        figures = {key: int(str(event[key])) for key in _FIGURES}
        return Needs(model=str(event["model"]), rank=int(str(event["rank"])), **figures, measured=True)
    except KeyError as missing:
        raise ValueError(f"the event has no {missing}") from None


_FIGURES = ("weights_bytes", "activation_bytes", "context_bytes", "graph_bytes", "engine_count")


def budget(
    gpu: str, total_bytes: int, others_bytes: int, needs: Sequence[Needs], page_bytes: int, rules: MemoryRules
) -> Budget:
    """What is left of one GPU.

    Args:
        gpu: its name, for people.
        total_bytes: its memory.
        others_bytes: bytes that were taken before anything of ours ran; if it is more than `rules` leave free, the rest
            is ours to lose.
        needs: of every model of the unit, on this GPU.
        page_bytes: of the smallest page of the unit's pools; each page takes an entry of a page table in every
            engine of a model, too.
        rules: what may be used, and what is reserved.
    """
    usable = int(total_bytes * rules.utilisation)
    lines = [Line(f"may be used ({rules.utilisation:.0%} of {format_size(total_bytes)})", usable)]
    beyond = max(0, usable - (total_bytes - others_bytes))
    lines.append(Line(f"other processes, beyond the other {1 - rules.utilisation:.0%}", beyond))
    for each in needs:
        lines.append(Line(f"{each.model}: weights", each.weights_bytes))
        lines.append(Line(f"{each.model}: engines", each.engines(rules)))
    lines.append(Line("memory manager, reserve", rules.reserve_bytes))
    left = lines[0].bytes - sum(line.bytes for line in lines[1:])
    count = max((each.engine_count for each in needs), default=1)
    tables = max(0, left - left * page_bytes // (page_bytes + count * _TABLE_ENTRY))
    lines.append(Line("page tables of the engines", tables))
    pool = left - tables
    return Budget(gpu, total_bytes, tuple(lines), pool - pool % GRANULARITY, count)


def pool_bytes(budgets: Sequence[Budget]) -> int:
    """Bytes of the pools on each GPU: the same everywhere, so the tightest one decides."""
    return min(each.pool_bytes for each in budgets)


def pool_beside(left: int, sleeping: Sequence[int], least: int) -> int:
    """Bytes that pools may take at most beside models that sleep: what the largest of these leaves, so that one is
    awake for which there are pages. They take it only while no other model needs it.

    Args:
        left: bytes of a GPU for pools and these models.
        sleeping: bytes of each of them.
        least: of the pools.
    """
    return max(least, left - max(sleeping))


def resting_room(taken: Collection[int], resting: Collection[int], room: int, gpu_bytes: int) -> int:
    """Bytes of a GPU that are kept for engines which rest while their models sleep: all that these need, as far as the
    two largest models still have room together and it is at most `RESTING_PART` of the GPU. Where that is less than
    half of what they need, only what a whole number of awake models leaves: a few that rest are not worth a model that
    could be awake. Nothing where all models can be awake together.

    Args:
        taken: bytes of each model that sleeps at times, when it is awake.
        resting: bytes of the engines of each while they rest.
        room: for all of that, beside pools and models that never sleep.
    """
    if not taken or sum(taken) <= room:
        return 0
    wanted, largest = sum(resting), sorted(taken, reverse=True)
    two = sum(largest[:2])
    most = min(wanted, int(RESTING_PART * gpu_bytes), room - (two if two <= room else largest[0]))
    if 2 * most < wanted:
        mean = max(1, sum(taken) // len(taken))
        most = min(wanted, room - max(largest[0], room // mean * mean))
    most = max(0, most)
    return most - most % GRANULARITY


def at_rest(sizes: Collection[int], room: RestingSpec | None) -> int:
    """The engines of about how many models rest in that room, if those of each take one of the `sizes`."""
    if room is None or not sizes:
        return 0
    return min(len(sizes), room.models, room.bytes * len(sizes) // max(1, sum(sizes)))


def check(
    budgets: Sequence[Budget], needs: Sequence[Needs], needed: int, rules: MemoryRules, sleeping: bool = False
) -> None:
    """Whether the tightest GPU has room for pools of `needed` bytes, one sequence of every model. `sleeping`: beside
    those that never sleep, and the largest of those that do.

    Raises:
        BudgetError: it has not.
    """
    rank, tightest = min(enumerate(budgets), key=lambda item: item[1].pool_bytes)
    short = needed - tightest.pool_bytes
    if short <= 0:
        return
    here = [each for each in needs if each.rank == rank]
    weights = sum(each.weights_bytes for each in here)
    engines = sum(each.engines(rules) for each in here)
    largest = max(here, key=lambda each: each.activation_bytes)
    step = largest.engine_count * largest.activation_bytes
    left = f"{format_size(tightest.pool_bytes)} are left" if tightest.pool_bytes > 0 else "nothing is left"
    ways = []
    usable = tightest.lines[0].bytes
    most = int(0.97 * tightest.total_bytes)
    if usable + short <= most and sleeping:
        ways.append(f"raise memory.limit to {format_size(usable + short)}")
    elif usable + short <= most:
        ways.append(f"raise cluster.gpu_memory to {(usable + short) / tightest.total_bytes + 0.005:.2f}")
    if step > short:
        part = (step - short) / step
        ways.append(f"lower max_num_batched_tokens of {largest.model} to {part:.0%} of what it is")
    smaller = "lower kv_pool.size or max_len" if sleeping else "lower max_len"
    ways.append(f"{smaller}, serve fewer or smaller models, or give the unit more GPUs")
    source = "measured" if all(each.measured for each in here) else "estimated"
    raise BudgetError(
        f"{tightest.gpu}: of {format_size(usable)} that may be used weights take {format_size(weights)}, the reserve "
        f"{format_size(rules.reserve_bytes)} and engines {format_size(engines)} ({source}); {left} "
        f"for the KV pool, {format_size(short)} too little "
        f"{'for it' if sleeping else 'for one sequence of every model'}: {'; or '.join(ways)}"
    )


def check_room(
    budget: Budget, joining: Needs, pools_bytes: int, free_bytes: int | None, rules: MemoryRules, loaded: bool
) -> None:
    """Whether a model more fits on a GPU whose pools have been made, and stay as large as they are.

    Args:
        budget: of the GPU with all that is served there and `joining`.
        joining: what the model needs.
        pools_bytes: what the pools have.
        free_bytes: what the driver says that nobody has; None: it does not say.
        loaded: the model's weights are on the GPU by now, its engines are not.

    Raises:
        BudgetError: it does not fit; the message says what is left and what it takes.
    """
    engines = joining.engines(rules)
    needed = joining.weights_bytes + engines
    source = "measured" if joining.measured else "estimated"
    needs = (
        f"{joining.model} needs {format_size(needed)} (weights {format_size(joining.weights_bytes)}, engines "
        f"{format_size(engines)}, {source})"
    )
    short = pools_bytes - budget.pool_bytes
    if short > 0:
        usable = budget.lines[0].bytes
        most = (pools_bytes - short) // GRANULARITY * GRANULARITY
        left = format_size(max(0, needed - short))
        smaller = f", or deploy with kv_pool.size: {format_size(most)} at most" if most > 0 else ""
        raise BudgetError(
            f"{budget.gpu}: {needs}, and of {format_size(usable)} that may be used {left} are left beside the pools "
            f"({format_size(pools_bytes)}) and the models that it has; remove one of them first{smaller}"
        )
    wanted = engines if loaded else needed
    if free_bytes is not None and free_bytes < wanted:
        raise NotFreeError(
            f"{budget.gpu}: {needs}, and the driver has {format_size(free_bytes)} of {format_size(budget.total_bytes)} "
            "free; end what else computes there (`nvidia-smi` shows it)"
        )


def table(budgets: Sequence[Budget]) -> list[tuple[str, ...]]:
    """The budgets as rows of text: what, then bytes on each GPU; the last row is the pool."""
    rows = [
        (line.what, *(format_size(each.lines[n].bytes) for each in budgets)) for n, line in enumerate(budgets[0].lines)
    ]
    return [*rows, ("left for the KV pool", *(format_size(max(0, each.pool_bytes)) for each in budgets))]
