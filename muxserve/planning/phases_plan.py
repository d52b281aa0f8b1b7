"""Rolling and pipelined models in a plan: each has devices to itself, and the others share what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from muxserve.planning.phases_figures import Figures
from muxserve.planning.phases_layout import Layout, Place
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand, Member, Mesh
from placement.estimator import ModelEstimate, UnitEstimate
from placement.planner import ClusterPlan


@dataclass(frozen=True, slots=True)
class Arranged:
    """A model with devices to itself: `devices` has those of each replica. Its figures are of the simulation that its
    arrangement was compared in. `share` is of the compute of each device."""

    demand: Demand
    place: Place
    figures: Figures
    devices: tuple[tuple[int, ...], ...]
    share: float = 1.0


class Carving:
    """Devices of a cluster that are still free, while some are taken."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._free: list[list[int]] = []
        number = 0
        for node in cluster.nodes:
            self._free.append(list(range(number, number + node.count)))
            number += node.count

    def take(self, kind: str, layout: Layout) -> tuple[tuple[int, ...], ...] | None:
        """Devices of type `kind` for each replica of a layout: those of one within a machine if that has them, the
        stages of a longer pipeline over several. None, and nothing taken, if they are not there."""
        free = [list(numbers) for numbers in self._free]
        mine = [number for number, node in enumerate(self.cluster.nodes) if node.device == kind]
        taken = []
        for _ in range(layout.replicas):
            devices = _replica([free[number] for number in mine], layout)
            if devices is None:
                return None
            taken.append(devices)
        self._free = free
        return tuple(taken)

    def rest(self) -> tuple[Cluster, list[int]]:
        """What is free as a cluster, and the number in this one of each of its devices."""
        nodes = [(node, numbers) for node, numbers in zip(self.cluster.nodes, self._free, strict=True) if numbers]
        cluster = Cluster(tuple(Node(node.device, len(numbers)) for node, numbers in nodes))
        return cluster, [number for _, numbers in nodes for number in numbers]


def _replica(nodes: Sequence[list[int]], layout: Layout) -> tuple[int, ...] | None:
    size = layout.stages * layout.tp
    fitting = [numbers for numbers in nodes if len(numbers) >= size]
    if fitting:
        return _pop(min(fitting, key=len), size)
    devices: list[int] = []
    for numbers in sorted(nodes, key=len, reverse=True):
        while len(numbers) >= layout.tp and len(devices) < size:
            devices += _pop(numbers, layout.tp)
    return tuple(devices) if len(devices) == size else None


def _pop(numbers: list[int], count: int) -> tuple[int, ...]:
    taken = tuple(numbers[:count])
    del numbers[:count]
    return taken


def part_of(plan: ClusterPlan, name: str) -> tuple[str, tuple[int, ...]]:
    """The devices that a model would have to itself: their type, and how many on each machine. Alone it has all of the
    type of which there is most; of units that it shares it has the part that its tokens per second times its weights
    are of all, at least one device."""
    cluster = plan.placement.cluster
    by_kind: dict[str, float] = {}
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        work = {plan.demands[m.member.model].name: _work(plan.demands[m.member.model], m.rate) for m in estimate.models}
        if name in work:
            part = len(unit.devices) * work[name] / sum(work.values())
            by_kind[unit.device] = by_kind.get(unit.device, 0.0) + part
    kinds: dict[str, int] = {}
    for node in cluster.nodes:
        kinds[node.device] = kinds.get(node.device, 0) + node.count
    if len(plan.demands) == 1 or not by_kind:
        kind = max(kinds, key=lambda each: kinds[each])
        count = kinds[kind]
    else:
        kind = max(by_kind, key=lambda each: by_kind[each])
        count = max(1, round(by_kind[kind]))
    return kind, nodes_of(cluster, kind, count)


def nodes_of(cluster: Cluster, kind: str, count: int) -> tuple[int, ...]:
    """How many of `count` devices of a type are on each machine, if they are taken from the largest first."""
    nodes = []
    for size in sorted((node.count for node in cluster.nodes if node.device == kind), reverse=True):
        if count > 0:
            nodes.append(min(size, count))
            count -= nodes[-1]
    return tuple(nodes)


def _work(demand: Demand, rate: float) -> float:
    a = demand.architecture
    active = a.parameters if a.experts <= 1 else a.parameters * a.active_experts / a.experts
    return rate * demand.sequence_tokens * active


def joined(rest: ClusterPlan, cluster: Cluster, numbers: Sequence[int], arranged: Sequence[Arranged]) -> ClusterPlan:
    """The plan of the models that share devices, and those that have some to themselves.

    Args:
        cluster: all devices.
        numbers: the number in `cluster` of each device that `rest` was planned on.
    """
    units = [replace(unit, devices=tuple(numbers[n] for n in unit.devices)) for unit in rest.placement.units]
    estimates, demands = list(rest.estimates), list(rest.demands)
    for each in arranged:
        member = Member(len(demands), each.place.layout.replicas)
        demands.append(each.demand)
        for devices in each.devices:
            units.append(_unit(f"unit{len(units)}", each, devices))
            estimates.append(_estimate(each, member))
    return replace(rest, demands=tuple(demands), placement=Placement(cluster, tuple(units)), estimates=tuple(estimates))


def _unit(name: str, each: Arranged, devices: tuple[int, ...]) -> PlacedUnit:
    layout = each.place.layout
    rate = each.demand.rate / layout.replicas
    return PlacedUnit(
        name,
        each.place.shape.device,
        devices,
        (PlacedModel(each.demand.name, rate, each.share, each.share),),
        each.place.kv_bytes,
        layout.phases,
        layout.stages,
    )


def _estimate(each: Arranged, member: Member) -> UnitEstimate:
    """What the simulation says of one replica, in the words of an estimate."""
    demand, figures, layout = each.demand, each.figures, each.place.layout
    rate = demand.rate / member.replicas
    token = demand.architecture.kv_bytes_per_token(demand.dtype) / (layout.stages * layout.tp)
    used = min(float(each.place.kv_bytes), figures.running / member.replicas * demand.sequence_tokens * token)
    model = ModelEstimate(
        member=member,
        rate=rate,
        throughput=figures.served / member.replicas,
        batch=figures.running / member.replicas,
        ttft=figures.ttft.mean if figures.ttft else math.inf,
        tpot=figures.tpot.mean if figures.tpot else 0.0,
        attainment=figures.attainment,
        decode_share=each.share,
        limit="slo",
        own_bytes=each.place.own_bytes,
        kv_bytes=used,
    )
    return UnitEstimate(
        mesh=Mesh(each.place.shape.device, layout.stages * layout.tp),
        prefill_share=each.share,
        models=(model,),
        pool_bytes=each.place.kv_bytes,
        kv_bytes=used,
        prefill_load=0.0,
        decode_load=0.0,
        progress=1.0,
        headroom=figures.goodput / demand.rate,
        next_limit="goodput" if figures.goodput >= demand.rate else "",
    )
