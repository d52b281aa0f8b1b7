"""A fleet on GPUs as Prism serves it (arXiv:2505.04021), for the simulator: models that need not all be awake, on units
that may have each of them, with weights and KV in one memory.

What is its own here is which units there are and what a wake takes; what is decided while they serve is
`scheduling.residency` (who is awake) and `scheduling.kv_pressure` (where).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from muxserve.config import Fleet
from muxserve.costs.calibration import host_bandwidth
from muxserve.costs.devices import device
from muxserve.planning.arrangements.base import fleet_model
from muxserve.planning.prediction import Simulated
from muxserve.scheduling.residency import ResidencyRules, WakeCosts
from muxserve.simulator import SimResidency
from placement.cluster import Cluster, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from placement.memory import MemoryRules, model_bytes

# A model is split over as few GPUs as leave this part of their memory to KV and to other models.
SHARED_PART = 0.4
# What is kept free for caches to grow into while models are woken.
GROWTH_PART = 0.05
# What a wake takes besides its weights, seconds: measured on a CPU (docs/residency.md), where it has no CUDA context to
# make and no graphs to capture.
WAKE_SECONDS = 0.5
# A first token within this time where a model has no objective.
TTFT_SECONDS = 5.0
# And a token in this time after the one before.
TPOT_SECONDS = 0.1


class NoUnitError(ValueError):
    """A model is too large for the machines; the message says so."""


def residency_on(
    unit: PlacedUnit,
    demands: Iterable[Demand],
    rules: MemoryRules,
    wake_seconds: float = WAKE_SECONDS,
) -> SimResidency:
    """By what the models of a unit are awake; its pools have all of its memory."""
    whole, tp = unit.kv_bytes, len(unit.devices)
    bandwidth = host_bandwidth(unit.device)
    costs = {
        each.name: WakeCosts(
            bytes=model_bytes(each, tp, rules),
            # Each GPU has a link of its own.
            seconds=wake_seconds + each.architecture.weight_bytes(each.dtype) / tp / bandwidth,
            ttft=TTFT_SECONDS if each.slo_ttft is None else each.slo_ttft,
            tpot=TPOT_SECONDS if each.slo_tpot is None else each.slo_tpot,
        )
        for each in demands
    }
    # Half a second, and twice what waking takes: copying weights takes a third of the time at most.
    within = ResidencyRules(whole, min_residence=0.5, residence_factor=2.0, fixed=int(GROWTH_PART * whole))
    return SimResidency(within, costs, elastic=True, swap=bandwidth, start_seconds=wake_seconds)


def elastic_placement(demands: Sequence[Demand], cluster: Cluster, rules: MemoryRules) -> Placement:
    """Units that may have every model that is split as they are. Models are split over as few GPUs as `SHARED_PART`
    says; GPUs are divided among the ways to split by the bytes of their models' weights, one unit of each at least.

    Raises:
        NoUnitError: a model is too large, or there are too few GPUs for a unit of each way to split.
    """
    names = {node.device for node in cluster.nodes}
    if len(names) > 1:
        raise NoUnitError(f"models that sleep and move need GPUs of one type, not {', '.join(sorted(names))}")
    (name,) = names
    most = max(node.count for node in cluster.nodes)
    whole = int(device(name).memory_bytes * rules.utilisation)
    by_tp: dict[int, list[Demand]] = {}
    for each in demands:
        by_tp.setdefault(split(each, whole, most, rules), []).append(each)
    units = _counts(by_tp, cluster.devices)
    # The largest units first, so that each lies within a machine.
    made: list[PlacedUnit] = []
    first = 0
    for tp in sorted(units, reverse=True):
        for _ in range(units[tp]):
            placed = tuple(PlacedModel(each.name, each.rate, 0.5, 0.5) for each in by_tp[tp])
            made.append(PlacedUnit(f"unit{len(made)}", name, tuple(range(first, first + tp)), placed, whole))
            first += tp
    return Placement(cluster, tuple(made))


def elastic_fleet(fleet: Fleet, demands: Sequence[Demand], cluster: Cluster, rules: MemoryRules) -> Simulated:
    """The fleet's models in such units, under its policy.

    Raises:
        NoUnitError: as `elastic_placement`.
    """
    placement = elastic_placement(demands, cluster, rules)
    placement = replace(placement, units=tuple(replace(unit, policy=fleet.policy) for unit in placement.units))
    by_name = {demand.name: demand for demand in demands}
    elastic = {
        unit.name: residency_on(unit, [by_name[placed.model] for placed in unit.models], rules)
        for unit in placement.units
    }
    models = {demand.name: fleet_model(demand) for demand in demands}
    origin = "units that may have every model that is split as they are"
    return Simulated(placement, models, elastic=elastic, origin=origin)


def split(demand: Demand, whole: int, most: int, rules: MemoryRules) -> int:
    """Over how many GPUs, with `whole` bytes each, the model is split: as few as leave `SHARED_PART` of them.

    Raises:
        NoUnitError: `most` are too few.
    """
    tp = 1
    while tp <= most:
        if model_bytes(demand, tp, rules) <= (1.0 - SHARED_PART) * whole and demand.architecture.heads % tp == 0:
            return tp
        tp *= 2
    raise NoUnitError(f"{demand.name} is too large for {most} GPUs of a machine")


def _counts(by_tp: Mapping[int, Sequence[Demand]], gpus: int) -> dict[int, int]:
    """Units of each size, so that all have about as many bytes of weights for a GPU.

    Raises:
        NoUnitError: there are too few GPUs for one of each.
    """
    weights = {tp: sum(each.architecture.weight_bytes(each.dtype) for each in models) for tp, models in by_tp.items()}
    units = dict.fromkeys(by_tp, 1)
    left = gpus - sum(by_tp)
    if left < 0:
        raise NoUnitError(f"a unit of each size that models need takes {sum(by_tp)} GPUs, and there are {gpus}")
    # Each next one where the most weights are for a GPU.
    while fitting := [tp for tp in units if tp <= left]:
        tp = max(fitting, key=lambda each: (weights[each] / (each * units[each]), each))
        units[tp] += 1
        left -= tp
    return units
