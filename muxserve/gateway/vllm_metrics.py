"""vLLM's own Prometheus metrics, for several models in one process.

vLLM registers its metrics with one global registry and first removes whatever another model has registered there. Here
each model has a registry of its own; they are merged when they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
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


class Merged(Collector):
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
