"""What a way of arranging prefill and decode answers: where its layouts may be, what they leave for the KV cache, by
which policy its units run, how one is simulated, and what is reported of it.

`Arrangement` is the base; the other modules of this package have one each, and `muxserve.planning.arrangements` lists
them. Device pools (`planning.device_pool`) enumerate layouts and ask the arrangement what is special about it.
Multiplexed models share their devices, so the layout of their units is the planner's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, NamedTuple, Protocol

from muxserve.config import AUTO, Fleet, Model, Problem
from muxserve.costs.calibration import LINKS
from muxserve.costs.devices import Device
from muxserve.costs.latency import EngineShape, ServedModel
from muxserve.rolling.mitosis import Bounds
from muxserve.scheduling.token_throttling import Throttle, prompt_tokens_ahead
from muxserve.simulator import FleetModel, Link, Pipeline, RingRules, SimUnit, UnitResult, lone_unit
from muxserve.spec import BatchingName, PhasesName, PolicyName
from placement.cluster import PlacedUnit
from placement.demand import Demand
from placement.memory import MemoryRules, model_bytes
from placement.pools import KVShape, group_pools


class NoPlaceError(ValueError):
    """The model cannot be laid out that way; the message says why."""


class ReplicaLayout(NamedTuple):
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
    """One model as it is asked for. `replicas` and `stages` are None where they may be chosen. `spared` and
    `bounds` are for rolling prefill, `throttle` for a pipeline's steps (None: a fixed budget)."""

    demand: Demand
    replicas: int | None = None
    stages: int | None = None
    spared: float | None = 0.25
    bounds: Bounds = field(default_factory=Bounds)
    throttle: Throttle | None = field(default_factory=Throttle)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.demand.context

    @property
    def has_objectives(self) -> bool:
        """Whether there is one for the first token and one for those after it."""
        return self.demand.slo_ttft is not None and self.demand.slo_tpot is not None


def fleet_model(demand: Demand, max_len: int | None = None, share_steps: int = 0) -> FleetModel:
    """A model as the simulator wants it; `max_len` in place of the demand's own, `share_steps` as of `UnitSpec`."""
    served = {each.name: getattr(demand, each.name) for each in fields(ServedModel)}
    served["max_len"] = max_len or demand.context
    return FleetModel(**served, elastic=share_steps > 0, tokens=demand.sequence_tokens, share_steps=share_steps)


def wanted_of(model: Model, demand: Demand, free: bool) -> Wanted:
    """A model of the fleet file.

    Args:
        free: the number of replicas may be chosen where the file leaves it at one.
    """
    given, rolling = model.replicas, model.rolling
    return Wanted(
        demand=demand,
        replicas=None if free and given.max == 1 else max(1, given.at_start),
        stages=model.stages if isinstance(model.stages, int) else None,
        spared=rolling.quantile,
        bounds=Bounds(rolling.lower, rolling.upper),
        throttle=Throttle() if model.batching == "throttled" else None,
    )


@dataclass(frozen=True, slots=True)
class SimulatedLayout:
    """One layout with all that its simulation needs. Every replica has `shape` for each of its stages, whose KV caches
    have `blocks` of `block_tokens` tokens, `kv_bytes` on each device. `own_bytes` is what each device holds beside
    that. `max_len`: the longest sequence in tokens, if that is not the one wanted.
    """

    layout: ReplicaLayout
    shape: EngineShape
    block_tokens: int
    blocks: tuple[int, ...] = ()
    kv_bytes: int = 0
    own_bytes: int = 0
    links: tuple[Link, ...] = ()
    max_len: int | None = None


class DevicePool(Protocol):
    """Devices that a model has for itself."""

    @property
    def kind(self) -> str:
        """Their type, a name of `muxserve.costs.devices`."""
        ...

    @property
    def devices(self) -> int:
        """Their number."""
        ...

    def layouts(self, wanted: Wanted, phases: PhasesName) -> Iterator[ReplicaLayout]:
        """Ways to lay the model out, those that use most devices first.

        Raises:
            NoPlaceError: there is none at all.
        """
        ...

    def place(self, wanted: Wanted, layout: ReplicaLayout) -> SimulatedLayout:
        """That layout in detail.

        Raises:
            NoPlaceError: the model does not fit.
        """
        ...


class GpuDevices(DevicePool, Protocol):
    """Equal GPUs of some machines, as an arrangement asks of them when it sizes a place."""

    @property
    def rules(self) -> MemoryRules:
        """How the memory of a GPU is divided."""
        ...

    @property
    def usable(self) -> int:
        """Bytes of each GPU that may be used."""
        ...

    def check_room(self, wanted: Wanted, tokens: int, layout: ReplicaLayout, own: int | None = None) -> None:
        """
        Raises:
            NoPlaceError: `tokens` of KV are not enough for a mean request. `own`: bytes that the model itself takes.
        """
        ...

    def crossing(self, layout: ReplicaLayout) -> list[bool]:
        """For each boundary of a replica's stages, whether it lies between machines."""
        ...

    def link(self, tp: int, crosses: bool) -> Link:
        """What lies between two stages."""
        ...


