"""The resolved plan of one unit: what its processes are told. Written to `run_dir/unit.json` of the unit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from muxserve.costs.profile import EngineProfile
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import DEFAULT_LEVELS, TARGET_LOAD, Level, Levels
from muxserve.scheduling.residency_types import LEAST_POOL_PART
from muxserve.spec.network import Keys, Listen

# Where a unit's spec is, in its directory.
UNIT_FILE = "unit.json"
# What vLLM's loader takes for weights; where there are files of the first kind, only these.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")

PolicyName = Literal["adbs", "slack", "free", "fcfs", "rolling"]
ShapeName = Literal["split", "one"]
EnginePhase = Literal["prefill", "decode", "both"]
SmSharing = Literal["mps", "green_contexts", "off"]
PoolIpc = Literal["auto", "vmm", "legacy"]

# Ways of sharing SMs with which an engine can compute on another share from one lease to the next. An MPS percentage
# is for the life of a process, and so are the threads of an engine on a CPU, whose operating system gives the cores
# that one engine leaves idle to the others.
SHARES_PER_LEASE: frozenset[SmSharing] = frozenset({"green_contexts"})
# Sizes of share that engines with shares per lease have, each of them with CUDA graphs of its own.
SHARE_STEPS = 4


class GpuSpec(msgspec.Struct, frozen=True):
    """The GPUs of the unit's mesh and how its engines share them.

    `uuids` are in the order of the tensor-parallel ranks. `sm_sharing` is what was resolved from the fleet file and the
    machine: `mps` gives each engine its percentage of SMs, `green_contexts` sets of SMs under an MPS server without
    percentages (one for its life, or under `slack` one per lease), `off` lets the engines alternate. `ipc` is how
    pools and weights are exported. `keepers_in_mps`: weight holders and the memory manager are clients of the server,
    too, which a GPU in an exclusive compute mode wants. `nvls`: NCCL may use the NVSwitch's multicast where one model
    of several ranks has the GPUs to itself. `full_graphs`: CUDA graphs of decode batches hold attention, too, because
    that was found to work; False: it was found not to. `restart_mps`: an engine that was killed takes the server along.
    """

    uuids: list[str]
    sm_sharing: SmSharing = "mps"
    ipc: PoolIpc = "auto"
    keepers_in_mps: bool = False
    nvls: bool = True
    full_graphs: bool | None = None
    restart_mps: bool = False

    @property
    def exports_weights(self) -> bool:
        """Whether weights are moved to memory that outlives the process which has loaded them. Inside MPS the server
        would take them along."""
        return self.ipc != "legacy" and not self.keepers_in_mps


def share_steps(sharing: SmSharing, policy: PolicyName) -> int:
    """See `UnitSpec.share_steps`."""
    return SHARE_STEPS if sharing in SHARES_PER_LEASE and policy == "slack" else 0


class PoolSpec(msgspec.Struct, frozen=True):
    """One page pool. `page_bytes` = K and V of `block_tokens` tokens of one KV head of one layer; `num_pages` are on
    each rank, and a page has the same number on all of them. With `chunk_bytes` it is a pool whose memory comes and
    goes in such chunks, while the unit runs; at first `start_pages` have memory (0: all)."""

    name: str
    page_bytes: int
    num_pages: int
    chunk_bytes: int = 0
    start_pages: int = 0

    @property
    def chunk_pages(self) -> int:
        """Pages whose memory comes and goes together."""
        if not self.chunk_bytes:
            return self.num_pages
        return min(self.num_pages, self.chunk_bytes // math.gcd(self.page_bytes, self.chunk_bytes))

    @property
    def bytes(self) -> int:
        """Bytes of the pool on each rank, when all pages have memory."""
        return self.page_bytes * self.num_pages

    @property
    def start_bytes(self) -> int:
        """Bytes of the pool's memory on each rank at its start."""
        return self.page_bytes * (self.start_pages or self.num_pages)


# Nobody reads or writes the pages of engines that compute nothing.
PRETENDED_PAGE_BYTES = 64
# Memory comes and goes in chunks so large: what the kernel maps with one entry, and few enough descriptors of a GPU's
# memory.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 2 << 20, 64 << 20


def in_chunks(pool: PoolSpec, gpu: GpuSpec | None) -> PoolSpec:
    """The pool where its memory comes and goes while models do; on a GPU with the least of it at first. As a whole
    where a GPU's memory cannot be exported."""
    if gpu is None:
        return msgspec.structs.replace(pool, chunk_bytes=CPU_CHUNK_BYTES)
    if gpu.ipc == "legacy":
        return pool
    start = max(1, int(LEAST_POOL_PART * pool.num_pages))
    return msgspec.structs.replace(pool, chunk_bytes=GPU_CHUNK_BYTES, start_pages=start)


