"""Ways to lay a model out over devices, and what each of them leaves for the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from muxserve.config import Model
from muxserve.costs.architecture import ITEM_BYTES
from muxserve.costs.calibration import calibration_of
from muxserve.costs.devices import Device
from muxserve.costs.latency import EngineShape
from muxserve.rolling.mitosis import Bounds
from muxserve.scheduling.token_throttling import FixedBudget, Throttle, TokenBudget, TokenThrottling
from muxserve.simulator import Link
from placement.demand import Demand
from placement.pools import KVShape, group_pools

PhasesName = Literal["multiplexed", "pipelined", "rolling"]
# Simple ones first: of equals the first is taken.
ARRANGEMENTS: tuple[PhasesName, ...] = ("multiplexed", "pipelined", "rolling")


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
        throttle = Throttle(batching.iterations, batching.max_prefill, batching.min_prefill, batching.kv_threshold)
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
    have `blocks` of `block_tokens` tokens, `kv_bytes` on each device; of multiplexed ones only the latter count.
    `own_bytes` is what each device holds beside that.
    `cost_share`: of each device's compute, what an engine of a replica runs on, if that is not its lease's. `max_len`:
    the longest sequence in tokens, if that is not the one wanted.

    `link_bytes` are sent between devices, `network_bytes` of these between machines, for each token of a prompt or an
    answer.
    """

    layout: Layout
    shape: EngineShape
    block_tokens: int
    blocks: tuple[int, ...] = ()
    kv_bytes: int = 0
    own_bytes: int = 0
    links: tuple[Link, ...] = ()
    prefill_share: float | None = None
    decode_share: float | None = None
    cost_share: float | None = None
    link_bytes: float = 0.0
    network_bytes: float = 0.0
    max_len: int | None = None


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


def largest_first(layouts: Sequence[Layout]) -> list[Layout]:
    """Those that leave the fewest devices idle, in their order."""
    most = max((layout.devices for layout in layouts), default=0)
    return [layout for layout in layouts if layout.devices == most]


def link_of(on: Device, tp: int) -> Link:
    """From one stage to the next within a machine, where `tp` devices send to as many."""
    return Link(on.link_bandwidth * calibration_of(on.kind).link_efficiency * tp, on.link_latency)


def alone(wanted: Wanted, what: str) -> str:
    if wanted.replicas == 1:
        return "prefill rolls over replicas, and the fleet file has one; give `replicas: 2` or more"
    return f"prefill rolls over replicas, and there is {what}"


def no_layout(wanted: Wanted, phases: PhasesName, words: str) -> str:
    architecture = wanted.demand.architecture
    asked = "" if wanted.replicas is None else f"{wanted.replicas} replicas of "
    if phases == "pipelined":
        stages = wanted.stages or 2
        if stages > architecture.layers:
            return f"{architecture.layers} layers cannot be spread over {stages} stages"
        return f"{words} cannot be divided into {asked}{stages} or more stages"
    return f"{words} cannot be divided into {asked}equal groups that its {architecture.heads} heads can be split over"


def block_tokens(demand: Demand) -> int:
    """Tokens of a block, as the live planner chooses them for this model alone."""
    (group,) = group_pools([KVShape(demand.name, demand.architecture.head_dim, demand.dtype)])
    return group.block_tokens[0]


def boundary_bytes(demand: Demand) -> float:
    """What a token brings from one stage to the next: vLLM sends hidden states and residual."""
    return 2.0 * demand.architecture.hidden * ITEM_BYTES[demand.dtype]


def link_bytes(demand: Demand, layout: Layout) -> float:
    """What all devices of a replica together send for one token: two all-reduces per layer, each of which has every
    device send 2 (t-1)/t times the hidden state, and what goes from stage to stage."""
    architecture = demand.architecture
    reduced = 4.0 * (layout.tp - 1) * architecture.layers * architecture.hidden * ITEM_BYTES[demand.dtype]
    return reduced + (layout.stages - 1) * boundary_bytes(demand)
