"""vLLM's gauges of an engine's state, from what the units say now.

Engines send statistics with their tokens, and each message reaches one gateway. An engine that becomes idle, sleeps,
dies, or has a replica in another unit would leave the gauge at what was sent last; the units answer for all of these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from muxserve.gateway.status.collector import PLACES
from muxserve.gateway.status.fleet_status import FleetStatus
from muxserve.spec import EnginePhase, ModelSpec

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
SLEEP_STATE = "vllm:engine_sleep_state"
# What the front ends' own loggers leave to this module.
NAMES = frozenset({RUNNING, WAITING, WAITING_BY_REASON, KV_CACHE_USAGE, SLEEP_STATE})

# The index of the engine that runs each place's requests: 0 prefills, 1 decodes or does both.
_ONE_ENGINE = tuple(place for place in PLACES if place != "queued")
_RUNS_IN = {0: ("prefilling",), 1: ("handed", "decoding", "moving")}
_SLEEPS = ("asleep", "waking")


class VllmGauges(Collector):
    """One series per model and engine index, over all units that answer."""

    def __init__(self, status: FleetStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        running = _family(RUNNING, "Number of requests in model execution batches.")
        waiting = _family(WAITING, "Number of requests waiting to be processed.")
        reasons = _family(WAITING_BY_REASON, "Number of waiting requests by reason.", "reason")
        usage = _family(KV_CACHE_USAGE, "KV-cache usage. 1 means 100 percent usage.")
        sleep = _family(SLEEP_STATE, "Engine sleep state; awake = 0 means engine is sleeping.", "sleep_state")
        by_model: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for _, name, said in self._status.told():
            by_model[name].append(said)
        for model in self._status.fleet.models:
            told = by_model.get(model.name, [])
            first, *_ = indexes = engine_indexes(model)
            for index in indexes:
                labels = [model.name, str(index)]
                places = _RUNS_IN[index] if len(indexes) > 1 else _ONE_ENGINE
                queued = _total(told, "queued") if index == first else 0.0
                running.add_metric(labels, sum(_total(told, place) for place in places))
                waiting.add_metric(labels, queued)
                reasons.add_metric([*labels, "capacity"], queued)
                reasons.add_metric([*labels, "deferred"], 0.0)
                usage.add_metric(labels, _total(told, "used_pages") / max(1.0, _total(told, "quota_pages")))
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


def _total(told: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(model.get(key, 0) for model in told))
