"""vLLM's own Prometheus metrics, for several models in one process.

vLLM registers its metrics with one global registry and first removes whatever another model has registered there. Here
each model has a registry of its own; they are merged when they are read.
"""

from __future__ import annotations

import logging
from collections import Counter as Counters
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample
from vllm.config import SupportsMetricsInfo
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.perf import PerfMetricsProm

from muxserve.gateway.status.collector import PLACES
from muxserve.gateway.status.fleet_status import FleetStatus
from muxserve.spec import EnginePhase, ModelSpec

log = logging.getLogger(__name__)

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
SLEEP_STATE = "vllm:engine_sleep_state"
# Gauges that the front ends' own loggers leave to `VllmGauges`.
GAUGES = frozenset({RUNNING, WAITING, WAITING_BY_REASON, KV_CACHE_USAGE, SLEEP_STATE})

# The index of the engine that runs each place's requests: 0 prefills, 1 decodes or does both.
_ONE_ENGINE = tuple(place for place in PLACES if place != "queued")
_RUNS_IN = {0: ("prefilling",), 1: ("handed", "decoding", "moving")}
_SLEEPS = ("asleep", "waking")


def stat_logger(model: str, registry: CollectorRegistry) -> type[PrometheusStatLogger]:
    """vLLM's Prometheus logger, writing into `registry`."""
    counter = staticmethod(partial(Counter, registry=registry))

    def gauge(**options: Any) -> Gauge:
        # One engine's last word would be set here; `VllmGauges` shows what is.
        return Gauge(**options, registry=None if options["name"] in GAUGES else registry)

    class ModelPerfMetrics(PerfMetricsProm):
        _counter_cls: Any = counter

    class ModelStatLogger(PrometheusStatLogger):
        _gauge_cls: Any = staticmethod(gauge)
        _counter_cls: Any = counter
        _histogram_cls: Any = staticmethod(partial(Histogram, registry=registry))
        _perf_metrics_cls: Any = ModelPerfMetrics

        def record(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().record(*args, **kwargs)
            except Exception:  # statistics must not end the loop that delivers everyone's tokens
                log.exception("statistics of %s could not be counted", model)

        def log_metrics_info(self, type: str, config_obj: SupportsMetricsInfo) -> None:
            # vLLM's version has no model_name label: it knows of one model only.
            info = {"model_name": model, **config_obj.metrics_info(), "engine": ""}
            gauge = Gauge(f"vllm:{type}_info", f"Information of {type}", list(info), registry=registry)
            for engine in self.engine_indexes:
                gauge.labels(**{**info, "engine": str(engine)}).set(1)

    return ModelStatLogger


class VllmGauges(Collector):
    """vLLM's gauges of an engine's state, from the units' present state: one series per model and engine index, over
    all units that answer.

    Engines send statistics with their tokens, and each message reaches one gateway. An engine that becomes idle,
    sleeps, dies, or has a replica in another unit would leave the gauge at the last message; units answer for all of
    these.
    """

    def __init__(self, status: FleetStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        running = _family(RUNNING, "Number of requests in model execution batches.")
        waiting = _family(WAITING, "Number of requests waiting to be processed.")
        reasons = _family(WAITING_BY_REASON, "Number of waiting requests by reason.", "reason")
        usage = _family(KV_CACHE_USAGE, "KV-cache usage. 1 means 100 percent usage.")
        sleep = _family(SLEEP_STATE, "Engine sleep state; awake = 0 means engine is sleeping.", "sleep_state")
        by_model: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for _, name, said in self._status.replica_states():
            by_model[name].append(said)
        for model in self._status.fleet.models:
            replicas = by_model.get(model.name, [])
            first, *_ = indexes = engine_indexes(model)
            for index in indexes:
                labels = [model.name, str(index)]
                places = _RUNS_IN[index] if len(indexes) > 1 else _ONE_ENGINE
                queued = _total(replicas, "queued") if index == first else 0.0
                running.add_metric(labels, sum(_total(replicas, place) for place in places))
                waiting.add_metric(labels, queued)
                reasons.add_metric([*labels, "capacity"], queued)
                reasons.add_metric([*labels, "deferred"], 0.0)
                if not model.private:  # how full its own cache is, the units do not know
                    used, quota = _total(replicas, "used_pages"), _total(replicas, "quota_pages")
                    usage.add_metric(labels, used / max(1.0, quota))
                for state, value in self._sleep_states(model.name).items():
                    sleep.add_metric([*labels, state], float(value))
        yield from (running, waiting, reasons, usage, sleep)

    def _sleep_states(self, model: str) -> dict[str, bool]:
        resident = self._status.resident(model)
        sleeps = resident.get("residence") in _SLEEPS or self._status.asleep(model)
        kept = bool(resident.get("copy_bytes"))
        return {"awake": not sleeps, "weights_offloaded": sleeps and kept, "discard_all": sleeps and not kept}


def engine_indexes(model: ModelSpec) -> tuple[int, ...]:
    """The indexes that vLLM's metrics have for the model's engines."""
    phases: tuple[EnginePhase, ...] = model.engines
    if len(phases) > 1:
        return 0, 1
    return (0,) if model.pooling else (1,)


def _family(name: str, text: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["model_name", "engine", *more])


def _total(replicas: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(replica.get(key, 0) for replica in replicas))


# What is constant here (text models only, which nobody meters; one choice per engine request), and what says again what
# other series say.
_LEFT_OUT = (
    SLEEP_STATE,
    "vllm:mm_cache_",
    "vllm:estimated_",
    "vllm:external_prefix_cache_",
    "vllm:request_params_",
    "vllm:cache_config_info",
    "vllm:iteration_tokens",
    "vllm:request_inference_time_seconds",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_num_preemptions",
    "vllm:request_prefill_kv_computed_tokens",
)
# Every second bucket of vLLM's histograms: a factor of 2 to 4 between two, as in the fleet's own.
_EVERY = 2
# Both engines of a model say the first of the same pages, and all gateways the second of the same units.
_SHARED = (KV_CACHE_USAGE, "muxserve_gateway_predicted_wait_seconds")


class Lean(Collector):
    """What an operator needs of `source`: of vLLM's metrics one series per model instead of one per engine, no
    histogram in which nothing was observed, no label value that never came up, nothing that is constant or said
    elsewhere, and half of the buckets. Names and other labels stay as they are."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            if not family.name.startswith("vllm:"):
                yield family
            elif not family.name.startswith(_LEFT_OUT):
                lean = folded(family, ("engine",))
                lean.samples = list(_thinned(lean.samples) if lean.type == "histogram" else _nonzero(lean))
                if lean.samples:
                    yield lean


def folded(family: Metric, labels: Collection[str]) -> Metric:
    """`family` without `labels`: the samples that differ in nothing else are summed up; of what several say of
    the same thing, the largest is taken."""
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for name, known, value, *_ in family.samples:
        key = name, tuple((label, of) for label, of in known.items() if label not in labels)
        before = values.get(key, 0.0)
        values[key] = max(before, value) if name in _SHARED else before + value
    found = Metric(family.name, family.documentation, family.type)
    found.samples = [Sample(name, dict(known), value) for (name, known), value in values.items()]
    return found


def _thinned(samples: Sequence[Sample]) -> Iterator[Sample]:
    def series(sample: Sample) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))

    observed = {series(each) for each in samples if each.name.endswith("_count") and each.value}
    passed: Counters[tuple[tuple[str, str], ...]] = Counters()
    for each in samples:
        key = series(each)
        if key not in observed:
            continue
        if each.name.endswith("_bucket") and each.labels["le"] != "+Inf":
            passed[key] += 1
            if passed[key] % _EVERY:
                continue
        yield each


def _nonzero(family: Metric) -> Iterator[Sample]:
    # Without a label of its own a series is worth its zero: rates and alerts begin with it.
    return (each for each in family.samples if each.value or set(each.labels) <= {"model_name"})


class JoinedMetrics(Collector):
    """Several sources of metrics as one: samples of equal names come out under one heading.

    Args:
        sources: says which registries or collectors there are now; where they have the same metric, its type and help
            are the first one's.
        prefixes: metric names to let through; all if empty.
    """

    def __init__(self, sources: Callable[[], Iterable[Collector]], prefixes: tuple[str, ...] = ()) -> None:
        self._sources = sources
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for source in self._sources():
            for family in source.collect():
                if self._prefixes and not family.name.startswith(self._prefixes):
                    continue
                known = families.get(family.name)
                if known is None:
                    known = families[family.name] = Metric(family.name, family.documentation, family.type)
                known.samples += family.samples
        yield from families.values()