class Arrangement:
    """One way of arranging the prefill and decode phases of a model.

    `dedicated`: each replica has one engine of both phases, in a unit to itself. `needs_objectives`: it cannot work
    without one for the first token and one for those after it.
    """

    name: ClassVar[PhasesName]
    dedicated: ClassVar[bool] = True
    needs_objectives: ClassVar[bool] = False

    # ------------------------------------------------------------ the fleet file

    def declare(self, model: Model, stages: int) -> Model:
        """The model of a fleet file with this arrangement in place of what it says."""
        return model.model_copy(update={"phases": self.name, "stages": AUTO})

    def policy(self, fleet: Fleet) -> PolicyName:
        """By which the scheduler of a unit of `fleet`'s models decides. A replica that has its devices to itself shares
        them with nobody, so that no lease is withheld."""
        return "free"

    def batching(self, model: Model) -> BatchingName:
        """What a step of the model's engines may hold; the default leaves that to vLLM."""
        return "vllm"

    def stages(self, fleet: Fleet, model: Model, layers: int, gpus: int) -> tuple[int, Problem | None]:
        """Stages that a replica's layers are split over, and why that cannot be. `gpus`: of the unit; 0: on CPU."""
        return 1, None

    # ------------------------------------------------------------ layout

    def check_pool(self, wanted: Wanted, most: int, devices: int | None, one: str) -> None:
        """
        Args:
            most: replicas that there can be.
            devices: of the pool; None: the cores of a machine, which any number of engines can share.
            one: what there is if that is one, in words.

        Raises:
            NoPlaceError: this cannot be laid out on such a pool.
        """

    def cpu_stages(self, wanted: Wanted) -> int:
        """Stages of a replica on a CPU."""
        return 1

    def allows(self, layout: ReplicaLayout, wanted: Wanted) -> bool:
        """Whether a layout is one of this arrangement, and as the file says."""
        return layout.stages == 1 and (wanted.replicas is None or layout.replicas == wanted.replicas)

    def no_layout(self, wanted: Wanted, pool: str) -> str:
        """Why there is no layout on that pool, in words."""
        asked = "" if wanted.replicas is None else f"{wanted.replicas} replicas of "
        heads = wanted.demand.architecture.heads
        return f"{pool} cannot be divided into {asked}equal groups that its {heads} heads can be split over"

    # ------------------------------------------------------------ placement

    def on_gpus(self, pool: GpuDevices, wanted: Wanted, layout: ReplicaLayout) -> SimulatedLayout:
        """A layout on GPUs, in detail.

        Raises:
            NoPlaceError: the model does not fit.
        """
        raise NoPlaceError(f"{self.name} models have no devices to themselves")

    # ------------------------------------------------------------ simulation

    def sim_unit(self, wanted: Wanted, place: SimulatedLayout, name: str, devices: tuple[int, ...]) -> SimUnit:
        """One replica, in a unit to itself."""
        return lone_unit(
            name,
            place.shape.device,
            devices,
            fleet_model(wanted.demand, place.max_len or wanted.longest),
            min(place.blocks),
            place.block_tokens,
            place.shape.share,
            self.pipeline(wanted, place),
            prompt_tokens_ahead(len(place.blocks), wanted.demand.max_num_batched_tokens, wanted.throttle),
            "rolling" if self.ring(wanted) is not None else "free",
        )

    def pipeline(self, wanted: Wanted, place: SimulatedLayout) -> Pipeline | None:
        """How an engine's layers are spread over stages; None: they are not."""
        return None

    def ring(self, wanted: Wanted) -> RingRules | None:
        """By what the replicas decide who prefills; None: requests go by the load."""
        return None

    # ------------------------------------------------------------ report

    def unit_words(self, unit: PlacedUnit) -> str:
        """What a table of units says of one; empty: its shares of compute say more."""
        return self.name

    def plan_keys(self, unit: PlacedUnit) -> dict[str, object]:
        """The keys of a unit in a plan file."""
        return {"phases": self.name}

    def report(self, unit: UnitResult) -> dict[str, object]:
        """Further keys of a unit in the report of a simulation (docs/simulator.md). Times are seconds."""
        return {}

    def report_words(self, model: str, units: Sequence[UnitResult]) -> str:
        """A sentence on all units of a model for the report of a simulation; empty: nothing special."""
        return ""


def single_stage(pool: GpuDevices, wanted: Wanted, layout: ReplicaLayout, rules: MemoryRules) -> SimulatedLayout:
    """A replica whose layers are not split over stages; what the model leaves of each GPU is its KV cache.

    Raises:
        NoPlaceError: the model does not fit.
    """
    demand, tp = wanted.demand, layout.tp
    tokens = block_tokens(demand)
    own = model_bytes(demand, tp, rules)
    free = pool.usable - own
    room = int(free / token_bytes(demand, tp))
    pool.check_room(wanted, room, layout, own)
    shape = EngineShape(pool.kind, tp, 1.0, demand.dtype, demand.graphs)
    return SimulatedLayout(layout, shape, tokens, (room // tokens,), free, own)


def one_engine(rules: MemoryRules) -> MemoryRules:
    """The rules where a model has one engine beside the holder of its weights."""
    return replace(rules, engines=1, processes=2)


def block_tokens(demand: Demand) -> int:
    """Tokens of a block, as the live planner chooses them for this model alone."""
    shape = demand.architecture
    kept = KVShape(demand.name, shape.page_head_dim(demand.dtype), shape.kv_dtype(demand.dtype))
    (group,) = group_pools([kept])
    return group.block_tokens[0]


def token_bytes(demand: Demand, tp: int) -> float:
    """KV bytes of a token on each of `tp` devices; those beyond the KV heads hold copies."""
    copies = max(1.0, tp / demand.architecture.kv_heads)
    # Of a model that keeps states alone tokens take nothing.
    return max(1.0, demand.architecture.kv_bytes_per_token(demand.dtype) * copies / tp)


def link_of(on: Device, tp: int) -> Link:
    """From one stage to the next within a machine, where `tp` devices send to as many."""
    use = LINKS[on.link]
    return Link(on.link_bandwidth * use.efficiency * tp, use.latency)