class AdapterSlots(msgspec.Struct, frozen=True):
    """Room for LoRA adapters in each engine of a model: so many in one step, of ranks up to `rank`."""

    count: int
    rank: int


class ModelSpec(msgspec.Struct, frozen=True):
    """One model of the unit. Page counts are of its pool; `num_blocks` is the size of its page table in blocks,
    block 0 included, which is never handed out. `kv_heads` are those of one tensor-parallel rank, `layers` those of one
    stage of a pipeline (of the stage with the most).

    `shape` says which engines it has. `split`: one for prefill and one for decode, on shares of the same device. `one`:
    one engine of both phases. Such an engine may have its layers over several `stages`, or be one of the replicas over
    which prefill is `rolling`: then it has a unit to itself.

    The answers of a `pooling` model are vectors (embeddings, scores, classes): a request is finished by its prefill, so
    that there is no decode engine. One with bidirectional attention keeps no KV at all: it has 0 `kv_heads`.

    A `text_only` model is the language model of a multi-modal checkpoint, of which nothing else is loaded. One that
    `sees_images` computes them in its prefill engine, which finds what the gateway made of them in files.

    With `latent` attention a layer keeps one vector of so many numbers of each token (else 0). In pages it stands for K
    and V of one KV head of half that size, which `kv_heads` and `head_dim` say.

    In the `windowed_layers`, by number, a token sees the last `window` tokens only, and pages behind the window are
    given back; empty where they are kept.

    A `private` model keeps its KV in a cache of vLLM's own, of `kv_bytes` on each rank, and takes no pages: it has 0
    `kv_heads`, and one engine. Nothing of it moves to other units, or is found by other engines.

    Layers that keep a state of a sequence instead of K and V are not among `layers`. The states of all of them, of one
    sequence, take the first `state_blocks` of its blocks. Where they are of another type than the KV of models in the
    same pool, these have `zeroed` pages: an engine that takes one does not find what is no number in its type.

    `adapters` are directories of LoRA adapters by the names under which requests ask for them. They come and go while
    the model serves, if it has `adapter_slots`: an engine loads one with the first request that brings it.
    """

    name: str
    path: str
    pool: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    num_blocks: int
    quota_pages: int
    floor_pages: int
    max_len: int
    rate: float
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    threads: int
    prefill_share: float
    decode_share: float
    max_concurrency: int
    max_queue: int
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    # Seconds; auto: as its objective has it, none: without end.
    max_wait: float | Literal["auto", "none"] = "auto"
    engine_args: dict[str, object] = {}
    shape: ShapeName = "split"
    stages: int = 1
    rolling: bool = False
    # Other names that requests may have for it.
    aliases: tuple[str, ...] = ()
    # What automatic target loads of priority levels come to, in tokens of KV.
    target_load: int = TARGET_LOAD
    pooling: bool = False
    text_only: bool = False
    sees_images: bool = False
    adapters: dict[str, str] = {}
    adapter_slots: AdapterSlots | None = None
    # Mean length of a request, prompt and answer.
    request_tokens: int = 1
    latent: int = 0
    window: int = 0
    windowed_layers: tuple[int, ...] = ()
    state_blocks: int = 0
    zeroed: bool = False
    kv: Literal["pool", "private"] = "pool"
    kv_bytes: int = 0

    @property
    def private(self) -> bool:
        """Whether its KV lies in a cache of vLLM's own."""
        return self.kv == "private"

    @property
    def engines(self) -> tuple[EnginePhase, ...]:
        """The phases of its engines, one process each (and its ranks')."""
        if self.pooling:
            return ("prefill",)
        return ("prefill", "decode") if self.shape == "split" else ("both",)

    @property
    def pages_per_block(self) -> int:
        """Pages behind one token block of this model."""
        return self.layers * self.kv_heads


class GrammarLimits(msgspec.Struct, frozen=True):
    """What a request may constrain its answer with (schema, regex, choices, EBNF), and what compiling it may cost."""

    # As sent; and with all repetitions written out, in elements.
    max_bytes: int = 64 << 10
    max_expansion: int = 10_000_000
    max_depth: int = 64
    # CPU seconds and bytes of compiling one of them.
    compile_seconds: float = 5.0
    compile_bytes: int = 512 << 20
    # Slow ones that a gateway compiles at once; as many quick ones overtake them.
    workers: int = 1


