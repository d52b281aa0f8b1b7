"""Where a model would run if prefill and decode were arranged one way or another: the ways to lay it out over its
devices, and what each leaves for the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from muxserve.config import AUTO, Model
from muxserve.costs.architecture import ITEM_BYTES
from muxserve.costs.calibration import calibration_of
from muxserve.costs.devices import device
from muxserve.costs.latency import EngineShape
from muxserve.rolling.mitosis import Bounds
from muxserve.scheduling.token_throttling import FixedBudget, Throttle, TokenBudget, TokenThrottling
from muxserve.simulator.pipeline import Link, kv_blocks, split_layers
from placement import Machine, ModelDemand, PlanError, plan_unit
from placement.demand import Demand, splits_evenly
from placement.memory import MemoryRules, activation_bytes, model_bytes
from placement.pools import KVShape, group_pools
from placement.words import format_size

PhasesName = Literal["multiplexed", "pipelined", "rolling"]
# Simple ones first: of equals the first is taken.
ARRANGEMENTS: tuple[PhasesName, ...] = ("multiplexed", "pipelined", "rolling")
CPU = "CPU"
# Between machines, bytes per second, where nobody says how fast it is: 10 Gbit/s.
NETWORK = 1.25e9
# Of what a network carries, as in `benchmarks/paper/ecoserve.py`; a message between machines takes about this long.
_NETWORK_SHARE, _NETWORK_LATENCY = 0.9, 50e-6
_CPU_STAGES = 2


class NoPlaceError(ValueError):
    """The model cannot be laid out that way; the message says why."""


class Layout(NamedTuple):
    """`replicas` of a model, each of `stages` (1: no pipeline) that are split over `tp` devices each."""

    phases: PhasesName
    replicas: int
    stages: int
    tp: int

    @property
    def devices(self) -> int:
        """All of them."""
        return self.replicas * self.stages * self.tp

    @property
    def words(self) -> str:
        """`4 replicas, tensor parallel over 2`."""
        what = f"{self.replicas} replica{'s' if self.replicas > 1 else ''}"
        if self.stages > 1:
            what += f" of {self.stages} stages"
        return what + (f", tensor parallel over {self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One model as it is asked for. `replicas` and `stages` are None where they may be chosen; `max_len` is the longest
    sequence in tokens. `spared` and `bounds` are for rolling prefill, `budget` makes what decides on a pipeline's
    steps."""

    demand: Demand
    replicas: int | None = None
    stages: int | None = None
    max_len: int | None = None
    spared: float | None = 0.25
    bounds: Bounds = field(default_factory=Bounds)
    throttle: Throttle | None = field(default_factory=Throttle)

    def budget(self) -> TokenBudget:
        """A new one, since they remember what they did."""
        if self.throttle is None:
            return FixedBudget(self.demand.max_num_batched_tokens)
        return TokenThrottling(self.throttle)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_len or self.demand.architecture.default_max_len


