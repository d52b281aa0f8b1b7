"""What the gateway measures of every request, from the arrival of its HTTP request to its last token.

Admission queue, tokenization and the unit's queues are all inside these times, which is what a client sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from muxserve.gateway.routing.requests import Tracked
from muxserve.gateway.usage.usage_log import Used
from muxserve.metrics import Objectives, time_per_token
from muxserve.metrics.live import LATENCY_WINDOW_SECONDS, RecentLoad
from muxserve.spec import ModelSpec, public_name

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)


# Requests of one model that are kept; with more per window, the last ones are shown.
MOST_RECENT = 2000


class RecentRequest(NamedTuple):
    """A request that completed at `at`; `met` says whether it met all objectives, None without any."""

    at: float
    ttft: float
    tpot: float | None
    met: bool | None


class RequestOutcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"

    @classmethod
    def of_finish(cls, finish_reason: int) -> RequestOutcome:
        """The outcome for vLLM's finish reason: all but `error` (3) are a complete answer."""
        return cls.FAILED if finish_reason == 3 else cls.COMPLETED

    @classmethod
    def of_cancel(cls, request: Tracked) -> RequestOutcome:
        """The outcome when the front end cancels: because of a stop string, unless the client went away."""
        http = request.context
        return cls.CANCELLED if http is None or http.disconnected else cls.COMPLETED


class Measures:
    """Latencies, SLO attainment and counts per model, in `registry`."""

    def __init__(self, models: Iterable[ModelSpec], registry: CollectorRegistry) -> None:
        self._objectives: dict[str, Objectives] = {}
        self._recent: dict[str, deque[RecentRequest]] = {}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)

        self._ttft = histogram(
            "muxserve_time_to_first_token_seconds", "From the arrival of the HTTP request to its first token.", SECONDS
        )
        self._tpot = histogram(
            "muxserve_time_per_output_token_seconds", "Mean time per output token after the first.", TOKEN_SECONDS
        )
        self._latency = histogram(
            "muxserve_request_latency_seconds", "From the arrival of the HTTP request to its last token.", SECONDS
        )
        self._requests = Counter(
            "muxserve_requests", "Requests that ended, by outcome.", ["model_name", "outcome"], registry=registry
        )
        self._resubmitted = Counter(
            "muxserve_requests_resubmitted",
            "Requests served again from where they were, by reason.",
            ["model_name", "reason"],
            registry=registry,
        )
        self._rejected = Counter(
            "muxserve_requests_rejected",
            "HTTP requests turned away before they reached a model, by reason.",
            ["model_name", "reason"],
            registry=registry,
        )
        self._slo = Counter(
            "muxserve_slo_requests",
            "Completed requests by latency objective (ttft, tpot, all) and whether it was met.",
            ["model_name", "slo", "met"],
            registry=registry,
        )
        self._moved = Counter(
            "muxserve_migrations",
            "Requests that moved from unit to unit while they were served.",
            ["model_name", "source", "destination"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "muxserve_fallbacks",
            "HTTP requests that a fallback answered, since the model was degraded or at its limit.",
            ["model_name", "fallback"],
            registry=registry,
        )
        self._times = (self._ttft, self._tpot, self._latency)
        self._counts = (self._requests, self._resubmitted, self._rejected, self._slo, self._moved, self._fallbacks)
        for model in models:
            self.add(model)

    def add(self, model: ModelSpec) -> None:
        """Count for `model` as well, or to its objectives of now. A model's counts stay."""
        name = model.name
        objectives = Objectives.of_milliseconds(model.slo_ttft_ms, model.slo_tpot_ms)
        self._objectives[name] = objectives
        self._recent.setdefault(name, deque(maxlen=MOST_RECENT))
        for histogram in self._times:
            histogram.labels(name)
        for outcome in RequestOutcome:
            self._requests.labels(name, outcome.value)
        for slo in objectives.names:
            self._slo.labels(name, slo, "true")
            self._slo.labels(name, slo, "false")

    @property
    def models(self) -> set[str]:
        """The models that are counted for."""
        return {*self._objectives}

    def remove(self, model: str) -> None:
        """Show nothing of `model` any more: the fleet has it no longer."""
        self._objectives.pop(model, None)
        self._recent.pop(model, None)
        for metric in (*self._times, *self._counts):
            metric.remove_by_labels({"model_name": model})

    def ended(self, request: Tracked, outcome: RequestOutcome, now: float) -> None:
        """Count a request that ended at `now`."""
        name = request.model
        self._requests.labels(name, outcome.value).inc()
        if request.context is not None and request.context.tenant is not None:
            request.context.tenant.ended(public_name(name), outcome.value, _used(request))
        if request.context is not None and request.context.batch is not None:
            return  # nobody waits for it
        if outcome is not RequestOutcome.COMPLETED or request.first_token_at is None or request.last_token_at is None:
            return
        ttft = request.first_token_at - request.arrival
        self._ttft.labels(name).observe(ttft)
        self._latency.labels(name).observe(request.last_token_at - request.arrival)
        tpot = time_per_token(request.first_token_at, request.last_token_at, len(request.emitted))
        if tpot is not None:
            self._tpot.labels(name).observe(tpot)
        objectives = self._objectives.get(name, Objectives())  # its last requests may outlive a model
        met = objectives.met(ttft, tpot)
        for slo, good in met.items():
            self._slo.labels(name, slo, "true" if good else "false").inc()
        if name in self._recent:
            self._recent[name].append(RecentRequest(now, ttft, tpot, met.get("all")))

    def recent(self, model: str, now: float) -> RecentLoad:
        """The latencies of the requests that completed in the last `LATENCY_WINDOW_SECONDS`, and how many met their
        objectives."""
        recent = self._recent.get(model, ())
        ended = [each for each in recent if each.at > now - LATENCY_WINDOW_SECONDS]
        return RecentLoad(
            ttft=[each.ttft for each in ended],
            tpot=[each.tpot for each in ended if each.tpot is not None],
            judged=sum(each.met is not None for each in ended),
            met=sum(each.met is True for each in ended),
        )

    def resubmitted(self, model: str, reason: str) -> None:
        """Count a request that is served again."""
        self._resubmitted.labels(model, reason).inc()

    def moved(self, model: str, source: str, destination: str) -> None:
        """Count a request that another unit has taken over."""
        self._moved.labels(model, source, destination).inc()

    def fell_back(self, model: str, fallback: str) -> None:
        """Count a request for `model` that `fallback` has answered."""
        self._fallbacks.labels(model, fallback).inc()

    def rejected(self, model: str, reason: str) -> None:
        """Count a request that was turned away; `model` is empty if it named none that we know."""
        self._rejected.labels(model, reason).inc()


def _used(request: Tracked) -> Used:
    """What is counted of `request`: its prompt if there was an answer, and once for all choices of it."""
    prompted = request.choice == 0 and request.first_token_at is not None
    return Used(
        prompt_tokens=request.spec.prompt_tokens if prompted else 0,
        cached_tokens=request.cached_tokens if prompted else 0,
        output_tokens=len(request.emitted),
    )
