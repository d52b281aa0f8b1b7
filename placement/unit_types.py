"""What goes into the plan of one unit, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Literal

from placement.demand import Demand

# Pieces of memory that an engine may map for states: Linux allows a process 65,530 unless it is told otherwise.
STATE_MAPPINGS = 48_000
# Bytes of a page of most machines' memory.
MACHINE_PAGE = 1 << 12


@dataclass(frozen=True)
class Machine:
    """What there is: cores that may be used, bytes of memory, bytes of free shared memory (None: not limited), whether
    its cores have AVX-512 (or AMX, which includes it) and AMX: some of vLLM's kernels need one of them. `page_bytes` is
    the size of a page of its memory: 4 KiB on x86-64, up to 64 KiB on arm64."""

    cores: int
    memory_bytes: int
    shared_memory_bytes: int | None = None
    avx512: bool = True
    amx: bool = True
    page_bytes: int = MACHINE_PAGE


# Tokens of a block of vLLM's own cache, and what groups of layers take beyond those that they have, both at most.
_PRIVATE_BLOCK, _ROUNDING = 256, 1.25
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class ModelDemand(Demand):
    """The demand for a model in a unit, where it is split over `ranks` devices: its layers over `stages` of a pipeline,
    and each stage over `ranks / stages` that split its tensors. None stands for auto.

    `block_tokens` is given where other units have replicas of the model: KV moves between units only if its blocks are
    equally large in both. One that `sleeps` takes memory for its weights only while it is awake. `device` is what its
    engines run on. `private` says why it has a cache of its own, in place of pages of the pool (empty: it has not).
    `machine_page` is the bytes of a page of the machine's memory: an engine maps multiples of it.
    """

    _: KW_ONLY
    threads: int | None = None
    ranks: int = 1
    block_tokens: int | None = None
    stages: int = 1
    sleeps: bool = False
    device: Device = "cpu"
    private: str = ""
    machine_page: int = MACHINE_PAGE

    @classmethod
    def of(cls, demand: Demand) -> ModelDemand:
        """The demand on one rank of a CPU."""
        return cls(**{each.name: getattr(demand, each.name) for each in fields(Demand)})

    @property
    def one_engine(self) -> bool:
        """Whether it has one engine of both phases, and not one for each."""
        return self.shape == "one"

    @property
    def tensor_parallel(self) -> int:
        """Ranks that the tensors of one stage are split over."""
        return max(1, self.ranks // self.stages)

    @property
    def layers(self) -> int:
        """Layers with attention of the stage with the most. vLLM gives the rest of an uneven division to as many
        stages, one each."""
        return math.ceil(self.architecture.attention_layers / self.stages)

    @property
    def kv_heads(self) -> int:
        """KV heads on each of the tensor-parallel ranks; those beyond the model's heads hold copies."""
        return max(1, self.architecture.kv_heads // self.tensor_parallel)

    @property
    def pages_per_block(self) -> int:
        """Pages on each rank behind one token block."""
        return self.layers * self.kv_heads if self.architecture.causal and not self.private else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states on each rank, whatever its length."""
        return self.architecture.state_bytes(self.dtype, self.tensor_parallel)

    @property
    def least_page_bytes(self) -> int:
        """Bytes of pages that are so large that an engine on CPU can map the states of all sequences of a batch."""
        if self.device != "cpu" or not self.state_bytes:
            return 0
        return max(self.machine_page, self.state_bytes * self.max_num_seqs // STATE_MAPPINGS)

    def state_blocks(self, page_bytes: int) -> int:
        """Blocks that hold one sequence's states, where pages have so many bytes: each rank has the states of its
        heads. On GPUs each layer's state begins with a page."""
        states = self.architecture.states
        if states is None:
            return 0
        if self.device == "cpu":
            pages = math.ceil(self.state_bytes / page_bytes)
        else:
            layer = states.layer_bytes(self.dtype, self.tensor_parallel)
            pages = states.count * math.ceil(layer / page_bytes)
        return math.ceil(pages / self.pages_per_block)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V per token on each rank."""
        whole = self.architecture.kv_bytes_per_token(self.dtype)
        if self.private:
            return -(-whole * self.kv_heads // (self.architecture.kv_heads * self.stages))
        return whole * self.pages_per_block // max(1, self.architecture.pages_per_block)

    @property
    def gives_back(self) -> bool:
        """Its engines give back what is behind a window: those on CPU that have all layers."""
        a = self.architecture
        if self.private or self.device != "cpu" or self.stages > 1:
            return False
        return a.causal and a.states is None and bool(a.windowed)

    def sequence_bytes(self, tokens: int) -> float:
        """Bytes on each rank of KV and states of a sequence of so many tokens, without what is given back."""
        size = float(tokens * self.bytes_per_token + self.state_bytes)
        if self.gives_back:
            windowed = self.bytes_per_token * len(self.architecture.windowed) / self.layers
            size -= max(0, tokens - self.architecture.window) * windowed
        return size

    def cache_bytes(self, tokens: int) -> int:
        """Bytes on each rank of a private cache that holds one sequence of so many tokens. vLLM rounds up: each layer's
        part to blocks, blocks to the size of a state, layers of a kind to equally large groups."""
        states = self.architecture.states
        state = states.layer_bytes(self.dtype, self.tensor_parallel) if states else 0
        block = max(state, _PRIVATE_BLOCK * self.bytes_per_token // max(1, self.layers))
        kinds = self.architecture.layers // self.stages
        return math.ceil(_ROUNDING * (tokens * self.bytes_per_token + self.state_bytes)) + 2 * kinds * block

    @property
    def demand(self) -> float:
        """Weight in the sharing of memory: bytes of KV and states per second."""
        return self.rate * self.sequence_bytes(self.sequence_tokens)


@dataclass(frozen=True)
class PoolPlan:
    """One pool, on every rank; its page 0 is the null page and belongs to nobody."""

    name: str
    dtype: str
    page_bytes: int
    num_pages: int
    models: tuple[str, ...]


@dataclass(frozen=True)
class TablePlan:
    """A model's page table: `num_blocks` blocks, of `block_tokens` tokens each. The states of a sequence take
    `state_blocks` of its blocks. With `zeroed` pages are zeroed when the model takes them, since states of another type
    may be in them."""

    block_tokens: int
    num_blocks: int
    state_blocks: int = 0
    zeroed: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """One placed model. Pages are of its pool on each rank, lengths in tokens, `threads` those of each rank, shares of
    the machine's cores in (0, 1]. A private cache has `cache_bytes` on each rank."""

    name: str
    pool: str
    table: TablePlan
    max_len: int
    threads: int
    share: float
    quota_pages: int = 0
    floor_pages: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True)