def wanted_of(model: Model, demand: Demand, free: bool) -> Wanted:
    """A model of the fleet file.

    Args:
        free: the number of replicas may be chosen where the file leaves it at one.
    """
    given, rolling, batching = model.replicas, model.rolling, model.batching
    throttle = None
    if batching.policy == "throttled":
        throttle = Throttle(batching.iterations, batching.max_prefill, min(batching.min_prefill, batching.max_prefill))
        throttle = replace(throttle, kv_threshold=batching.kv_threshold)
    return Wanted(
        demand=demand,
        replicas=None if free and given.max == 1 else max(1, given.at_start),
        stages=model.stages if isinstance(model.stages, int) else None,
        max_len=model.max_len if isinstance(model.max_len, int) else None,
        spared=rolling.quantile,
        bounds=Bounds(rolling.lower, rolling.upper),
        throttle=throttle,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """One layout with all that its simulation needs. Every replica has `shape` for each of its stages, whose KV caches
    have `blocks` of `block_tokens` tokens; multiplexed ones have `kv_bytes` for pages on each device instead.
    `cost_share`: of each device's compute, what an engine of a replica runs on, if that is not its lease's.

    `link_bytes` are sent between devices, `network_bytes` of these between machines, for each token of a prompt or an
    answer.
    """

    layout: Layout
    shape: EngineShape
    block_tokens: int
    blocks: tuple[int, ...] = ()
    kv_bytes: int = 0
    links: tuple[Link, ...] = ()
    prefill_share: float | None = None
    decode_share: float | None = None
    cost_share: float | None = None
    link_bytes: float = 0.0
    network_bytes: float = 0.0


class Ground(Protocol):
    """Devices that a model has for itself."""

    @property
    def kind(self) -> str:
        """Their type, a name of `muxserve.costs.devices`."""
        ...

    @property
    def devices(self) -> int:
        """Their number."""
        ...

    @property
    def words(self) -> str:
        """What they are, for people."""
        ...

    def layouts(self, wanted: Wanted, phases: PhasesName) -> Iterator[Layout]:
        """Ways to lay the model out, those that use most devices first.

        Raises:
            NoPlaceError: there is none at all.
        """
        ...

    def place(self, wanted: Wanted, layout: Layout) -> Place:
        """That layout in detail.

        Raises:
            NoPlaceError: the model does not fit.
        """
        ...


@dataclass(frozen=True, slots=True)
class GpuGround:
    """GPUs of one type, `nodes[i]` of them on the i-th machine; `network` is bytes per second between machines, `memory`
    that of one GPU, bytes. Some are left idle where no layout takes all."""

    kind: str
    nodes: tuple[int, ...]
    memory: int
    rules: MemoryRules
    network: float = NETWORK

    @property
    def devices(self) -> int:
        """See `Ground`."""
        return sum(self.nodes)

    @property
    def words(self) -> str:
        """See `Ground`."""
        machines = f" on {len(self.nodes)} machines" if len(self.nodes) > 1 else ""
        return f"{self.devices} {self.kind}{machines}"

    def layouts(self, wanted: Wanted, phases: PhasesName) -> Iterator[Layout]:
        """See `Ground`."""
        architecture, found = wanted.demand.architecture, False
        if phases == "rolling" and (wanted.replicas or self.devices) < 2:
            raise NoPlaceError(_alone(wanted, "one GPU"))
        if phases == "pipelined" and self.devices < (wanted.stages or 2):
            raise NoPlaceError(f"a pipeline of {wanted.stages or 2} stages needs as many GPUs, and there is one")
        for devices in range(self.devices, 0, -1):
            for tp in _divisors(devices):
                if not splits_evenly(architecture, tp) or any(count % tp for count in self.nodes):
                    continue
                for stages in _divisors(devices // tp):
                    layout = Layout(phases, devices // tp // stages, stages, tp)
                    if _allowed(layout, wanted):
                        found = True
                        yield layout
        if not found:
            raise NoPlaceError(_no_layout(wanted, phases, self.words))

    def place(self, wanted: Wanted, layout: Layout) -> Place:
        """See `Ground`."""
        demand, tp, rules = wanted.demand, layout.tp, self.rules
        usable = int(self.memory * rules.utilisation) - rules.reserve_bytes
        tokens = _block_tokens(demand)
        heads = demand.architecture.kv_heads
        # Devices beyond the KV heads hold copies.
        copies = max(1.0, tp / heads)
        token_bytes = demand.architecture.kv_bytes_per_token(demand.dtype) * copies / tp
        shape = EngineShape(self.kind, tp, 1.0, demand.dtype)
        sent = _link_bytes(demand, layout)
        if layout.phases != "multiplexed":
            # One engine beside the holder of the weights.
            rules = replace(rules, engines=1, processes=2)
        if layout.phases == "pipelined":
            engine = activation_bytes(demand, tp) + rules.graph_bytes + rules.processes * rules.context_bytes
            try:
                blocks = kv_blocks(
                    demand.architecture,
                    demand.dtype,
                    layout.stages,
                    [float(tp * (usable - engine))] * layout.stages,
                    tokens,
                )
            except ValueError as error:
                raise NoPlaceError(str(error)) from None
            blocks = tuple(int(count / copies) for count in blocks)
            self._check(wanted, min(blocks) * tokens, layout)
            crossing = self._crossing(layout)
            links = tuple(self._link(tp, crosses) for crosses in crossing)
            over = sum(crossing) * _boundary_bytes(demand)
            return Place(layout, shape, tokens, blocks, links=links, link_bytes=sent, network_bytes=over)
        own = model_bytes(demand, tp, rules)
        left = usable - own
        self._check(wanted, int(left / token_bytes), layout, own)
        if layout.phases == "multiplexed":
            return Place(layout, shape, tokens, kv_bytes=left, link_bytes=sent)
        return Place(layout, shape, tokens, (int(left / token_bytes) // tokens,), link_bytes=sent)

    def _check(self, wanted: Wanted, room: int, layout: Layout, own: int | None = None) -> None:
        demand = wanted.demand
        if room >= demand.sequence_tokens:
            return
        usable = int(self.memory * self.rules.utilisation) - self.rules.reserve_bytes
        need = "" if own is None else f"weights, activations and processes take {format_size(own)} of it, and "
        raise NoPlaceError(
            f"on each of {layout.tp * layout.stages} {self.kind} {format_size(usable)} may be used; {need}what is left "
            f"holds {max(0, room)} tokens of KV cache, and a mean request has {demand.sequence_tokens}"
        )

    def _crossing(self, layout: Layout) -> list[bool]:
        """For each boundary of the first replica's stages, whether it lies between machines; the other replicas are
        laid out as it is, or better."""
        owner = [number for number, count in enumerate(self.nodes) for _ in range(count)]
        firsts = [owner[stage * layout.tp] for stage in range(layout.stages)]
        return [a != b for a, b in pairwise(firsts)]

    def _link(self, tp: int, crosses: bool) -> Link:
        on = device(self.kind)
        if crosses:
            return Link(self.network * _NETWORK_SHARE, _NETWORK_LATENCY)
        return Link(on.link_bandwidth * calibration_of(on.kind).link_efficiency * tp, on.link_latency)


@dataclass(frozen=True, slots=True)
class CpuGround:
    """The cores of one machine, divided evenly among the engines that run on them at the same time. `pool` is the
    size of a unit's page pool where the fleet file gives it, bytes; `cores` those that may be used. `ranks` as in the
    fleet file."""

    machine: Machine
    cores: int
    pool: int | None = None
    ranks: int = 1
    kind: str = CPU
    devices: int = 1

    @property
    def words(self) -> str:
        """See `Ground`."""
        return f"{self.cores} cores of this machine"

    def layouts(self, wanted: Wanted, phases: PhasesName) -> Iterator[Layout]:
        """See `Ground`."""
        replicas = wanted.replicas or 1
        if phases == "rolling" and replicas < 2:
            raise NoPlaceError(_alone(wanted, "one replica in the fleet file; give `replicas: 2` or more"))
        stages = (wanted.stages or _CPU_STAGES) if phases == "pipelined" else 1
        layers = wanted.demand.architecture.layers
        if stages > layers:
            raise NoPlaceError(f"{layers} layers cannot be spread over {stages} stages")
        yield Layout(phases, replicas, stages, self.ranks)

    def place(self, wanted: Wanted, layout: Layout) -> Place:
        """See `Ground`."""
        demand, pools = wanted.demand, layout.replicas * layout.stages
        architecture = demand.architecture
        part = replace(architecture, layers=max(split_layers(architecture.layers, layout.stages)))
        asked = ModelDemand(
            demand.name, part, demand.dtype, demand.rate, wanted.max_len, demand.max_num_seqs, ranks=self.ranks
        )
        try:
            plan = plan_unit([asked], self.machine, self.cores, self.pool, units=pools)
        except PlanError as error:
            raise NoPlaceError(str(error)) from None
        weights = layout.replicas * architecture.weight_bytes(demand.dtype)
        if weights + pools * self.ranks * plan.pool_bytes > self.machine.memory_bytes:
            raise NoPlaceError(
                f"{layout.words} need {format_size(weights)} for weights and {format_size(pools * plan.pool_bytes)} "
                f"for KV, and the memory is {format_size(self.machine.memory_bytes)}"
            )
        (model,) = plan.models
        sent = _link_bytes(demand, layout)
        if layout.phases == "multiplexed":
            shape = EngineShape(CPU, self.ranks, 1.0 / self.ranks, demand.dtype)
            share = model.share / (self.ranks * layout.replicas)
            # Leases add up to the unit; jobs run on the part of the cores that other replicas leave.
            return Place(
                layout,
                shape,
                model.block_tokens,
                kv_bytes=plan.pool_bytes,
                prefill_share=model.share,
                decode_share=model.share,
                cost_share=share,
                link_bytes=sent,
            )
        shape = EngineShape(CPU, self.ranks, 1.0 / (self.ranks * pools), demand.dtype)
        on = device(CPU)
        link = Link(on.link_bandwidth * calibration_of(on.kind).link_efficiency, on.link_latency)
        return Place(
            layout,
            shape,
            model.block_tokens,
            (model.num_blocks - 1,) * layout.stages,
            links=(link,) * (layout.stages - 1),
            link_bytes=sent,
        )


def ground_on_cpu(machine: Machine, cores: int | str, pool: int | str, ranks: int = 1) -> CpuGround:
    """The machine as the fleet file's `cluster.cores` and `kv_pool.size` leave it."""
    return CpuGround(
        machine,
        machine.cores if cores == AUTO else int(cores),
        None if pool == AUTO else int(pool),
        ranks,
    )


def _alone(wanted: Wanted, what: str) -> str:
    if wanted.replicas == 1:
        return "prefill rolls over replicas, and the fleet file has one; give `replicas: 2` or more"
    return f"prefill rolls over replicas, and there is {what}"


def _no_layout(wanted: Wanted, phases: PhasesName, words: str) -> str:
    architecture = wanted.demand.architecture
    asked = "" if wanted.replicas is None else f"{wanted.replicas} replicas of "
    if phases == "pipelined":
        stages = wanted.stages or 2
        if stages > architecture.layers:
            return f"{architecture.layers} layers cannot be spread over {stages} stages"
        return f"{words} cannot be divided into {asked}{stages} or more stages"
    return f"{words} cannot be divided into {asked}equal groups that its {architecture.heads} heads can be split over"


def _allowed(layout: Layout, wanted: Wanted) -> bool:
    if wanted.replicas is not None and layout.replicas != wanted.replicas:
        return False
    if layout.phases == "pipelined":
        within = 2 <= layout.stages <= wanted.demand.architecture.layers
        return layout.stages == wanted.stages if wanted.stages is not None else within
    return layout.stages == 1 and (layout.phases != "rolling" or layout.replicas >= 2)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _block_tokens(demand: Demand) -> int:
    """Tokens of a block, as the live planner chooses them for this model alone."""
    (group,) = group_pools([KVShape(demand.name, demand.architecture.head_dim, demand.dtype)])
    return group.block_tokens[0]


def _boundary_bytes(demand: Demand) -> float:
    """What a token brings from one stage to the next: vLLM sends hidden states and residual."""
    return 2.0 * demand.architecture.hidden * ITEM_BYTES[demand.dtype]


def _link_bytes(demand: Demand, layout: Layout) -> float:
    """What all devices of a replica together send for one token: two all-reduces per layer, each of which has every
    device send 2 (t-1)/t times the hidden state, and what goes from stage to stage."""
    architecture = demand.architecture
    reduced = 4.0 * (layout.tp - 1) * architecture.layers * architecture.hidden * ITEM_BYTES[demand.dtype]
    return reduced + (layout.stages - 1) * _boundary_bytes(demand)


def largest_first(layouts: Sequence[Layout]) -> list[Layout]:
    """Those that leave the fewest devices idle, in their order."""
    most = max((layout.devices for layout in layouts), default=0)
    return [layout for layout in layouts if layout.devices == most]
