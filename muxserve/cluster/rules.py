"""From a fleet file to the rules by which replicas are started, stopped, chosen and relieved."""

from __future__ import annotations

from itertools import takewhile

from muxserve.cluster.arrangement import phases_of
from muxserve.cluster.plan import FleetPlan
from muxserve.config import AUTO, Fleet
from muxserve.costs.devices import device
from muxserve.costs.latency import EngineCosts, EngineShape, LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.gpu.nvml import device_name
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import Level
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.rules import RollingRules
from muxserve.spec import WatchdogRules


def scaling_of(fleet: Fleet) -> dict[str, ScalingRules]:
    """Rules by model, of those whose number of replicas changes by itself."""
    return {
        model.name: ScalingRules(
            minimum=r.min,
            maximum=r.max,
            low=r.low,
            high=r.high,
            hold=r.hold,
            idle_seconds=r.idle,
            wake_limit=r.wake,
        )
        for model in fleet.models
        if (r := model.replicas).scales
    }


def migration_of(fleet: Fleet) -> MigrationRules | None:
    """By which running requests move; None: they stay where they are."""
    given = fleet.migration
    if given is None:
        return None
    return MigrationRules(given.source_below, given.destination_above, given.in_flight)


def watchdog_of(fleet: Fleet) -> WatchdogRules | None:
    """When a silent process is suspect, and when it hangs; None: nobody looks."""
    given = fleet.watchdog
    return None if given is None else WatchdogRules(given.suspect, given.hung)


def levels_of(fleet: Fleet) -> tuple[Level, ...]:
    """The priority levels, from the highest."""
    levels = [Level(name, level.rank, level.target_load) for name, level in fleet.priorities.items()]
    return tuple(sorted(levels, key=lambda level: -level.rank))


CPU = "CPU"
# Stands for a GPU of which nothing is known. What is observed corrects predictions within some prefills.
UNKNOWN_GPU = "A100-80GB"
# Predicted lengths, in tokens: 1, then these and so on, four times as long each.
_FIRST, _FACTOR = 16, 4


def rolling_of(plan: FleetPlan, latency: LatencyModel | None = None) -> RollingRules | None:
    """The rules of a unit whose model is rolling; None for other units.

    Args:
        latency: where predictions come from; the roofline by default.

    Raises:
        muxserve.costs.latency.CostError: it knows nothing of the model.
    """
    (model, *_) = plan.fleet.models
    if phases_of(model) != "rolling":
        return None
    ttft, tpot = model.slo.ttft_ms, model.slo.tpot_ms
    assert ttft is not None, "the fleet file is refused without"
    assert tpot is not None, "the fleet file is refused without"
    costs = (latency or Roofline()).engine(plan.demands[0].architecture, _shape(plan))
    longest = plan.unit.models[0].max_len
    lengths = [1, *takewhile(lambda n: n < longest, (_FIRST * _FACTOR**n for n in range(32))), longest]
    step = model.max_num_batched_tokens
    return RollingRules(
        ttft=ttft / 1000,
        tpot=tpot / 1000,
        prefill=tuple((length, prefill_seconds(costs, length, step)) for length in lengths),
        spared=model.rolling.quantile,
        lower=model.rolling.lower,
        upper=model.rolling.upper,
    )


def prefill_seconds(costs: EngineCosts, tokens: int, step: int) -> float:
    """Seconds of one prompt of `tokens`, computed in chunks of `step` tokens."""
    seconds = 0.0
    for done in range(0, tokens, step):
        chunk = min(step, tokens - done)
        seconds += costs.prefill(chunk, chunk * done + chunk * (chunk + 1) // 2, 1)
    return seconds


def _shape(plan: FleetPlan) -> EngineShape:
    demand, unit = plan.demands[0], plan.unit.models[0]
    if plan.gpu is not None:
        kind = device_name(plan.gpu.gpus[0]) or UNKNOWN_GPU
        return EngineShape(kind, demand.tensor_parallel, 1.0, demand.resolved_dtype)
    # What an engine's threads get where those of all units compute at the same time.
    cores = (plan.fleet.cluster.cores if plan.fleet.cluster.cores != AUTO else plan.machine.cores) / plan.units
    # The figures of a CPU are those of a whole one with so many cores.
    share = min(1.0, min(unit.threads * demand.ranks, cores) / device(CPU).cores)
    return EngineShape(CPU, 1, share, demand.resolved_dtype)
