"""Layouts of a model that has devices to itself: where its replicas may be, what they leave for the KV cache, how one
is simulated, and what is reported of it.

Such a model has one engine of both phases in each replica. Its layers may be split over several stages, with
micro-batches in flight (gLLM), or its prefill rolls over the replicas (EcoServe). Device pools
(`planning.candidates.device_pool`) enumerate layouts. Models that share their devices are laid out by the planner.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from muxserve.config import Fleet, Model, Problem
from muxserve.costs.architecture import split_layers
from muxserve.costs.calibration import LINKS
from muxserve.costs.devices import Device, device
from muxserve.costs.latency import EngineShape
from muxserve.metrics.definitions import percentile
from muxserve.metrics.tables import seconds_words
from muxserve.rolling.member import LatencyTargets
from muxserve.rolling.mitosis import Bounds
from muxserve.scheduling.token_throttling import (
    Throttle,
    TokenThrottling,
    prompt_tokens_ahead,
)
from muxserve.simulator import Link, Pipeline, RingRules, SimUnit, UnitResult, lone_unit
from muxserve.simulator.stages import kv_blocks
from placement.cluster import ROLLING, PlacedUnit
from placement.demand import Demand
from placement.format import enumerate_words
from placement.memory import MemoryRules, activation_bytes, model_bytes
from placement.pools import KVShape, group_pools


class NoPlaceError(ValueError):
    """The model cannot be laid out that way; the message says why."""


class ReplicaLayout(NamedTuple):
    """`replicas` of a model, each of `stages` (1: no pipeline) that are split over `tp` devices each; prefill may be
    `rolling` over them."""

    replicas: int
    stages: int
    tp: int
    rolling: bool = False

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
class LayoutRequest:
    """One model as it is asked for. `replicas` and `stages` are None where they may be chosen, the latter from
    `least_stages` on. `spared` and `bounds` are for `rolling` prefill."""

    demand: Demand
    replicas: int | None = None
    stages: int | None = None
    least_stages: int = 1
    rolling: bool = False
    spared: float | None = 0.25
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.demand.context

    @property
    def has_objectives(self) -> bool:
        """Whether there is one for the first token and one for those after it."""
        return self.demand.slo_ttft is not None and self.demand.slo_tpot is not None


def asks_for_choice(model: Model) -> bool:
    """Whether the fleet file says `engines: auto`. Who leaves it out has the same choice, and does not hear what came
    of it."""
    return model.is_open and "engines" in model.model_fields_set


def may_be_dedicated(model: Model) -> bool:
    """Whether the fleet file says that a model has one engine, or is to have what is chosen."""
    return asks_for_choice(model) or model.engines == "one" or model.has_own_unit


def stages_of(fleet: Fleet, model: Model, gpus: int) -> tuple[int, Problem | None]:
    """Stages that a replica's layers are split over, and why that cannot be. `gpus`: of the unit; 0: on CPU."""
    stages = model.stage_count
    if gpus and gpus % stages:
        message = f"{stages} stages do not divide the {gpus} GPUs of a unit evenly"
        hint = "those of a stage split its tensors; give a divisor, or another number of GPUs"
        return stages, fleet.model_problem(model.name, "stages", f"{message} ({hint})")
    return stages, None