class UnitPlan:
    """The plan of one unit. `notes` says in words what was decided for the user."""

    cores: int
    pools: tuple[PoolPlan, ...]
    models: tuple[ModelPlan, ...]
    notes: tuple[str, ...]

    @property
    def pool_bytes(self) -> int:
        """All pools together, on each rank."""
        return sum(pool.page_bytes * pool.num_pages for pool in self.pools)

    def model(self, name: str) -> ModelPlan:
        """The plan of the model of that name."""
        return next(model for model in self.models if model.name == name)

    @property
    def kv_bytes(self) -> int:
        """All pools and private caches together, on each rank."""
        return self.pool_bytes + sum(model.cache_bytes for model in self.models)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a machine's memory that units on its CPU take, all ranks together: weights, pools (which lie in shared
    memory), and private caches."""

    weights: int = 0
    pools: int = 0
    caches: int = 0

    @classmethod
    def of(cls, unit: UnitPlan, models: Sequence[ModelDemand]) -> HostMemory:
        """What the unit of these models is planned to take."""
        ranks, pools = models[0].ranks, unit.pool_bytes
        return cls(kept_weights(models), pools * ranks, (unit.kv_bytes - pools) * ranks)

    def __add__(self, other: HostMemory) -> HostMemory:
        return HostMemory(self.weights + other.weights, self.pools + other.pools, self.caches + other.caches)

    @property
    def kv(self) -> int:
        """Pools and private caches."""
        return self.pools + self.caches

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv

    def left_of(self, machine: Machine) -> Machine:
        """The machine without it."""
        shared = machine.shared_memory_bytes
        return replace(
            machine,
            memory_bytes=max(0, machine.memory_bytes - self.total),
            shared_memory_bytes=None if shared is None else max(0, shared - self.pools),
        )


def kept_weights(models: Sequence[ModelDemand]) -> int:
    """Bytes of the weights of models that never sleep. There is room for the largest of the others besides, twice:
    its files are mapped while they are copied."""
    each = [(model.sleeps, model.architecture.weight_bytes(model.dtype)) for model in models]
    kept = sum(size for sleeps, size in each if not sleeps)
    return kept + 2 * max((size for sleeps, size in each if sleeps), default=0)


@dataclass(frozen=True)
class PlanProblem:
    """Why there is no plan. `key` is the fleet file's key to change, of `model` if given, else of the whole fleet."""

    message: str
    key: str
    model: str | None = None


class PlanError(ValueError):
    """The fleet does not fit the machine."""

    def __init__(self, problems: Sequence[PlanProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problem.message for problem in problems))
