"""What a simulation tells of models that are rolling or pipelined, and of replicas that work together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from muxserve.metrics.definitions import percentile
from muxserve.metrics.tables import seconds_words
from muxserve.simulator import FleetResult, UnitResult
from placement.format import enumerate_words


def phases_figures(unit: UnitResult) -> dict[str, object]:
    """Further keys of a unit in the report (docs/simulator.md). Times are seconds."""
    if unit.phases == "rolling":
        return {"switch_wait": _spread(unit.waits)}
    if unit.phases == "multiplexed":
        return {}
    stages = zip(unit.stages, _bubbles(unit), strict=True)
    return {"stages": [{"busy_seconds": busy, "bubbles": part} for busy, part in stages]}


def phases_words(result: FleetResult) -> Iterator[str]:
    """A sentence for each of these models."""
    units: dict[str, list[UnitResult]] = {}
    for unit in result.units:
        if unit.phases != "multiplexed":
            units.setdefault(unit.models[0], []).append(unit)
    for model, mine in units.items():
        replicas = f"{len(mine)} replica{'s' if len(mine) > 1 else ''}"
        if mine[0].phases == "rolling":
            waits = [wait for unit in mine for wait in unit.waits]
            spread = _spread(waits)
            words = "no request was answered"
            if spread is not None:
                mean, last = (seconds_words(spread[name]) for name in ("mean", "p99"))
                words = f"after its first token a request waits {mean} (p99 {last}) for the phase switch, not in TTFT"
            yield f"{model} is rolling over {replicas}; {words}"
            continue
        parts = [f"{statistics.fmean(each):.0%}" for each in zip(*(_bubbles(unit) for unit in mine), strict=True)]
        yield f"{model} is pipelined, {replicas} of {len(parts)} stages with {enumerate_words(parts)} bubbles"


def replicas_words(result: FleetResult) -> Iterator[str]:
    """A sentence for each model whose requests moved, or whose replicas came or went."""
    for each in result.replicas:
        found = []
        if each.counts[1:]:
            found.append(f"up to {each.peak} replicas, {each.average:.1f} on average")
        if each.downtime is not None:
            paused = seconds_words(each.downtime)
            found.append(f"{each.migrations} moves of requests, each in no batch for {paused} on average")
        if found:
            yield f"{each.model}: {'; '.join(found)}"


def _bubbles(unit: UnitResult) -> list[float]:
    """Of each stage, the part of the time with something in flight in which it does nothing."""
    return [1.0 - busy / unit.active if unit.active else 0.0 for busy in unit.stages]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    percentiles = {f"p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
    return {"mean": statistics.fmean(values), **percentiles}
