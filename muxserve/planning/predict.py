"""What a placement will deliver: a simulation of it under generated load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from muxserve.costs.latency import LatencyModel
from muxserve.metrics.definitions import Objectives
from muxserve.metrics.summary import Summary, summarise
from muxserve.planning.phases_units import Simulated, fleet_models
from muxserve.simulator import mode_of, simulate
from muxserve.workload import Lengths, LogNormalLengths, ModelLoad, generate
from muxserve.workload.lengths import FixedLength
from placement.cluster import Placement
from placement.demand import Demand
from placement.planner import ClusterPlan, ModeName

SIGMA = 0.8  # of the log-normal lengths: a long tail, as in chats
_TAIL = 8  # times the mean: the longest that are drawn


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulation of `seconds` of load. `sustained` are requests per second that each model completed in the second
    half of that time: neither the empty fleet at the start nor the last, longest answers count."""

    summary: Summary
    seconds: float
    sustained: dict[str, float]

    @property
    def throughput(self) -> float:
        """Requests per second that all models completed in the second half."""
        return sum(self.sustained.values())


def falls_short(plan: ClusterPlan, simulated: Prediction) -> list[str]:
    """Models that in simulation meet their objectives less often than the plan's objective asks."""
    figures = simulated.summary.models
    return [
        demand.name
        for demand in plan.demands
        if demand.name in figures and figures[demand.name].slo.get("all", 1.0) < plan.objective.attainment
    ]


def predict(
    placement: Placement,
    demands: Sequence[Demand],
    latency: LatencyModel,
    seconds: float,
    seed: int = 0,
    mode: ModeName = "muxserve",
    max_len: Mapping[str, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    simulated: Simulated | None = None,
) -> Prediction:
    """Simulate `seconds` of Poisson arrivals at the demands' rates on the placement, with log-normal lengths of the
    demands' means, and sum up.

    `max_len` caps sequences, prompt and output, by model (the architecture's own length otherwise). `simulated` is what
    is simulated of the placement, where it has other units than multiplexed ones, or replicas work together by rules of
    the fleet's.

    Raises:
        SimulationError: a unit cannot run.
        CostError: the latency model does not know a model.
    """
    played = simulated or Simulated(placement, {})
    lengths_of = {**(max_len or {}), **played.longest}
    longest = {d.name: lengths_of.get(d.name, d.architecture.max_len) for d in demands}
    loads = {
        d.name: ModelLoad(
            d.rate,
            lengths(d.prompt_tokens, longest[d.name] // 2),
            lengths(d.output_tokens, longest[d.name] - longest[d.name] // 2),
        )
        for d in demands
    }
    played = replace(played, models=fleet_models(demands, longest))
    # Memory-greedy placements are served as MuxServe's own are.
    how = mode_of("muxserve" if mode == "memory" else mode)
    workload = generate(loads, seconds, seed)
    result = simulate(played.units(how), workload, latency, rules=played.rules_of(how), progress=progress)
    summary = summarise(
        result.records,
        rates={d.name: d.rate for d in demands},
        objectives={d.name: Objectives(d.slo_ttft, d.slo_tpot) for d in demands},
    )
    finished = Counter(
        r.model for r in result.records if r.ok and r.finish is not None and seconds / 2 <= r.finish < seconds
    )
    return Prediction(summary, seconds, {d.name: finished[d.name] / (seconds / 2) for d in demands})


def lengths(mean: int, longest: int) -> Lengths:
    """Log-normal lengths of that mean with a long tail, of at most `longest` tokens."""
    high = min(_TAIL * mean, max(1, longest))
    median = mean / math.exp(SIGMA * SIGMA / 2)
    if median < 1 or median > high:
        return FixedLength(max(1, min(mean, high)))
    return LogNormalLengths(median, SIGMA, 1, high)
