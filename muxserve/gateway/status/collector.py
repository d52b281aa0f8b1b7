"""The units' part of `/metrics`, and the gateway's queues."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.status.fleet_status import FleetStatus
from muxserve.scheduling.residency_types import Residence

PLACES = ("queued", "prefilling", "handed", "decoding", "moving")
# metric, help, key of the unit's state, whether it only grows
MODEL_METRICS = (
    ("muxserve_pages_used", "KV pages that requests of the model hold.", "used_pages", False),
    ("muxserve_pages_cached", "KV pages kept for prefix caching, reclaimable at any time.", "cached_pages", False),
    ("muxserve_pages_quota", "KV pages that the model may hold.", "quota_pages", False),
    ("muxserve_requests_preempted", "Requests that lost their pages and are prefilled again.", "returned", True),
    ("muxserve_requests_lost", "Requests whose engine died, or lost them.", "lost", True),
    ("muxserve_requests_missing", "Of those, requests that an engine had lost while it lived.", "missing", True),
    ("muxserve_requests_stray", "Requests that an engine still had when nobody wanted them.", "strays", True),
    ("muxserve_requests_moved_in", "Requests that came from another unit by migration.", "moved_in", True),
    ("muxserve_requests_moved_out", "Requests that went to another unit by migration.", "moved_out", True),
    ("muxserve_engine_failures", "Crashes of engines, and steps that raised an exception.", "failures", True),
    ("muxserve_requests_culprit", "Requests ended since they make engines fail.", "culprits", True),
    ("muxserve_model_degraded", "1 while the model's engines fail at each start in the unit.", "degraded", False),
    ("muxserve_moves_aborted", "Migrations that were begun and given up.", "moves_aborted", True),
    (
        "muxserve_phase_switches",
        "Requests that waited, with their first token, for their engine of both phases to decode again.",
        "phase_switches",
        True,
    ),
    (
        "muxserve_phase_switch_seconds",
        "Seconds from a request's first token to its first decode step in an engine of both phases, summed up.",
        "phase_switch_seconds",
        True,
    ),
)
PHASE_METRICS = (
    ("muxserve_jobs", "Batched steps run.", "jobs", True),
    ("muxserve_job_tokens", "Tokens computed in steps.", "tokens", True),
    ("muxserve_job_seconds", "Seconds spent in steps.", "busy_seconds", True),
    (
        "muxserve_prefill_job_tokens",
        "Tokens of prompts, in whatever steps; of engines of both phases.",
        "prefill_tokens",
        True,
    ),
    (
        "muxserve_prefill_job_seconds",
        "Seconds spent in steps that did nothing but prefill; of engines of both phases.",
        "prefill_busy_seconds",
        True,
    ),
    ("muxserve_lease_waits", "Times that an engine with work was without a lease.", "lease_waits", True),
    (
        "muxserve_lease_wait_seconds",
        "Seconds that an engine with work was without a lease.",
        "lease_wait_seconds",
        True,
    ),
    ("muxserve_sm_share", "Share of the unit's compute that the phase's jobs take (SMs on a GPU).", "share", False),
)
COST_METRICS = (
    (
        "muxserve_step_cost_ratio",
        "Seconds that the last steps took, over those that were predicted at the start.",
        "ratio",
    ),
    (
        "muxserve_step_cost_error",
        "How far a step is from its costs as they are corrected, a part of them.",
        "error",
    ),
)
POOL_METRICS = (
    ("muxserve_pool_pages", "KV pages of the pool.", "total_pages"),
    ("muxserve_pool_pages_free", "KV pages that nobody holds and nothing is cached in.", "free_pages"),
)
# Kinds of processes that are watched.
HANG_KINDS = ("engine", "unit", "memory", "migrator", "scheduler", "gateway", "model", "warm_parent", "vllm", "weights")
Values = Mapping[tuple[str, ...], float]


RESIDENCES = tuple(each.value for each in Residence)
MEMORY_BYTES = ("limit_bytes", "used_bytes", "fixed_bytes", "pools_bytes")
# For each model that memory decides on: name, text, key of the global scheduler's state, whether it counts up.
RESIDENCY_METRICS = (
    ("muxserve_model_memory_bytes", "What comes free when the model sleeps.", "held_bytes", False),
    ("muxserve_model_copy_bytes", "Of its weights, in the host's memory, for GPUs.", "copy_bytes", False),
    ("muxserve_model_engines_rest", "1: it sleeps, and its engines have stayed.", "engines_rest", False),
    ("muxserve_model_last_wake_seconds", "How long its last wake took.", "last_wake_seconds", False),
    ("muxserve_model_wakes", "How often it was woken.", "wakes", True),
    ("muxserve_model_failed_wakes", "Wakes that came to nothing.", "failed_wakes", True),
    ("muxserve_model_evictions", "How often it was put to sleep for want of memory.", "evictions", True),
    ("muxserve_model_evictions_ahead", "Of these, before anybody waited for the memory.", "evictions_ahead", True),
    ("muxserve_model_wake_refusals", "Requests that waited for it in vain.", "refused", True),
    ("muxserve_model_wake_waits", "Requests that waited for it and were served.", "waited", True),
    ("muxserve_model_wake_wait_seconds", "What those waited together.", "waited_seconds", True),
)


class GatewayCollector(Collector):
    """The gateway's own queues as Prometheus metrics."""

    def __init__(self, status: FleetStatus, limiter: ConcurrencyLimiter) -> None:
        self._status = status
        self._limiter = limiter

    def collect(self) -> Iterator[Metric]:
        # A copy: this is read in another thread, while models may come and go.
        gates, fleet = self._limiter.gates.copy(), self._status.fleet
        yield _gauge(
            "muxserve_gateway_requests_running",
            "Requests past admission at the gateway.",
            ["model_name"],
            {(name,): gate.inside for name, gate in gates.items()},
        )
        yield _gauge(
            "muxserve_gateway_requests_waiting",
            "Requests waiting for admission at the gateway.",
            ["model_name"],
            {(name,): gate.waiting for name, gate in gates.items()},
        )
        now = time.monotonic()
        waits = {(name,): self._limiter.waits[name].seconds(now) for name in gates}
        yield _gauge(
            "muxserve_gateway_predicted_wait_seconds",
            "Wait for its first token of a request that came now; none if nothing is known of it.",
            ["model_name"],
            {name: seconds for name, seconds in waits.items() if seconds is not None},
        )
        unplaced = self._status.broker.router.placing.waiting
        yield _gauge(
            "muxserve_gateway_requests_unplaced",
            "Admitted requests that wait for a replica.",
            ["model_name"],
            {(model.name,): unplaced[model.name] for model in fleet.models},
        )
        if self._status.broker.scheduler is not None:
            up = float(self._status.broker.router.placing.scheduler_up)
            yield _gauge("muxserve_scheduler_up", "1 while the global scheduler answers.", [], {(): up})