class ResponsesSpec(msgspec.Struct, frozen=True):
    """Where the gateways keep responses, how many bytes of them at most, and for how long."""

    file: str
    max_bytes: int = 256 << 20
    keep_seconds: float = 30 * 86400.0


class TlsSpec(msgspec.Struct, frozen=True):
    """Files of the endpoint's certificate, with the chain behind it, and of its key."""

    cert: str
    key: str


class HttpSpec(msgspec.Struct, frozen=True):
    """What the endpoint makes of HTTP requests: the largest body, origins of web pages that may call it ("*": any),
    whether each request has a line in the log, and whether there is a live page at /ui."""

    max_body_bytes: int = 4 << 20
    cors_origins: tuple[str, ...] = ()
    access_log: bool = False
    ui: bool = True


class BatchesSpec(msgspec.Struct, frozen=True):
    """Batches of requests and their files are kept in `directory`: at most `max_bytes` of files, each for
    `keep_seconds`."""

    directory: str
    max_bytes: int = 10 << 30
    keep_seconds: float = 30 * 86400.0


class GatewaySpec(msgspec.Struct, frozen=True):
    """Where the OpenAI endpoint listens and whom it lets in. No keys: anyone who can connect."""

    host: str
    port: int
    api_keys: list[str] = []
    http: HttpSpec = HttpSpec()
    drain_seconds: float = 30.0
    # Gateway processes at that address; the kernel spreads connections over them.
    count: int = 1
    grammars: GrammarLimits = GrammarLimits()
    # None: plain HTTP.
    tls: TlsSpec | None = None
    # None: responses are not kept.
    responses: ResponsesSpec | None = None
    # None: there are no batches.
    batches: BatchesSpec | None = None

    @property
    def scheme(self) -> str:
        """The scheme of the endpoint's URL."""
        return "http" if self.tls is None else "https"


class WatchdogRules(msgspec.Struct, frozen=True):
    """After how many seconds without a beat of its main loop (`muxserve.net.heartbeat`) a process is `suspect` and gets
    no new work, and after how many it counts as `hung` and is killed."""

    suspect: float = 3.0
    hung: float = 10.0


_SHARED_DEVICE = "device"


class SimulatedSpec(msgspec.Struct, frozen=True):
    """Engines compute nothing, and take the time that steps take on `device` (a name of `costs.devices`) by the
    measurements in `profile`, a path; empty: by the roofline. `gpus` are the names of those that the unit pretends to
    have; none: the CPU of its machine, which it shares with others. One process stands for `ranks` of a real engine,
    which split the layers and the tensors of its models (`UnitSpec.stages`)."""

    device: str
    profile: str = ""
    gpus: tuple[str, ...] = ()
    ranks: int = 1


class RestingSpec(msgspec.Struct, frozen=True):
    """Room for engines that rest: bytes of each GPU, and of how many models at most."""

    bytes: int
    models: int


# By so much decode engines are nicer (nice(2)) than processes that wake models or prefill on the same cores: 92 and 71
# of 100 first tokens within 2 s for 75 and 52 without (docs/residency.md).
DECODE_NICENESS = 10


