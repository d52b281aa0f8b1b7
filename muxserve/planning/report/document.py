"""Sweeps over numbers of GPUs, and the JSON of `muxserve plan --json`, whose keys are only added; what changes meaning
gets another version."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muxserve.metrics.summary import Summary
from muxserve.planning.candidates.ways import WAYS
from muxserve.planning.place.contest import Rival, why
from muxserve.planning.place.prediction import Prediction, ResidencyForecast, falls_short
from muxserve.planning.place.sleeping import Outcome, SleepingForecast
from muxserve.planning.place.window import ANSWERS, longest_of
from muxserve.planning.report.basis import Basis
from muxserve.simulator import ResidencyResult
from placement.cluster import PlacedUnit
from placement.estimator import ModelEstimate, UnitEstimate
from placement.format import enumerate_words
from placement.planner import ClusterPlan, limits_in_words

VERSION = 3
_SWEEP = re.compile(r"gpus=(\d+)\.\.(\d+)(?::(\d+))?")
_POINTS = 15


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One size of the cluster: its plan, and the simulation of it, if there is one."""

    plan: ClusterPlan
    prediction: Prediction | None = None

    @property
    def gpus(self) -> int:
        """How many there are."""
        return self.plan.placement.cluster.devices

    @property
    def simulated(self) -> float | None:
        """The part of the requests within their objectives in simulation, if there are any."""
        return self.prediction.summary.overall.slo.get("all") if self.prediction else None

    @property
    def short(self) -> list[str]:
        """Models that meet their objectives too rarely in simulation."""
        return falls_short(self.plan, self.prediction) if self.prediction else []

    @property
    def enough(self) -> bool:
        """The rates and objectives are met, and no simulation says otherwise."""
        return self.plan.meets and not self.short


def needed(points: Sequence[SweepPoint]) -> int | None:
    """The fewest GPUs of a sweep with which the rates and objectives are met."""
    return min((p.gpus for p in points if p.enough), default=None)


def warnings_of(plan: ClusterPlan, simulated: Prediction | None, points: Sequence[SweepPoint] = ()) -> list[str]:
    """What whoever trusts the plan, or the sweep that it is from, must know, a sentence each."""
    found = [
        f"{p.gpus} GPU{'' if p.gpus == 1 else 's'} would be enough by the estimate, but in its simulation "
        f"{p.simulated:.1%} of the requests are within their objectives, too few of {enumerate_words(p.short)}"
        for p in points
        if p.plan.meets and p.short and p.simulated is not None and p.gpus != plan.placement.cluster.devices
    ]
    short = falls_short(plan, simulated) if simulated is not None and plan.meets else []
    if short:
        found.append(
            f"the simulation does not bear that out for {', '.join(short)}: the estimate is too close to what the "
            "devices can do; plan for more of them or lower rates"
        )
    if simulated is None and plan.meets:
        found.append("that the rates and objectives are met is an estimate, which was not simulated")
    if simulated is not None and not simulated.is_long_enough:
        found.append(_too_short(simulated))
    return found


def _too_short(simulated: Prediction) -> str:
    """Why a simulation does not show how many requests are served per second, and what to do."""
    short = {name: window for name, window in simulated.windows.items() if not window.is_long_enough}
    longest = longest_of([window.longest for window in short.values()])
    seconds = min((window.seconds for window in short.values()), default=simulated.seconds)
    if longest is None and len(short) == len(simulated.windows):
        return f"in the simulated {seconds:.3g} s no request was answered, so nothing was measured"
    if longest is None:
        return f"in the simulated {seconds:.3g} s no request of {', '.join(short)} was answered"
    least = math.ceil(ANSWERS * longest)
    return (
        f"the simulated {seconds:.3g} s do not hold {ANSWERS:.0f} of the longest answers, which take "
        f"{longest:.3g} s: requests per second were not measured, and ways to serve that differ only "
        f"in these were not compared; --simulate {least} is long enough"
    )


