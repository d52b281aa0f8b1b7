"""From many request records to the figures that the papers report.

Records are taken one at a time and may be thrown away afterwards; what is kept is some forty bytes for each, so that
percentiles are exact. docs/metrics.md has every definition.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from muxserve.metrics.definitions import Objectives, Reference, time_per_token
from muxserve.metrics.records import RequestRecord

SLO_SCALES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
CURVE = tuple(share / 100 for share in range(101))


class Distribution(msgspec.Struct, frozen=True):
    """How `count` values in seconds are distributed. Percentiles are interpolated linearly between two values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all requests, or of one model's. Tokens and latencies are of completed requests; rates are per second
    of `seconds`, the span of the whole run, for one model as for all, and None where that is 0: nothing was measured
    then.

    `latency_per_token` is the latency divided by the output tokens. `slo` holds the share of all requests that met the
    models' objectives (ttft, tpot, all). `attainment` holds for each criterion (latency, ttft_tpot) the share of all
    requests within each of the summary's SLO scales times their reference, and `scale_for_99` the smallest scale that
    99 % of them keep, None where more than 1 % did not complete. A request that did not complete misses everything.
    `cached_tokens` of the prompts were in the prefix cache.
    """

    requests: int
    completed: int
    failed: int
    unfinished: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    seconds: float
    requests_per_second: float | None
    output_tokens_per_second: float | None
    total_tokens_per_second: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    latency: Distribution | None
    latency_per_token: Distribution | None
    slo: dict[str, float] = {}
    attainment: dict[str, list[float]] = {}
    scale_for_99: dict[str, float | None] = {}


class Timeline(msgspec.Struct, frozen=True):
    """The run in equal steps of `step` seconds: requests that arrived and completed in each, output tokens of those
    that completed, and requests under way at its end (failed ones are left out: when they ended is not known)."""

    start: float
    step: float
    arrived: list[int]
    completed: list[int]
    output_tokens: list[int]
    in_flight: list[int]


class Summary(msgspec.Struct, kw_only=True):
    """One run. `rates` are the weights of the weighted throughputs, requests per second of each model.

    `weighted_throughput` is MuxServe's aggregated throughput (arXiv:2404.02015, section 4.1): the models' completed
    requests per second of the whole span, averaged with the rates as weights. `weighted_throughput_own_span` is what
    its published measurements hold: each model's completed requests over the time from the start to the finish of *its
    own* last request, averaged in the same way. `curves` holds the values of ttft, tpot, latency and latency_per_token
    at each percent from 0 to 100. `extra` is for figures that only some sources have. Throughputs of a run that took no
    time are None.
    """

    overall: Figures
    models: dict[str, Figures]
    rates: dict[str, float]
    weighted_throughput: float | None
    weighted_throughput_own_span: float | None
    slo_scales: list[float] = []
    errors: dict[str, int] = {}
    curves: dict[str, list[float]] = {}
    timeline: Timeline | None = None
    extra: dict[str, object] = {}


__all__ = [
    "CURVE",
    "SLO_SCALES",
    "Distribution",
    "Figures",
    "ReferenceOf",
    "Summariser",
    "Summary",
    "Timeline",
    "summarise",
]

_BINS = 120
_ERRORS = 20
_Floats = npt.NDArray[np.float64]
ReferenceOf = Callable[[RequestRecord], Reference | float]


def _floats() -> array[float]:
    return array("d")


@dataclass(slots=True)
class _Tally:
    """What is kept of one model's requests."""

    requests: int = 0
    failed: int = 0
    unfinished: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    arrivals: array[float] = field(default_factory=_floats)  # of those that did not fail
    finishes: array[float] = field(default_factory=_floats)
    tokens: array[float] = field(default_factory=_floats)  # beside finishes
    ttft: array[float] = field(default_factory=_floats)
    tpot: array[float] = field(default_factory=_floats)
    latency: array[float] = field(default_factory=_floats)
    latency_ratio: array[float] = field(default_factory=_floats)
    ttft_tpot_ratio: array[float] = field(default_factory=_floats)
    slo_met: Counter[str] = field(default_factory=Counter)
    slo_asked: Counter[str] = field(default_factory=Counter)


