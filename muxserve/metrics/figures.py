"""The figures of a run as data: what `summary` computes, and what a report file holds."""

from __future__ import annotations

import msgspec

SLO_SCALES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
CURVE = tuple(share / 100 for share in range(101))


class Distribution(msgspec.Struct, frozen=True):
    """Of `count` values in seconds. Percentiles are interpolated linearly between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of all requests, or of one model's. Tokens and latencies are of completed requests; rates are per second of
    `seconds`, the span of the whole run, for one model as for all.

    `latency_per_token` is the latency divided by the output tokens. `slo` holds the share of all requests that met the
    models' objectives (ttft, tpot, all). `attainment` holds for each criterion (latency, ttft_tpot) the share of all
    requests within each of the summary's SLO scales times their reference, and `scale_for_99` the smallest scale that
    99 % of them keep, None where more than 1 % did not complete. A request that did not complete misses everything.
    """

    requests: int
    completed: int
    failed: int
    unfinished: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
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
    at each percent from 0 to 100. `extra` is for figures that only some sources have.
    """

    overall: Figures
    models: dict[str, Figures]
    rates: dict[str, float]
    weighted_throughput: float
    weighted_throughput_own_span: float
    slo_scales: list[float] = []
    errors: dict[str, int] = {}
    curves: dict[str, list[float]] = {}
    timeline: Timeline | None = None
    extra: dict[str, object] = {}