def parse_sweep(text: str) -> list[int]:
    """`gpus=8..64` or, with a step, `gpus=8..64:8` as numbers of GPUs. Without a step there are at most 15.

    Raises:
        ValueError: it is something else.
    """
    match = _SWEEP.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a sweep such as gpus=8..64, or gpus=8..64:8 with a step")
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last:
        raise ValueError(f"a sweep goes from at least 1 GPU upwards, not from {first} to {last}")
    step = int(match[3]) if match[3] else _step(last - first)
    if step < 1:
        raise ValueError("the step of a sweep must be at least 1")
    numbers = list(range(first, last + 1, step))
    if numbers[-1] != last:
        numbers.append(last)
    if len(numbers) > 200:
        raise ValueError(
            f"{len(numbers)} plans are too many; give a larger step, e.g. gpus={first}..{last}:{step * 10}"
        )
    return numbers


def _step(span: int) -> int:
    """The smallest power of two with which there are not too many points."""
    least = span / (_POINTS - 1)
    return 1 if least <= 1 else 2 ** math.ceil(math.log2(least))


def residency_document(forecast: ResidencyForecast) -> dict[str, Any]:
    """What it costs that not all models are awake, as plain data."""

    return {
        "workload": forecast.about,
        "all_awake": {"bytes": forecast.awake_bytes, **_first_tokens(forecast.awake.summary)},
        "with_residency": {
            "bytes": forecast.limit,
            **_first_tokens(forecast.resident.summary),
            **_wakes(forecast.resident.residency),
        },
    }


def _first_tokens(summary: Summary) -> dict[str, Any]:
    overall = summary.overall
    ttft = overall.ttft
    times = None if ttft is None else {"mean": ttft.mean, "p50": ttft.p50, "p99": ttft.p99}
    return {"requests": overall.requests, "ttft": times, "slo": overall.slo.get("all")}


def _wakes(told: ResidencyResult | None) -> dict[str, int]:
    return {} if told is None else {"wakes": told.wakes, "sleeps": told.sleeps, "waited": told.waited}


def sleeping_document(forecast: SleepingForecast) -> dict[str, Any]:
    """What models that sleep would bring on GPUs, as plain data."""

    def resident(found: Outcome | None, why_not: str) -> dict[str, Any]:
        if found is None or found.residency is None:
            return {"why_not": why_not}
        return {**_first_tokens(found.summary), **_wakes(found.residency), "turns": found.residency.switches}

    return {
        "workload": forecast.about,
        "attainment": forecast.attainment,
        "gpus_needed": {
            "all_awake": forecast.awake_gpus,
            "with_memory": forecast.asleep_gpus,
        },
        "sizes": [
            {
                "gpus": each.gpus,
                "all_awake": {**_first_tokens(each.awake.summary), "without_place": list(each.awake.without_place)},
                "with_memory": resident(each.asleep, each.why_not),
            }
            for each in forecast.points
        ],
    }


def document(
    plan: ClusterPlan,
    fleet: str,
    basis: Basis,
    seconds: float,
    simulated: Prediction | None = None,
    sweep: Sequence[SweepPoint] = (),
    rivals: Sequence[Rival] = (),
) -> dict[str, Any]:
    """A plan as plain data. Times are seconds, rates requests per second, sizes bytes on each device; None stands for
    what is not known or, as a TTFT, has no bound because the queue grows."""
    units = zip(plan.placement.units, plan.estimates, strict=True)
    return {
        "muxserve_plan": VERSION,
        "fleet": fleet,
        "costs": str(basis.costs),
        "cost_sources": basis.costs.as_list(),
        "objective": plan.objective.name,
        "attainment_target": plan.objective.attainment,
        "mode": plan.mode,
        "cluster": [{"device": node.device, "gpus": node.count} for node in plan.placement.cluster.nodes],
        "totals": {
            "rate": plan.asked,
            "throughput": plan.throughput,
            "weighted_throughput": plan.weighted_throughput,
            "attainment": plan.attainment,
            "devices": plan.placement.cluster.devices,
            "devices_used": plan.devices,
            "meets": plan.meets,
        },
        "units": [
            {
                "name": unit.name,
                "device": unit.device,
                "devices": list(unit.devices),
                "stages": unit.stages,
                **_unit(plan, unit, estimate, simulated, basis),
            }
            for unit, estimate in units
        ],
        "missing": dict(plan.missing),
        "notes": list(plan.placement.notes),
        "search": {
            "value": plan.search.value,
            "greedy_value": plan.search.greedy_value,
            "evaluations": plan.search.evaluations,
            "seconds": seconds,
        },
        "simulated": _simulated(simulated),
        "candidates": [
            {
                "way": rival.way,
                "alike": list(rival.alike),
                "about": WAYS[rival.way].about,
                "score": rival.score if rival.is_measured else None,
                "latency_mean": rival.latency if rival.is_served else None,
                "devices_used": rival.plan.devices,
                "workloads": dict(rival.kept),
                "mean": rival.mean,
                "why_not": why(rivals[0], rival) if number else "",
            }
            for number, rival in enumerate(rivals)
        ],
        "sweep": [
            {
                "gpus": p.gpus,
                "devices_used": p.plan.devices,
                "throughput": p.plan.throughput,
                "weighted_throughput": p.plan.weighted_throughput,
                "attainment": p.plan.attainment,
                "meets": p.plan.meets,
                "missing": list(p.plan.missing),
                "simulated_attainment": p.simulated,
                "falls_short": p.short,
            }
            for p in sweep
        ],
        "gpus_needed": needed(sweep) if sweep else None,
        "warnings": warnings_of(plan, simulated, sweep),
    }