class Summariser:
    """Collects records with `add`; `summary` may be asked at any time, also for what is under way.

    `reference` gives a request's latency alone (seconds, or a `Reference` with ttft and tpot as well) and turns on
    SLO attainment at `slo_scales`; `objectives` are the models' own.
    """

    def __init__(
        self,
        *,
        reference: ReferenceOf | None = None,
        objectives: Mapping[str, Objectives] | None = None,
        slo_scales: Sequence[float] = SLO_SCALES,
    ) -> None:
        self._reference = reference
        self._objectives = objectives or {}
        self._scales = list(slo_scales)
        self._tallies: dict[str, _Tally] = {}
        self._errors: Counter[str] = Counter()
        self._last_arrival = 0.0

    def add(self, record: RequestRecord) -> None:
        """Count one request; without `finish` and `error` it is unfinished.

        Raises:
            ValueError: the reference of a request is not positive.
        """
        tally = self._tallies.get(record.model)
        if tally is None:
            tally = self._tallies[record.model] = _Tally()
        # Simulators come with millions of these, so properties are spelled out.
        arrival, first, finish = record.arrival, record.first_token, record.finish
        tally.requests += 1
        tally.preemptions += record.preemptions
        if arrival > self._last_arrival:
            self._last_arrival = arrival
        if record.error:
            tally.failed += 1
            self._errors[record.error] += 1
        else:
            tally.arrivals.append(arrival)
            if finish is None:
                tally.unfinished += 1
            else:
                tokens = record.output_tokens
                tally.prompt_tokens += record.prompt_tokens
                tally.cached_tokens += record.cached_tokens
                tally.finishes.append(finish)
                tally.tokens.append(tokens)
                tally.latency.append(finish - arrival)
                if first is not None:
                    tally.ttft.append(first - arrival)
                    tpot = time_per_token(first, finish, tokens)
                    if tpot is not None:
                        tally.tpot.append(tpot)
        if self._objectives or self._reference is not None:
            self._judge(record, tally)

    def _judge(self, record: RequestRecord, tally: _Tally) -> None:
        objectives = self._objectives.get(record.model)
        if objectives is not None and objectives.names:
            tally.slo_asked.update(objectives.names)
            if record.ok and record.ttft is not None:
                met = objectives.met(record.ttft, record.tpot)
                tally.slo_met.update(name for name, good in met.items() if good)
        if self._reference is None:
            return
        given = self._reference(record)
        alone = given if isinstance(given, Reference) else Reference(given)
        if (
            not alone.latency > 0
            or (alone.ttft is not None and alone.ttft <= 0)
            or (alone.tpot is not None and alone.tpot <= 0)
        ):
            raise ValueError(f"the reference of a request to {record.model} must be positive, not {alone}")
        latency = record.latency if record.ok else None
        tally.latency_ratio.append(np.inf if latency is None else latency / alone.latency)
        if alone.ttft is not None and alone.tpot is not None:
            ratio = np.inf
            if record.ok and record.ttft is not None:
                ratio = max(record.ttft / alone.ttft, (record.tpot or 0.0) / alone.tpot)
            tally.ttft_tpot_ratio.append(ratio)

    def summary(
        self,
        *,
        start: float = 0.0,
        end: float | None = None,
        rates: Mapping[str, float] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> Summary:
        """The figures of all records so far. The run spans `start` to `end`, by default to the last completion.
        Without `rates` the weights are the numbers of requests. A model of `rates` without a request counts with a
        throughput of zero.

        Raises:
            ValueError: `end` lies before `start` or the last completion, or the rates do not name every model that had
                requests.
        """
        tallies = self._tallies
        if rates is not None and not tallies.keys() <= rates.keys():
            raise ValueError(f"rates are missing for {', '.join(sorted(tallies.keys() - rates.keys()))}")
        last = max((max(t.finishes) for t in tallies.values() if t.finishes), default=max(start, self._last_arrival))
        until = last if end is None else end
        if until < max(start, last):
            raise ValueError(f"the run ends at {until} s, before its start at {start} s or its last event at {last} s")
        seconds = until - start
        names = sorted({*tallies, *(rates or {})})
        models = {name: self._figures([tallies.get(name, _Tally())], seconds) for name in names}
        span = seconds or 1.0
        weights = dict(rates) if rates is not None else {name: models[name].requests / span for name in names}
        own = {
            name: _per_second(len(tally.finishes), max(tally.finishes, default=start) - start) or 0.0
            for name, tally in tallies.items()
        }
        whole = {name: figures.requests_per_second or 0.0 for name, figures in models.items()}
        return Summary(
            overall=self._figures(list(tallies.values()), seconds),
            models=models,
            rates=weights,
            weighted_throughput=_weighted(whole, weights) if seconds > 0 else None,
            weighted_throughput_own_span=_weighted(own, weights) if seconds > 0 else None,
            slo_scales=self._scales if self._reference is not None else [],
            errors=dict(self._errors.most_common(_ERRORS)),
            curves=self._curves(),
            timeline=self._timeline(start, until),
            extra=dict(extra or {}),
        )

    def _figures(self, tallies: list[_Tally], seconds: float) -> Figures:
        requests = sum(t.requests for t in tallies)
        completed = sum(len(t.finishes) for t in tallies)
        prompt_tokens = sum(t.prompt_tokens for t in tallies)
        tokens = _joined([t.tokens for t in tallies])
        latency = _joined([t.latency for t in tallies])
        output_tokens = int(tokens.sum())
        asked = sum((t.slo_asked for t in tallies), Counter[str]())
        met = sum((t.slo_met for t in tallies), Counter[str]())
        ratios = {
            "latency": _joined([t.latency_ratio for t in tallies]),
            "ttft_tpot": _joined([t.ttft_tpot_ratio for t in tallies]),
        }
        ratios = {name: np.sort(values) for name, values in ratios.items() if len(values)}
        return Figures(
            requests=requests,
            completed=completed,
            failed=sum(t.failed for t in tallies),
            unfinished=sum(t.unfinished for t in tallies),
            preemptions=sum(t.preemptions for t in tallies),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=sum(t.cached_tokens for t in tallies),
            seconds=seconds,
            requests_per_second=_per_second(completed, seconds),
            output_tokens_per_second=_per_second(output_tokens, seconds),
            total_tokens_per_second=_per_second(prompt_tokens + output_tokens, seconds),
            ttft=_distribution(_joined([t.ttft for t in tallies])),
            tpot=_distribution(_joined([t.tpot for t in tallies])),
            latency=_distribution(latency),
            latency_per_token=_distribution(latency[tokens > 0] / tokens[tokens > 0]),
            slo={name: met[name] / count for name, count in asked.items()},
            attainment={name: self._attainment(values) for name, values in ratios.items()},
            scale_for_99={name: _scale_for(values, 0.99) for name, values in ratios.items()},
        )

    def _attainment(self, ratios: _Floats) -> list[float]:
        # A request that takes exactly the scale times its reference meets it, whatever the division rounded.
        within = np.searchsorted(ratios, np.asarray(self._scales) * (1 + 1e-9), side="right")
        return [float(count) / len(ratios) for count in within]

    def _curves(self) -> dict[str, list[float]]:
        tallies = list(self._tallies.values())
        tokens, latency = _joined([t.tokens for t in tallies]), _joined([t.latency for t in tallies])
        values = {
            "ttft": _joined([t.ttft for t in tallies]),
            "tpot": _joined([t.tpot for t in tallies]),
            "latency": latency,
            "latency_per_token": latency[tokens > 0] / tokens[tokens > 0],
        }
        return {name: np.quantile(given, CURVE).tolist() for name, given in values.items() if len(given)}

    def _timeline(self, start: float, end: float) -> Timeline | None:
        if end <= start:
            return None
        tallies = list(self._tallies.values())
        arrivals = _joined([t.arrivals for t in tallies])
        finishes, tokens = _joined([t.finishes for t in tallies]), _joined([t.tokens for t in tallies])
        edges = np.linspace(start, end, _BINS + 1)
        # What lies outside the run (it was cut by `end`) is not shown.
        arrived = np.histogram(arrivals, edges)[0]
        completed = np.histogram(finishes, edges)[0]
        in_flight = np.searchsorted(np.sort(arrivals), edges[1:], side="right") - np.searchsorted(
            np.sort(finishes), edges[1:], side="right"
        )
        made = np.histogram(finishes, edges, weights=tokens)[0]
        return Timeline(
            start, (end - start) / _BINS, arrived.tolist(), completed.tolist(), made.astype(int).tolist(),
            in_flight.tolist(),
        )  # fmt: skip


def summarise(
    records: Iterable[RequestRecord],
    *,
    rates: Mapping[str, float] | None = None,
    start: float = 0.0,
    end: float | None = None,
    reference: ReferenceOf | None = None,
    objectives: Mapping[str, Objectives] | None = None,
    slo_scales: Sequence[float] = SLO_SCALES,
    extra: Mapping[str, object] | None = None,
) -> Summary:
    """The figures of `records`; see `Summariser` for the arguments.

    Raises:
        ValueError: as `Summariser.add` and `Summariser.summary`.
    """
    collected = Summariser(reference=reference, objectives=objectives, slo_scales=slo_scales)
    for record in records:
        collected.add(record)
    return collected.summary(start=start, end=end, rates=rates, extra=extra)


def _joined(parts: list[array[float]]) -> _Floats:
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts]) if parts else np.empty(0)


def _distribution(values: _Floats) -> Distribution | None:
    if not len(values):
        return None
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
    return Distribution(len(values), float(values.mean()), p50, p90, p99, float(values.max()))


def _scale_for(ratios: _Floats, share: float) -> float | None:
    # The smallest scale that at least this share of the requests keeps: a value that occurs, not an interpolation.
    ratio = float(ratios[max(0, int(np.ceil(share * len(ratios) - 1e-9)) - 1)])
    return ratio if np.isfinite(ratio) else None


def _per_second(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _weighted(values: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    total = sum(weights.values())
    return sum(weight * values.get(name, 0.0) for name, weight in weights.items()) / total if total > 0 else None