class FleetCollector(Collector):
    """The fleet's state as Prometheus metrics, from the units' last answers."""

    def __init__(self, status: FleetStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        units = self._status.units.values()
        yield _gauge(
            "muxserve_unit_up",
            "1 while the unit scheduler answers.",
            ["unit"],
            {(unit.name,): float(unit.answered) for unit in units},
        )
        yield _gauge(
            "muxserve_engine_up",
            "1 while the engine serves.",
            ["unit", "model_name", "phase"],
            {
                (unit.name, model, phase): float(unit.engine_up(model, phase))
                for unit in units
                for model in unit.entry.serves
                for phase in unit.engines(model)
            },
        )
        yield _gauge(
            "muxserve_replicas",
            "Replicas of the model that serve.",
            ["model_name"],
            {
                (model.name,): sum(unit.model_up(model.name) for unit in self._status.replicas(model.name))
                for model in self._status.fleet.models
            },
        )
        fleet = self._status.fleet
        yield _gauge(
            "muxserve_suspect",
            "1 for each process that gives no sign of life at present.",
            ["unit", "part"],
            {(each.unit, each.part): 1.0 for each in fleet.suspects},
        )
        yield _gauge(
            "muxserve_file_unfollowed",
            "1 while the fleet is not in all as its fleet file says.",
            [],
            {(): float(bool(fleet.unfollowed))},
        )
        yield _family(
            True,
            "muxserve_hangs",
            "Processes that were killed because they gave no sign of life, by kind.",
            ["kind"],
            {(kind,): float(fleet.hangs.get(kind, 0)) for kind in HANG_KINDS},
        )
        yield from self._memory()
        for name, text, key, counts in MODEL_METRICS:
            yield _family(counts, name, text, ["unit", "model_name"], self._per_model(key))
        yield _gauge(
            "muxserve_unit_requests",
            "Requests of the unit by where they are: queued, prefilling, handed (between the engines), decoding, "
            "moving (to another unit).",
            ["unit", "model_name", "place"],
            {(*key, place): value for place in PLACES for key, value in self._per_model(place).items()},
        )
        for name, text, key, counts in PHASE_METRICS:
            yield _family(counts, name, text, ["unit", "model_name", "phase"], self._per_phase(key))
        for name, text, key in COST_METRICS:
            yield _gauge(name, text, ["unit", "model_name", "phase"], self._costs(key))
        yield _gauge(
            "muxserve_stage_cost_ratio",
            "Seconds that the stage of a pipeline computed, over the mean of all stages.",
            ["unit", "model_name", "stage"],
            self._stages("stage_parts"),
        )
        yield _family(
            True,
            "muxserve_stage_bubble_seconds",
            "Seconds in which the stage of a pipeline had nothing to compute although a micro-batch was in flight.",
            ["unit", "model_name", "stage"],
            self._stages("bubbles"),
        )
        for name, text, key in POOL_METRICS:
            yield _gauge(name, text, ["unit", "pool"], self._per_pool(key))

    def _memory(self) -> Iterator[Metric]:
        """Where memory decides which models are awake."""
        memory = self._status.memory
        if not memory:
            return
        sizes: Values = {(key.removesuffix("_bytes"),): float(memory[key] or 0) for key in MEMORY_BYTES}
        yield _gauge("muxserve_memory_bytes", "Memory of the fleet by kind: the limit, used, ...", ["kind"], sizes)
        models: dict[str, dict[str, Any]] = memory["models"]
        yield _gauge(
            "muxserve_model_residence",
            "1 for where the model is: asleep, waking, awake, leaving.",
            ["model_name", "residence"],
            {(name, word): float(model["residence"] == word) for name, model in models.items() for word in RESIDENCES},
        )
        for metric, text, key, counts in RESIDENCY_METRICS:
            yield _family(
                counts,
                metric,
                text,
                ["model_name"],
                {(name,): float(model[key] or 0) for name, model in models.items()},
            )

    def _per_model(self, key: str) -> Values:
        return {(unit, name): float(model[key]) for unit, name, model in self._status.replica_states() if key in model}

    def _per_phase(self, key: str) -> Values:
        return {
            (unit, name, phase): float(engine[key])
            for unit, name, model in self._status.replica_states()
            for phase, engine in model.get("phases", {}).items()
            if key in engine
        }

    def _costs(self, key: str) -> Values:
        """Learnt costs of steps, by unit, model and phase; `both` stands for an engine of both phases."""
        return {
            (unit, name, phase): float(learnt[key])
            for unit, name, model in self._status.replica_states()
            for phase, learnt in model.get("costs", {}).items()
        }

    def _stages(self, key: str) -> Values:
        return {
            (unit, name, str(stage)): float(seconds)
            for unit, name, model in self._status.replica_states()
            for stage, seconds in enumerate(model.get(key, ()))
        }

    def _per_pool(self, key: str) -> Values:
        found: dict[tuple[str, ...], float] = {}
        for unit in self._status.units.values():
            pools = unit.state.get("pools")
            if unit.answered and isinstance(pools, dict):
                found.update({(unit.name, name): float(pool[key]) for name, pool in pools.items() if key in pool})
        return found


def _gauge(name: str, text: str, labels: list[str], values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def _family(counts: bool, name: str, text: str, labels: list[str], values: Values) -> Metric:
    if not counts:
        return _gauge(name, text, labels, values)
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
