"""vLLM's own Prometheus metrics, for several models in one process.

vLLM registers its metrics with one global registry and first removes whatever another model has registered there. Here
each model has a registry of its own; they are merged when they are read.
"""

from __future__ import annotations

import logging
from collections import Counter as Counters
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample
from vllm.config import SupportsMetricsInfo
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.perf import PerfMetricsProm

log = logging.getLogger(__name__)


def stat_logger(model: str, registry: CollectorRegistry) -> type[PrometheusStatLogger]:
    """vLLM's Prometheus logger, writing into `registry`."""
    counter = staticmethod(partial(Counter, registry=registry))

    class ModelPerfMetrics(PerfMetricsProm):
        _counter_cls: Any = counter

    class ModelStatLogger(PrometheusStatLogger):
        _gauge_cls: Any = staticmethod(partial(Gauge, registry=registry))
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


# What is constant here: text models only, which nobody puts to sleep and nobody meters; one choice per engine request.
_CONSTANT = (
    "vllm:engine_sleep_state",
    "vllm:mm_cache_",
    "vllm:estimated_",
    "vllm:external_prefix_cache_",
    "vllm:request_params_n",
    "vllm:cache_config_info",
)
# Of vLLM's histograms every second bucket: a factor of 2 to 4 between two, as in the fleet's own.
_EVERY = 2


class Lean(Collector):
    """What an operator needs of `source`: of vLLM's metrics no histogram in which nothing was observed, no label value
    that never came up, nothing that is constant here, and half of the buckets. Names and labels stay as they are."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            if not family.name.startswith("vllm:"):
                yield family
            elif not family.name.startswith(_CONSTANT):
                lean = Metric(family.name, family.documentation, family.type)
                lean.samples = list(_thinned(family.samples) if family.type == "histogram" else _nonzero(family))
                if lean.samples:
                    yield lean


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
    plain = {"engine", "model_name"}
    return (each for each in family.samples if each.value or set(each.labels) <= plain)


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