def wanted_of(model: Model, demand: Demand, free: bool) -> LayoutRequest:
    """A model of the fleet file.

    Args:
        free: the number of replicas may be chosen where the file leaves it at one, and that of stages where it does
            not say it.
    """
    given = model.replicas
    return LayoutRequest(
        demand=demand,
        replicas=None if free and given.max == 1 else max(1, given.at_start),
        stages=model.stages if isinstance(model.stages, int) else None if free else model.stage_count,
        rolling=model.rolls,
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

    def layouts(self, wanted: LayoutRequest) -> Iterator[ReplicaLayout]:
        """Ways to lay the model out, those that use most devices first.

        Raises:
            NoPlaceError: there is none at all.
        """
        ...

    def place(self, wanted: LayoutRequest, layout: ReplicaLayout) -> SimulatedLayout:
        """That layout in detail.

        Raises:
            NoPlaceError: the model does not fit.
        """
        ...


class GpuDevices(DevicePool, Protocol):
    """Equal GPUs of some machines, of which `place_on_gpus` asks this when it sizes a place."""

    @property
    def rules(self) -> MemoryRules:
        """How the memory of a GPU is divided."""
        ...

    @property
    def usable(self) -> int:
        """Bytes of each GPU that may be used."""
        ...

    def check_room(self, wanted: LayoutRequest, tokens: int, layout: ReplicaLayout, own: int | None = None) -> None:
        """
        Raises:
            NoPlaceError: `tokens` of KV are not enough for a mean request. `own`: bytes that the model itself takes.
        """
        ...


# ---------------------------------------------------------------- layouts


def check_pool(wanted: LayoutRequest, most: int, devices: int | None, one: str) -> None:
    """
    Args:
        most: replicas that there can be.
        devices: of the pool; None: the cores of a machine, which any number of engines can share.
        one: what there is if that is one, in words.

    Raises:
        NoPlaceError: the model cannot be laid out on such a pool.
    """
    if wanted.rolling and most < 2:
        if wanted.replicas == 1:
            one = "the fleet file has one; give `replicas: 2` or more"
            raise NoPlaceError(f"prefill rolls over replicas, and {one}")
        raise NoPlaceError(f"prefill rolls over replicas, and there is {one}")
    stages = wanted.stages or wanted.least_stages
    if devices is not None and devices < stages:
        raise NoPlaceError(f"a pipeline of {stages} stages needs as many GPUs, and there is one")
    if devices is None and stages > wanted.demand.architecture.layers:
        raise NoPlaceError(_too_many(wanted, stages))


def allows(layout: ReplicaLayout, wanted: LayoutRequest) -> bool:
    """Whether a layout is as the model is asked for."""
    if wanted.replicas not in (None, layout.replicas) or layout.stages > wanted.demand.architecture.layers:
        return False
    if wanted.rolling:
        return layout.stages == 1 and layout.replicas >= 2
    return layout.stages >= wanted.least_stages if wanted.stages is None else layout.stages == wanted.stages


def no_layout(wanted: LayoutRequest, pool: str) -> str:
    """Why there is no layout on that pool, in words."""
    stages, architecture = wanted.stages or wanted.least_stages, wanted.demand.architecture
    if stages > architecture.layers:
        return _too_many(wanted, stages)
    asked = "" if wanted.replicas is None else f"{wanted.replicas} replicas of "
    if stages == 1:
        heads = f"equal groups that its {architecture.heads} heads can be split over"
        return f"{pool} cannot be divided into {asked}{heads}"
    return f"{pool} cannot be divided into {asked}{stages} or more stages"


def _too_many(wanted: LayoutRequest, stages: int) -> str:
    return f"{wanted.demand.architecture.layers} layers cannot be spread over {stages} stages"


def place_on_gpus(pool: GpuDevices, wanted: LayoutRequest, layout: ReplicaLayout) -> SimulatedLayout:
    """A layout on GPUs, in detail.

    Raises:
        NoPlaceError: the model does not fit.
    """
    rules = replace(pool.rules, engines=1, processes=2)
    return single_stage(pool, wanted, layout, rules) if layout.rolling else _staged(pool, wanted, layout, rules)


def _staged(pool: GpuDevices, wanted: LayoutRequest, layout: ReplicaLayout, rules: MemoryRules) -> SimulatedLayout:
    demand, tp, stages = wanted.demand, layout.tp, layout.stages
    tokens = block_tokens(demand)
    engine = activation_bytes(demand, tp) + rules.graphs(demand) + rules.processes * rules.context_bytes
    free = [float(tp * (pool.usable - engine))] * stages
    try:
        blocks = kv_blocks(demand.architecture, demand.dtype, stages, free, tokens)
    except ValueError as error:
        raise NoPlaceError(str(error)) from None
    # Devices beyond the KV heads hold copies.
    blocks = tuple(int(count / max(1.0, tp / demand.architecture.kv_heads)) for count in blocks)
    pool.check_room(wanted, min(blocks) * tokens, layout)
    layers = demand.architecture.layers
    part = max(split_layers(layers, stages))
    kv_bytes = int(min(blocks) * tokens * token_bytes(demand, tp) * part / layers)
    return SimulatedLayout(
        layout,
        EngineShape(pool.kind, tp, 1.0, demand.dtype, demand.graphs),
        tokens,
        blocks,
        kv_bytes,
        pool.usable - kv_bytes,
        (link_of(device(pool.kind), tp),) * (stages - 1),
    )


def single_stage(pool: GpuDevices, wanted: LayoutRequest, layout: ReplicaLayout, rules: MemoryRules) -> SimulatedLayout:
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
    shape = EngineShape(pool.kind, tp, 1.0, demand.dtype, demand.graphs, ahead=demand.ahead and tp == 1)
    return SimulatedLayout(layout, shape, tokens, (room // tokens,), free, own)


def block_tokens(demand: Demand) -> int:
    """Tokens of a block, as the live planner chooses them for this model alone."""
    shape = demand.architecture
    kept = KVShape(demand.name, shape.page_head_dim(demand.dtype), shape.kv_dtype(demand.dtype))
    (group,) = group_pools([kept])
    return group.block_tokens[0]


def token_bytes(demand: Demand, tp: int) -> float:
    """KV bytes of a token on each of `tp` devices; those beyond the KV heads hold copies."""
    copies = max(1.0, tp / demand.architecture.kv_heads)
    # Tokens of a model that keeps only states take nothing.
    return max(1.0, demand.architecture.kv_bytes_per_token(demand.dtype) * copies / tp)


def link_of(on: Device, tp: int) -> Link:
    """From one stage to the next within a machine, where `tp` devices send to as many."""
    use = LINKS[on.link]
    return Link(on.link_bandwidth * use.efficiency * tp, use.latency)


# ---------------------------------------------------------------- simulation


def replica_unit(wanted: LayoutRequest, place: SimulatedLayout, name: str, devices: tuple[int, ...]) -> SimUnit:
    """One replica as the simulator has it, in a unit to itself."""
    stages = len(place.blocks)
    pipeline = throttle = None
    # The steps of an engine of one stage are vLLM's own.
    if stages > 1:
        throttle = Throttle()
        pipeline = Pipeline(split_layers(wanted.demand.architecture.layers, stages), place.links, TokenThrottling)
    return lone_unit(
        name,
        place.shape.device,
        devices,
        replace(wanted.demand, max_len=place.max_len or wanted.longest),
        min(place.blocks),
        place.block_tokens,
        place.shape.share,
        pipeline,
        prompt_tokens_ahead(stages, wanted.demand.max_num_batched_tokens, throttle),
        ROLLING if wanted.rolling else "free",
    )


def ring_of(wanted: LayoutRequest) -> RingRules:
    """By what the replicas of a rolling model decide who prefills.

    Raises:
        NoPlaceError: it has no objectives.
    """
    demand = wanted.demand
    if demand.slo_ttft is None or demand.slo_tpot is None:
        raise NoPlaceError(f"{demand.name} is rolling, which needs slo.ttft_ms and slo.tpot_ms")
    objectives = LatencyTargets(demand.slo_ttft, demand.slo_tpot, wanted.spared)
    return RingRules(objectives, wanted.bounds, expected_output=demand.output_tokens, max_tokens_told=True)


# ---------------------------------------------------------------- report


def shape_words(unit: PlacedUnit, model: str) -> str:
    """What tables say of a model's engines; empty where it has two, of which shares of compute say more."""
    if unit.shape_of(model) == "split":
        return ""
    if unit.rolls:
        return "one engine, rolling"
    return f"one engine, {unit.stages} stages" if unit.stages > 1 else "one engine"


def simulated_keys(unit: UnitResult) -> dict[str, object]:
    """Further keys of a unit in the report of a simulation (docs/simulator.md). Times are seconds."""
    if unit.rolling:
        return {"switch_wait": _spread(unit.waits)}
    if not unit.stages:
        return {}
    stages = zip(unit.stages, _bubbles(unit), strict=True)
    return {"stages": [{"busy_seconds": busy, "bubbles": part} for busy, part in stages]}


def simulated_words(model: str, units: Sequence[UnitResult]) -> str:
    """A sentence on all units of a model that rolls or has several stages, for the report of a simulation; empty: it
    does neither."""
    replicas = f"{len(units)} replica{'s' if len(units) > 1 else ''}"
    if units[0].rolling:
        spread = _spread([wait for unit in units for wait in unit.waits])
        words = "no request was answered"
        if spread is not None:
            mean, last = (seconds_words(spread[name]) for name in ("mean", "p99"))
            words = f"after its first token a request waits {mean} (p99 {last}) for the phase switch, not in TTFT"
        return f"{model} is rolling over {replicas}; {words}"
    parts = [f"{statistics.fmean(each):.0%}" for each in zip(*map(_bubbles, units), strict=True)]
    if len(parts) <= 1:
        return ""
    return f"{model} has {replicas} of {len(parts)} stages with {enumerate_words(parts)} bubbles"


def _bubbles(unit: UnitResult) -> list[float]:
    """The part of the time with requests in flight in which each stage is idle."""
    return [1.0 - busy / unit.active if unit.active else 0.0 for busy in unit.stages]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    percentiles = {f"p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
    return {"mean": statistics.fmean(values), **percentiles}
