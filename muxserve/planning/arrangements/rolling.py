"""One engine of both phases per replica, which does one at a time; prefill rolls over the replicas (EcoServe)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from muxserve.config import Fleet
from muxserve.metrics.definitions import percentile
from muxserve.metrics.tables import seconds_words
from muxserve.planning.arrangements.base import (
    Arrangement,
    GpuDevices,
    NoPlaceError,
    ReplicaLayout,
    SimulatedLayout,
    Wanted,
    one_engine,
    single_stage,
)
from muxserve.rolling.member import LatencyTargets
from muxserve.simulator import RingRules, UnitResult
from muxserve.spec import PolicyName


class RollingArrangement(Arrangement):
    """See the module."""

    name = "rolling"
    needs_objectives = True

    def policy(self, fleet: Fleet) -> PolicyName:
        """See `Arrangement`."""
        return self.name

    def check_pool(self, wanted: Wanted, most: int, devices: int | None, one: str) -> None:
        """See `Arrangement`."""
        if most >= 2:
            return
        if wanted.replicas == 1:
            one = "the fleet file has one; give `replicas: 2` or more"
            raise NoPlaceError(f"prefill rolls over replicas, and {one}")
        raise NoPlaceError(f"prefill rolls over replicas, and there is {one}")

    def allows(self, layout: ReplicaLayout, wanted: Wanted) -> bool:
        """See `Arrangement`."""
        return super().allows(layout, wanted) and layout.replicas >= 2

    def on_gpus(self, pool: GpuDevices, wanted: Wanted, layout: ReplicaLayout) -> SimulatedLayout:
        """See `Arrangement`."""
        return single_stage(pool, wanted, layout, one_engine(pool.rules))

    def ring(self, wanted: Wanted) -> RingRules:
        """See `Arrangement`."""
        demand = wanted.demand
        if demand.slo_ttft is None or demand.slo_tpot is None:
            raise NoPlaceError(f"{demand.name} is rolling, which needs slo.ttft_ms and slo.tpot_ms")
        objectives = LatencyTargets(demand.slo_ttft, demand.slo_tpot, wanted.spared)
        return RingRules(objectives, wanted.bounds, expected_output=demand.output_tokens, max_tokens_told=True)

    def report(self, unit: UnitResult) -> dict[str, object]:
        """See `Arrangement`."""
        return {"switch_wait": _spread(unit.waits)}

    def report_words(self, model: str, units: Sequence[UnitResult]) -> str:
        """See `Arrangement`."""
        spread = _spread([wait for unit in units for wait in unit.waits])
        words = "no request was answered"
        if spread is not None:
            mean, last = (seconds_words(spread[name]) for name in ("mean", "p99"))
            words = f"after its first token a request waits {mean} (p99 {last}) for the phase switch, not in TTFT"
        return f"{model} is rolling over {len(units)} replica{'s' if len(units) > 1 else ''}; {words}"


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    percentiles = {f"p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
    return {"mean": statistics.fmean(values), **percentiles}
