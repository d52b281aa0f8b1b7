"""Where the models of a fleet are simulated: the placements that belong to each mode."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from muxserve.config import AUTO, Fleet, load_fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.fleets import cluster_of, demands_of, memory_of
from muxserve.planning.planfile import load_plan
from muxserve.simulator import FleetModel
from placement.cluster import Cluster, Placement
from placement.demand import Demand
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.planner import MODES, PlanOptions, plan_cluster
from placement.words import enumerate_words


class PlacesError(ValueError):
    """The fleet cannot be placed so; the message says why."""


@dataclass
class Places:
    """The fleet's models, and placements by kind (a mode's `placement`): the given one, or planned when asked for.
    `note` is for the user; it may be empty."""

    about: str
    demands: list[Demand]
    models: dict[str, FleetModel]
    latency: LatencyModel
    cluster: Cluster | None
    given: dict[str, Placement] = field(default_factory=dict)
    note: str = ""

    def placement(self, kind: str, seconds: float, told: Callable[[str], None]) -> Placement:
        """The placement of that kind; planned within about `seconds` if it is not there.

        Raises:
            PlacesError: some model has no place.
        """
        found = self.given.get(kind)
        if found is not None:
            return found
        mode = next(name for name in MODES if name == kind)
        assert self.cluster is not None
        until = time.monotonic() + seconds
        objective = "slo" if any(d.slo_ttft or d.slo_tpot for d in self.demands) else "throughput"
        made = plan_cluster(
            self.demands,
            self.cluster,
            self.latency,
            memory_of(self.cluster),
            PlanOptions(
                objective=Objective("slo" if objective == "slo" else "throughput"),
                mode=mode,
                rules=MemoryRules.served(),
            ),
            lambda: time.monotonic() >= until,
            lambda text: told(f"placing for {kind}: {text}"),
        )
        if made.missing:
            why = "; ".join(f"{name}: {reason}" for name, reason in made.missing.items())
            raise PlacesError(f"not every model has a place with {kind} placement. {why}")
        self.given[kind] = made.placement
        return made.placement


def places_of(
    file: Path, gpus: int | None, gpu_type: str | None, nodes: str | None, plan: Path | None, latency: LatencyModel
) -> Places:
    """Read the fleet and what it is to run on: a plan file, the GPUs of the fleet file or of the command line, or the
    CPU of this machine.

    Raises:
        FleetError: the fleet or plan file is wrong.
        ClusterError: the GPUs given make no sense.
        CostError: the costs of a model are not known.
        PlacesError: as `Places.placement`.
    """
    fleet = load_fleet(file, serving=False)
    given = load_plan(plan, fleet) if plan is not None else None
    places = _places(fleet, file, gpus, gpu_type, nodes, given, latency)
    return replace(places, note=_note(fleet, given))


def _note(fleet: Fleet, given: Placement | None) -> str:
    """What is not simulated as it would be served."""
    others = [model.name for model in fleet.models if model.phases not in ("multiplexed", AUTO)]
    if given is not None:
        others = [each.model for unit in given.units if unit.phases != "multiplexed" for each in unit.models]
    if not others:
        return ""
    names = enumerate_words(list(dict.fromkeys(others)))
    return (
        f"all models are simulated as multiplexed, also {names}; `muxserve plan --compare-phases` simulates other "
        "arrangements"
    )


def _places(
    fleet: Fleet,
    file: Path,
    gpus: int | None,
    gpu_type: str | None,
    nodes: str | None,
    given: Placement | None,
    latency: LatencyModel,
) -> Places:
    if given is not None:
        if gpus is not None or gpu_type is not None or nodes is not None:
            raise PlacesError("--plan says which GPUs there are; it does not go with --gpus, --gpu-type or --nodes")
        cluster: Cluster | None = None if _on_cpu(given) else given.cluster
    else:
        cluster = cluster_of(fleet, gpus, gpu_type, nodes)
    if cluster is None:
        return _machine(file, given, latency)
    demands = demands_of(fleet, file.parent)
    kinds = ", ".join(f"{n.count} {n.device}" for n in cluster.nodes[:4]) + (", ..." if len(cluster.nodes) > 4 else "")
    places = Places(f"{cluster.devices} GPUs ({kinds})", demands, _models(demands, {}), latency, cluster)
    if given is not None:
        places.given["muxserve"] = given
    return places


def _on_cpu(placement: Placement) -> bool:
    return all(unit.device == "CPU" for unit in placement.units)


def _machine(file: Path, given: Placement | None, latency: LatencyModel) -> Places:
    """The one machine: all modes have its cores and its pool."""
    from muxserve.cluster.machine import this_machine
    from muxserve.cluster.plan import plan_fleet
    from muxserve.planning.cpu import plan_machine

    fleet = load_fleet(file)
    planned = plan_fleet(fleet.multiplexed(), this_machine())
    demands = demands_of(fleet, file.parent, gpu=False)
    demands = [replace(demand, dtype=model.dtype) for demand, model in zip(demands, planned.unit.models, strict=True)]
    if given is None:
        try:
            given = plan_machine(planned, demands, latency, Objective()).placement
        except ValueError as error:
            raise PlacesError(str(error)) from None
    lengths = {model.name: model.max_len for model in planned.unit.models}
    places = Places(f"{planned.unit.cores} cores of this machine", demands, _models(demands, lengths), latency, None)
    places.given = {"muxserve": given, "spatial": given, "temporal": given}
    return places


def _models(demands: list[Demand], lengths: dict[str, int]) -> dict[str, FleetModel]:
    return {
        d.name: FleetModel(
            d.name, d.architecture, d.dtype, d.max_num_seqs, d.max_num_batched_tokens, lengths.get(d.name)
        )
        for d in demands
    }