class UnitSpec(msgspec.Struct, frozen=True):
    """Everything that a process of the unit needs to know."""

    run_dir: str
    unit: str
    policy: PolicyName
    cores: int
    pools: list[PoolSpec]
    models: list[ModelSpec]
    # Devices of the mesh that every model of the unit is split over: as many pools, one on each.
    ranks: int = 1
    gpu: GpuSpec | None = None
    # Where it is reached from other machines, and with what keys; without, over Unix sockets only.
    listen: Listen | None = None
    keys: Keys | None = None
    # Most bytes per second that leave by migration; 0: no limit.
    migration_bandwidth: float = 0.0
    # Which requests leave when the global scheduler has paired the unit's replica with another; as in the fleet.
    migration: MigrationRules = MigrationRules()
    levels: tuple[Level, ...] = tuple(DEFAULT_LEVELS)
    # None: nobody looks whether a process hangs.
    watchdog: WatchdogRules | None = WatchdogRules()
    simulated: SimulatedSpec | None = None
    # What steps of the models are predicted to cost, each at the shares that its engines can have; of models that are
    # left out nothing is known.
    costs: dict[str, list[EngineProfile]] = {}
    # Bytes of the host's memory for the weights of models that sleep, where these are served on GPUs.
    host_copies: int = 0
    # On GPUs: engines that stay while their models sleep; None: they end.
    resting: RestingSpec | None = None
    # Engines that decode give way to other processes by `DECODE_NICENESS`, since models are woken beside them.
    decode_gives_way: bool = False

    def priority_levels(self, model: str | None = None) -> Levels:
        """The levels as the policies of that model want them."""
        return levels_of_model(self.levels, self.models, model)

    @property
    def stages(self) -> int:
        """Stages that its model's layers are split over, each on `ranks` / `stages` ranks, which split the tensors; 1
        where models share the unit."""
        return max((model.stages for model in self.models), default=1)

    @property
    def share_steps(self) -> int:
        """The number of equal steps in the share of the SMs that an engine computes on, which it can change from one
        lease to the next; 0: it has one share for its life."""
        return 0 if self.gpu is None else share_steps(self.gpu.sm_sharing, self.policy)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What the engines run on."""
        return "cpu" if self.gpu is None else "cuda"

    @property
    def shared_device(self) -> Path:
        """The file by which engines of a simulated fleet's units know of each other's jobs on this machine."""
        run_dir = Path(self.run_dir)
        if self.listen is None:
            return run_dir.parent / _SHARED_DEVICE
        # On another machine the directory lies beside those of other fleets, whose name it begins with.
        return run_dir.with_name(run_dir.name.removesuffix(self.unit) + _SHARED_DEVICE)

    def model(self, name: str) -> ModelSpec:
        """The model of that name.

        Raises:
            KeyError: no such model in this unit.
        """
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)

    def layout(self, name: str) -> str:
        """How the KV of that model lies in its pages. Two replicas can exchange it if this is equal.

        Raises:
            KeyError: no such model in this unit.
        """
        model = self.model(name)
        page_bytes = self.pool(model.pool).page_bytes
        shape = f"{model.block_tokens}t.{model.layers}l.{model.kv_heads}h.{model.head_dim}d"
        stages = f".{model.stages}s" if model.stages > 1 else ""
        states = f".{model.state_blocks}states" if model.state_blocks else ""
        return f"{shape}.{model.dtype}.{page_bytes}b.{self.ranks}r{stages}{states}"

    def pool(self, name: str) -> PoolSpec:
        """The pool of that name.

        Raises:
            KeyError: no such pool in this unit.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def socket(self, name: str) -> str:
        """Path of a Unix socket of this unit; kept short because the kernel allows 107 bytes."""
        return os.path.join(self.run_dir, f"{name}.sock")

    @property
    def memory_socket(self) -> str:
        """Where the memory manager listens (plain Unix stream socket)."""
        return self.socket("memory")

    @property
    def mps_dir(self) -> Path:
        """Pipes and logs of the unit's own MPS server. Short, because MPS has sockets in it too."""
        return Path(self.run_dir) / "mps"

    def weights_socket(self, model: str, rank: int) -> str:
        """Where a model's weights on one GPU are handed out."""
        index = next(i for i, each in enumerate(self.models) if each.name == model)
        return self.socket(f"weights-{index}-{rank}")

    @property
    def unit_address(self) -> str:
        """ZeroMQ ROUTER of the unit scheduler."""
        return f"ipc://{self.socket('unit')}"

    @property
    def migrator_address(self) -> str:
        """ZeroMQ ROUTER of the unit's migrator, for other migrators of this machine."""
        return f"ipc://{self.socket('migrator')}"

    @property
    def host_address(self) -> str:
        """ZeroMQ ROUTER of the unit's host, if that is a process of its own."""
        return f"ipc://{self.socket('host')}"

    @property
    def log_dir(self) -> Path:
        """One log file per process."""
        return Path(self.run_dir) / "logs"


def levels_of_model(levels: Iterable[Level], models: Iterable[ModelSpec], name: str | None) -> Levels:
    """A fleet's levels with the target loads of one of its `models`; None: of none in particular."""
    return Levels(levels, auto=next((each.target_load for each in models if each.name == name), TARGET_LOAD))


def save(unit_spec: UnitSpec, path: str | os.PathLike[str]) -> None:
    """Write as JSON, readable by the owner only."""
    write(msgspec.json.format(msgspec.json.encode(unit_spec), indent=2), path)


def write(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file that is readable by the owner only."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def load(path: str | os.PathLike[str]) -> UnitSpec:
    """Read what `save` wrote.

    Raises:
        msgspec.ValidationError: the file is not a unit's spec.
    """
    return msgspec.json.decode(Path(path).read_bytes(), type=UnitSpec)
