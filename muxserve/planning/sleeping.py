"""How many GPUs a fleet needs if its models may sleep. One workload is simulated for each number of GPUs twice: with
all models awake, as planned, and with models that sleep, move between units and take turns (`elastic`).

Live fleets on GPUs have all models awake, so this says what is to be gained, not what `muxserve deploy` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muxserve.config import Fleet
from muxserve.costs.latency import LatencyModel
from muxserve.metrics.definitions import Objectives
from muxserve.metrics.summary import Summary, summarise
from muxserve.planning.elastic import TTFT_SECONDS, elastic_fleet
from muxserve.planning.prediction import Simulated
from muxserve.planning.simulations import Simulations
from muxserve.simulator import ControlDelays, Options, ResidencyResult, mode_of, simulate
from muxserve.workload.trace import TraceRequest
from placement.cluster import Cluster
from placement.demand import Demand
from placement.memory import MemoryRules

_SLEEPING = "aegaeon"

# How far it is: which way, requests done, and all of them.
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the workload on some GPUs. Requests of models `without_place` count as not within their objectives.
    `residency` adds up all units, where models sleep."""

    summary: Summary
    without_place: tuple[str, ...] = ()
    residency: ResidencyResult | None = None

    @property
    def within(self) -> float:
        """The part of all requests within their objectives."""
        return self.summary.overall.slo["all"]


@dataclass(frozen=True, slots=True)
class SleepingPoint:
    """One number of GPUs. `resident` is None if models that sleep cannot be served there, for the reason `why_not`."""

    gpus: int
    awake: Outcome
    resident: Outcome | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class SleepingForecast:
    """The workload, called `about`, on several numbers of GPUs; `attainment` is the part of all requests that is to be
    within their objectives."""

    about: str
    attainment: float
    points: tuple[SleepingPoint, ...]

    @property
    def awake_gpus(self) -> int | None:
        """The fewest that are enough with all models awake."""
        return self._fewest(lambda point: point.awake)

    @property
    def resident_gpus(self) -> int | None:
        """The fewest that are enough with models that sleep."""
        return self._fewest(lambda point: point.resident)

    def _fewest(self, of: Callable[[SleepingPoint], Outcome | None]) -> int | None:
        outcomes = ((point.gpus, of(point)) for point in self.points)
        enough = (n for n, o in outcomes if o is not None and not o.without_place and o.within >= self.attainment)
        return min(enough, default=None)


def objectives_of(demands: Sequence[Demand]) -> dict[str, Objectives]:
    """What requests are held to. A model without objectives has a first token within `TTFT_SECONDS`, for which it is
    woken."""
    return {
        each.name: Objectives(TTFT_SECONDS if each.slo_ttft is each.slo_tpot is None else each.slo_ttft, each.slo_tpot)
        for each in demands
    }


def all_awake(
    planned: Simulated,
    demands: Sequence[Demand],
    requests: Sequence[TraceRequest],
    simulations: Simulations,
    tell: Tell,
) -> Outcome:
    """The workload on a plan.

    Raises:
        SimulationError, CostError: as `simulate`.
    """
    how = mode_of("muxserve")
    units, rules = planned.units(how), planned.rules_of(how)
    placed = {model.name for unit in units for model in unit.models}
    records = simulations.records(units, requests, rules, lambda done, total: tell("all awake", done, total))
    summary = summarise(records, objectives=objectives_of(demands))
    return Outcome(summary, tuple(each.name for each in demands if each.name not in placed))


def with_residency(
    fleet: Fleet,
    demands: Sequence[Demand],
    cluster: Cluster,
    requests: Sequence[TraceRequest],
    latency: LatencyModel,
    tell: Tell,
) -> Outcome:
    """The workload on units that may have every model.

    Raises:
        NoUnitError: as `elastic_fleet`.
        SimulationError, CostError: as `simulate`.
    """
    how = mode_of(_SLEEPING)
    made = elastic_fleet(fleet, demands, cluster, MemoryRules.served(fleet.cluster.gpu_memory))
    result = simulate(
        made.units(how),
        requests,
        latency,
        Options(ControlDelays.live(), sample_seconds=0.0),
        made.rules_of(how),
        progress=lambda done, total: tell("with residency", done, total),
    )
    found = [unit.residency for unit in result.units if unit.residency is not None]
    whole = ResidencyResult(
        wakes=sum(each.wakes for each in found),
        sleeps=sum(each.sleeps for each in found),
        waited=sum(each.waited for each in found),
        peak_bytes=max(each.peak_bytes for each in found),
        switches=sum(each.switches for each in found),
    )
    return Outcome(summarise(result.records, objectives=objectives_of(demands)), residency=whole)
