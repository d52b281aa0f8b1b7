"""Devices that a model has for itself: GPUs, or the cores of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from muxserve.config import AUTO, NETWORK
from muxserve.costs.architecture import split_layers
from muxserve.costs.devices import device
from muxserve.costs.latency import EngineShape
from muxserve.planning.phases_layout import (
    Layout,
    NoPlaceError,
    PhasesName,
    Place,
    Wanted,
    alone,
    block_tokens,
    boundary_bytes,
    link_bytes,
    link_of,
    no_layout,
)
from muxserve.simulator import Link
from muxserve.simulator.stages import kv_blocks
from placement import Machine, ModelDemand, PlanError, plan_unit
from placement.demand import splits_evenly
from placement.format import format_size
from placement.memory import MemoryRules, activation_bytes, model_bytes

CPU = "CPU"
# Of what a network carries, as in `benchmarks/paper/ecoserve.py`; a message between machines takes about this long.
_NETWORK_SHARE, _NETWORK_LATENCY = 0.9, 50e-6
_CPU_STAGES = 2


@dataclass(frozen=True, slots=True)
class GpuGround:
    """GPUs of one type, `nodes[i]` of them on the i-th machine; `network` is bytes per second between machines,
    `memory` that of one GPU, bytes. Some are left idle where no layout takes all."""

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
            raise NoPlaceError(alone(wanted, "one GPU"))
        if phases == "pipelined" and self.devices < (wanted.stages or 2):
            raise NoPlaceError(f"a pipeline of {wanted.stages or 2} stages needs as many GPUs, and there is one")
        for devices in range(self.devices, 0, -1):
            for tp in _divisors(devices):
                if not splits_evenly(architecture, tp) or len(self._groups(tp)) * tp < devices:
                    continue
                for stages in _divisors(devices // tp):
                    layout = Layout(phases, devices // tp // stages, stages, tp)
                    if _allowed(layout, wanted):
                        found = True
                        yield layout
        if not found:
            raise NoPlaceError(no_layout(wanted, phases, self.words))

    def place(self, wanted: Wanted, layout: Layout) -> Place:
        """See `Ground`."""
        demand, tp, rules = wanted.demand, layout.tp, self.rules
        usable = int(self.memory * rules.utilisation) - rules.reserve_bytes
        tokens = block_tokens(demand)
        heads = demand.architecture.kv_heads
        # Devices beyond the KV heads hold copies.
        copies = max(1.0, tp / heads)
        token_bytes = demand.architecture.kv_bytes_per_token(demand.dtype) * copies / tp
        shape = EngineShape(self.kind, tp, 1.0, demand.dtype)
        sent = link_bytes(demand, layout)
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
            over = sum(crossing) * boundary_bytes(demand)
            layers = max(split_layers(demand.architecture.layers, layout.stages))
            kv_bytes = int(min(blocks) * tokens * token_bytes * layers / demand.architecture.layers)
            return Place(
                layout, shape, tokens, blocks, kv_bytes, usable - kv_bytes, links, link_bytes=sent, network_bytes=over
            )
        own = model_bytes(demand, tp, rules)
        left = usable - own
        self._check(wanted, int(left / token_bytes), layout, own)
        if layout.phases == "multiplexed":
            return Place(layout, shape, tokens, (), left, own, link_bytes=sent)
        return Place(layout, shape, tokens, (int(left / token_bytes) // tokens,), left, own, link_bytes=sent)

    def _check(self, wanted: Wanted, room: int, layout: Layout, own: int | None = None) -> None:
        demand = wanted.demand
        if room >= demand.sequence_tokens:
            return
        usable = format_size(int(self.memory * self.rules.utilisation) - self.rules.reserve_bytes)
        where = f"on each of {layout.tp * layout.stages} {self.kind}"
        if own is not None and room < 0:
            raise NoPlaceError(
                f"its weights, activations and processes take {format_size(own)} {where}, of which {usable} may be used"
            )
        raise NoPlaceError(
            f"of the {usable} that may be used {where} its weights, activations and processes leave room for "
            f"{max(0, room)} tokens of KV, and a mean request has {demand.sequence_tokens}"
        )

    def _crossing(self, layout: Layout) -> list[bool]:
        """For each boundary of the first replica's stages, whether it lies between machines; the other replicas are
        laid out as it is, or better."""
        return [a != b for a, b in pairwise(self._groups(layout.tp)[: layout.stages])]

    def _groups(self, tp: int) -> list[int]:
        """The machine of each group of `tp` GPUs; tensors are not split between machines."""
        return [number for number, count in enumerate(self.nodes) for _ in range(count // tp)]

    def _link(self, tp: int, crosses: bool) -> Link:
        return Link(self.network * _NETWORK_SHARE, _NETWORK_LATENCY) if crosses else link_of(device(self.kind), tp)


@dataclass(frozen=True, slots=True)
class CpuGround:
    """The cores of one machine, divided evenly among the engines that run on them at the same time. `pool` is the
    size of a unit's page pool where the fleet file gives it, bytes; `cores` those that may be used. `ranks` as in the
    fleet file. `others` are units of other models that are there, too."""

    machine: Machine
    cores: int
    pool: int | None = None
    ranks: int = 1
    others: int = 0
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
            raise NoPlaceError(alone(wanted, "one replica in the fleet file; give `replicas: 2` or more"))
        stages = (wanted.stages or _CPU_STAGES) if phases == "pipelined" else 1
        layers = wanted.demand.architecture.layers
        if stages > layers:
            raise NoPlaceError(f"{layers} layers cannot be spread over {stages} stages")
        yield Layout(phases, replicas, stages, self.ranks)

    def place(self, wanted: Wanted, layout: Layout) -> Place:
        """See `Ground`."""
        demand, replicas = wanted.demand, layout.replicas
        units = replicas + self.others
        ranks = layout.stages * self.ranks
        asked = ModelDemand(
            demand.name,
            demand.architecture,
            demand.dtype,
            demand.rate,
            wanted.max_len,
            demand.max_num_seqs,
            ranks=ranks,
            stages=layout.stages,
        )
        try:
            plan = plan_unit([asked], self.machine, self.cores, self.pool, units=units)
        except PlanError as error:
            raise NoPlaceError(str(error)) from None
        weights = replicas * demand.architecture.weight_bytes(demand.dtype)
        pools = replicas * ranks * plan.pool_bytes
        if weights + pools > self.machine.memory_bytes:
            raise NoPlaceError(
                f"{layout.words} need {format_size(weights)} for weights and {format_size(pools)} for KV, and the "
                f"memory is {format_size(self.machine.memory_bytes)}"
            )
        (model,) = plan.models
        # Engines of both phases have as many threads as leave the others as many.
        each = 1.0 / (units * ranks)
        on = device(CPU)
        place = Place(
            layout,
            EngineShape(CPU, self.ranks, each, demand.dtype),
            model.block_tokens,
            (model.num_blocks - 1,) * layout.stages,
            plan.pool_bytes,
            weights // (replicas * ranks),
            links=(link_of(on, 1),) * (layout.stages - 1),
            link_bytes=link_bytes(demand, layout),
            max_len=model.max_len,
        )
        if layout.phases != "multiplexed":
            return place
        # A replica's engines take what their threads can use, beside those of the others; units of other models have
        # their parts.
        share = min(model.share, replicas / units) / ranks
        return replace(place, prefill_share=model.share, decode_share=model.share, cost_share=share)


def ground_on_cpu(machine: Machine, cores: int | str, pool: int | str, ranks: int = 1) -> CpuGround:
    """The machine as the fleet file's `cluster.cores` and `kv_pool.size` leave it."""
    return CpuGround(
        machine,
        machine.cores if cores == AUTO else int(cores),
        None if pool == AUTO else int(pool),
        ranks,
    )


def _allowed(layout: Layout, wanted: Wanted) -> bool:
    if wanted.replicas is not None and layout.replicas != wanted.replicas:
        return False
    if layout.phases == "pipelined":
        if layout.stages > wanted.demand.architecture.layers:
            return False
        # One stage is a pipeline if somebody wants it: steps are throttled there, too.
        return layout.stages >= 2 if wanted.stages is None else layout.stages == wanted.stages
    return layout.stages == 1 and (layout.phases != "rolling" or layout.replicas >= 2)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