def _unit(
    plan: ClusterPlan, unit: PlacedUnit, estimate: UnitEstimate, simulated: Prediction | None, basis: Basis
) -> dict[str, Any]:
    # Engines of both phases are simulated, not estimated: how busy their devices are with either is not known.
    known = unit.split
    return {
        "limit": limits_in_words(plan, estimate),
        "headroom": estimate.headroom,
        "throughput": estimate.throughput,
        "prefill_share": estimate.prefill_share,
        "prefill_load": estimate.load.prefill if known else None,
        "decode_load": estimate.load.decode if known else None,
        "memory": {
            "models": estimate.own_bytes,
            "pool": estimate.pool_bytes,
            "pool_used": estimate.kv_bytes,
        },
        "models": [
            {
                **_model(plan, unit, model, estimate.prefill_share, simulated),
                "bottleneck": basis.bottlenecks[unit.name, plan.demands[model.member.model].name],
            }
            for model in estimate.models
        ],
    }


def _model(
    plan: ClusterPlan, unit: PlacedUnit, model: ModelEstimate, prefill_share: float, simulated: Prediction | None
) -> dict[str, Any]:
    demand = plan.demands[model.member.model]
    return {
        "model": demand.name,
        "engines": unit.shape_of(demand.name),
        "replicas": model.member.replicas,
        "rate": model.rate,
        "throughput": model.throughput,
        "ttft": None if math.isinf(model.level.ttft) else model.level.ttft,
        "tpot": model.level.tpot,
        "attainment": model.level.attainment,
        "slo": {"ttft": demand.slo_ttft, "tpot": demand.slo_tpot},
        "batch": model.batch,
        "prefill_share": prefill_share,
        "decode_share": model.decode_share,
        "limit": model.limit,
        "memory": model.memory.own,
        "kv_used": model.memory.kv,
        "simulated": _figures(simulated, demand.name),
    }


def _figures(simulated: Prediction | None, name: str) -> dict[str, Any] | None:
    figures = simulated.summary.models.get(name) if simulated else None
    if figures is None or simulated is None:
        return None
    ttft = None if simulated.unbounded(name) else figures.ttft
    return {
        "requests": figures.requests,
        "throughput": simulated.sustained(name),
        "throughput_seconds": simulated.windows[name].seconds,
        "ttft_mean": ttft.mean if ttft else None,
        "ttft_p99": ttft.p99 if ttft else None,
        "tpot_mean": figures.tpot.mean if figures.tpot else None,
        "attainment": figures.slo.get("all"),
    }


def _simulated(simulated: Prediction | None) -> dict[str, Any] | None:
    if simulated is None:
        return None
    overall = simulated.summary.overall
    ttft = None if simulated.grows else overall.ttft
    return {
        "seconds": simulated.seconds,
        "requests": overall.requests,
        "throughput": simulated.throughput,
        "ttft_mean": ttft.mean if ttft else None,
        "ttft_p99": ttft.p99 if ttft else None,
        "tpot_mean": overall.tpot.mean if overall.tpot else None,
        "tpot_p99": overall.tpot.p99 if overall.tpot else None,
        "attainment": overall.slo.get("all"),
    }
