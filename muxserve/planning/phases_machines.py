"""The devices of a plan, divided: those of models that are rolling or pipelined, and those that the others share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from muxserve.config import Fleet
from muxserve.costs.devices import device
from muxserve.costs.latency import LatencyModel
from muxserve.planning.phases import Tell, places_of, silent
from muxserve.planning.phases_arrange import Arrangements, arrange
from muxserve.planning.phases_ground import CpuGround, GpuGround
from muxserve.planning.phases_layout import Ground, Layout, NoPlaceError, wanted_of
from muxserve.planning.phases_plan import Carving, joined, nodes_of, part_of
from placement.cluster import Cluster, Placement
from placement.demand import Demand
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.planner import ClusterPlan, notes_of


@dataclass(frozen=True, slots=True)
class Divided:
    """A cluster whose devices are divided: `left` is what the models of `arrangements.shared` are to be planned on, and
    `numbers` the number in `cluster` of each of its devices."""

    cluster: Cluster
    arrangements: Arrangements
    left: Cluster
    numbers: list[int]

    def crowds_out(self, fleet: Fleet, before: ClusterPlan, rest: ClusterPlan | None) -> bool:
        """Whether models that were free to share have taken the place of others, which had one in `before`."""
        chosen = [each for each in self.arrangements.arranged if fleet.model(each.demand.name).phases == "auto"]
        if len(chosen) < len(self.arrangements.arranged) or self.arrangements.missing:
            return False
        missing = rest.missing if rest else {demand.name: "" for demand in self.arrangements.shared}
        return bool(set(missing) - set(before.missing))

    @property
    def apart(self) -> bool:
        """Whether some model is not to be planned with the others."""
        return bool(self.arrangements.arranged or self.arrangements.missing)

    def joined(self, rest: ClusterPlan | None, objective: Objective) -> ClusterPlan:
        """The whole plan. `rest` is that of the shared models; None where there are none, or no devices for them."""
        found = self.arrangements
        rest = rest or ClusterPlan((), Placement(self.left, ()), (), {}, objective, "muxserve", 0.0, 0.0, 0)
        demands = [demand for demand in found.shared if demand not in rest.demands]
        missing = {
            **rest.missing,
            **found.missing,
            **{demand.name: "models that have devices to themselves leave none" for demand in demands},
        }
        whole = joined(replace(rest, missing=missing), self.cluster, self.numbers, found.arranged)
        # Those that are placed nowhere are asked for nevertheless.
        nowhere = [*demands, *found.impossible]
        whole = replace(whole, demands=(*whole.demands, *nowhere))
        return replace(whole, placement=replace(whole.placement, notes=notes_of(whole)))


def divide_gpus(
    fleet: Fleet,
    demands: Sequence[Demand],
    made: ClusterPlan,
    latency: LatencyModel,
    rules: MemoryRules,
    network: float,
    asked: Sequence[str] = (),
    seed: int = 0,
    tell: Tell = silent,
    goodputs: bool = True,
) -> Divided:
    """Give every rolling or pipelined model GPUs to itself.

    Args:
        made: the plan as if all models were multiplexed: what they have there is what they are compared on.
        network: bytes per second between machines.
        asked: models to be compared whatever the file says.
        goodputs: see `arrange`.
    """
    cluster = made.placement.cluster
    carving = Carving(cluster)
    asked_for = {demand.name: demand for demand in demands}

    def ground_of(name: str) -> Ground:
        kind, nodes = part_of(made, name)
        part = GpuGround(kind, nodes, device(kind).memory_bytes, rules, network)
        model = fleet.model(name)
        if model.phases == "auto":
            return part
        # What the file says must be possible: then as many more as that takes.
        wanted = wanted_of(model, asked_for[name], free=True)
        for count in range(part.devices, sum(n.count for n in cluster.nodes if n.device == kind) + 1):
            ground = replace(part, nodes=nodes_of(cluster, kind, count))
            with suppress(NoPlaceError):
                places_of(wanted, ground, model.phases)
                return ground
        return part

    def take(ground: Ground, layout: Layout) -> tuple[tuple[int, ...], ...] | None:
        return carving.take(ground.kind, layout)

    found = arrange(fleet, demands, ground_of, take, latency, asked=asked, seed=seed, tell=tell, goodputs=goodputs)
    left, numbers = carving.rest()
    return Divided(cluster, found, left, numbers)


def divide_cpu(
    fleet: Fleet,
    demands: Sequence[Demand],
    ground: CpuGround,
    latency: LatencyModel,
    asked: Sequence[str] = (),
    seed: int = 0,
    tell: Tell = silent,
    goodputs: bool = True,
) -> Arrangements:
    """How models are arranged on the CPU of one machine, each compared as if it were there alone. The machine stands
    for as many devices as there are units; which those are is not said yet (`planning.machine`)."""

    def take(_: Ground, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return ((0,),) * layout.replicas

    return arrange(
        fleet,
        demands,
        lambda _: ground,
        take,
        latency,
        asked=asked,
        free=False,
        seed=seed,
        tell=tell,
        goodputs=goodputs,
    )
