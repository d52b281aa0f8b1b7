"""What a workload looks like: how much comes, when, and how long it is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from muxserve.workload.trace import TraceRequest

_WINDOWS = 60


class LengthSummary(msgspec.Struct, frozen=True):
    """Token counts of prompts or outputs."""

    mean: float
    p50: float
    p80: float
    p95: float
    p99: float
    max: int


class WorkloadSummary(msgspec.Struct, frozen=True):
    """The workload of one model, or of all. `rate` is requests per second of the span (None: it has no length), `cv`
    the coefficient of variation of the gaps (1: Poisson), `peak` the busiest sixtieth of the span over the mean; both
    None below two requests."""

    requests: int
    rate: float | None
    cv: float | None
    peak: float | None
    prompt: LengthSummary
    output: LengthSummary


class Description(msgspec.Struct, frozen=True):
    """A workload of `seconds`; models by their requests, most first."""

    seconds: float
    overall: WorkloadSummary | None
    models: dict[str, WorkloadSummary]


def _counts() -> array[int]:
    return array("q")


def _times() -> array[float]:
    return array("d")


@dataclass(slots=True)
class _Kept:
    arrivals: array[float] = field(default_factory=_times)
    prompts: array[int] = field(default_factory=_counts)
    outputs: array[int] = field(default_factory=_counts)


def describe(requests: Iterable[TraceRequest], seconds: float = 0.0) -> Description:
    """The figures of `requests`, 24 bytes being kept of each. Without `seconds` the span ends with the last of them."""
    models: dict[str, _Kept] = {}
    overall = _Kept()
    for request in requests:
        for kept in (models.setdefault(request.model, _Kept()), overall):
            kept.arrivals.append(request.arrival)
            kept.prompts.append(request.prompt_tokens)
            kept.outputs.append(request.output_tokens)
    span = seconds or (overall.arrivals[-1] if overall.arrivals else 0.0)
    by_count = sorted(models, key=lambda name: (-len(models[name].arrivals), name))
    return Description(
        span,
        _part(overall, span) if overall.arrivals else None,
        {name: _part(models[name], span) for name in by_count},
    )


def _part(kept: _Kept, span: float) -> WorkloadSummary:
    arrivals = np.asarray(kept.arrivals)
    gaps = np.diff(arrivals)
    cv = peak = None
    if len(gaps) and gaps.mean() > 0:
        cv = float(gaps.std() / gaps.mean())
        windows = np.histogram(arrivals, _WINDOWS, (0.0, max(span, float(arrivals[-1]))))[0]
        peak = float(windows.max() / windows.mean())
    rate = len(arrivals) / span if span > 0 else None
    return WorkloadSummary(len(arrivals), rate, cv, peak, _lengths(kept.prompts), _lengths(kept.outputs))


def _lengths(values: array[int]) -> LengthSummary:
    counts = np.asarray(values)
    p50, p80, p95, p99 = np.quantile(counts, (0.5, 0.8, 0.95, 0.99)).tolist()
    return LengthSummary(float(counts.mean()), p50, p80, p95, p99, int(counts.max()))
