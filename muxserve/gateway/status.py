"""What the gateway tells about itself and its unit: `/health`, `/fleet` and the unit's part of `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from muxserve.deployment import Deployment, ModelDeployment
from muxserve.gateway.broker import Broker
from muxserve.gateway.gpus import GpuStatus
from muxserve.gateway.turnstile import Turnstile

PHASES = ("prefill", "decode")
# A scrape and a dashboard that ask at the same time share one answer.
MAX_AGE_SECONDS = 0.2
# A unit scheduler that does not answer for this long is busy dying.
TIMEOUT_SECONDS = 1.0

PLACES = ("queued", "prefilling", "handed", "decoding")
# metric, help, key of the unit's state, whether it only grows
MODEL_METRICS = (
    ("muxserve_pages_used", "KV pages that requests of the model hold.", "used_pages", False),
    ("muxserve_pages_cached", "KV pages kept for prefix caching, reclaimable at any time.", "cached_pages", False),
    ("muxserve_pages_quota", "KV pages that the model may hold.", "quota_pages", False),
    ("muxserve_requests_preempted", "Requests that lost their pages and are prefilled again.", "returned", True),
    ("muxserve_requests_lost", "Requests whose engine died.", "lost", True),
)
PHASE_METRICS = (
    ("muxserve_jobs", "Batched steps run.", "jobs", True),
    ("muxserve_job_tokens", "Tokens computed in steps.", "tokens", True),
    ("muxserve_job_seconds", "Seconds spent in steps.", "busy_seconds", True),
    ("muxserve_lease_waits", "Times that an engine with work was without a lease.", "lease_waits", True),
    (
        "muxserve_lease_wait_seconds",
        "Seconds that an engine with work was without a lease.",
        "lease_wait_seconds",
        True,
    ),
    ("muxserve_sm_share", "Share of the unit's compute that the phase's jobs take (SMs on a GPU).", "share", False),
)
POOL_METRICS = (
    ("muxserve_pool_pages", "KV pages of the pool.", "total_pages"),
    ("muxserve_pool_pages_free", "KV pages that nobody holds and nothing is cached in.", "free_pages"),
)


class UnitStatus:
    """The unit's state as last heard, at most `MAX_AGE_SECONDS` old after `refresh`."""

    def __init__(self, broker: Broker, clock: Callable[[], float] = time.monotonic) -> None:
        self.state: dict[str, Any] = {}
        self.answered = False
        self.was_ready = False
        self._broker = broker
        self._clock = clock
        self._heard_at = -1e9

    async def refresh(self, max_age: float = MAX_AGE_SECONDS) -> None:
        """Ask the unit if what is known is too old; `answered` says whether the unit is there."""
        if self.answered and self._broker.link.up and self.age <= max_age:
            return
        state = await self._broker.unit_state(TIMEOUT_SECONDS)
        self.answered = state is not None
        if state is not None:
            self.state = state
            self._heard_at = self._clock()

    @property
    def age(self) -> float:
        """Seconds since the unit last answered."""
        return self._clock() - self._heard_at

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """Per model what the unit says of it."""
        models = self.state.get("models")
        return models if isinstance(models, dict) else {}

    def engine_up(self, model: str, phase: str) -> bool:
        """Whether that engine serves now."""
        engines = self.state.get("engines")
        engine = engines.get(f"{model}/{phase}") if isinstance(engines, dict) else None
        return self.answered and isinstance(engine, dict) and bool(engine.get("up"))

    def model_up(self, model: str) -> bool:
        """Whether both engines of the model serve now."""
        return all(self.engine_up(model, phase) for phase in PHASES)


class Reports:
    """The answers of `/health` and `/fleet`."""

    def __init__(
        self, deployment: Deployment, broker: Broker, unit: UnitStatus, turnstile: Turnstile, gpus: GpuStatus
    ) -> None:
        self._deployment = deployment
        self._broker = broker
        self._unit = unit
        self._turnstile = turnstile
        self._gpus = gpus
        self._started = time.monotonic()
        self.draining = False

    def health(self) -> tuple[int, dict[str, object]]:
        """HTTP status and body. 503 until every engine has been up once, and when draining.

        Afterwards requests are taken whatever happens below, since they survive it; so it stays 200, and `status`
        says `degraded` while something is being started again.
        """
        unit = self._unit
        models = {}
        for model in self._deployment.models:
            gate = self._turnstile.gates[model.name]
            up = unit.model_up(model.name)
            models[model.name] = {
                "status": "up" if up else ("restarting" if unit.was_ready else "starting"),
                "engines": {phase: "up" if unit.engine_up(model.name, phase) else "down" for phase in PHASES},
                "running": gate.inside,
                "waiting": gate.waiting,
            }
        all_up = all(unit.model_up(model.name) for model in self._deployment.models)
        unit.was_ready |= all_up
        if self.draining:
            status = "draining"
        elif all_up:
            status = "ok"
        else:
            status = "degraded" if unit.was_ready else "starting"
        body: dict[str, object] = {
            "status": status,
            "unit": "up" if unit.answered else "down",
            "models": models,
        }
        return (200 if status in ("ok", "degraded") else 503), body

    def fleet(self) -> dict[str, object]:
        """Everything that is known: the unit's own state, and the models' limits and queues at the gateway."""
        unit = self._unit
        return {
            "status": self.health()[1]["status"],
            "unit": {
                "name": self._deployment.unit,
                "answered": unit.answered,
                "age_seconds": round(unit.age, 3) if unit.state else None,
                "state": unit.state,
            },
            "pools": [
                {"name": pool.name, "page_bytes": pool.page_bytes, "num_pages": pool.num_pages}
                for pool in self._deployment.pools
            ],
            "gpus": self._gpus.report(),
            "models": [self._model(model) for model in self._deployment.models],
            "gateway": {
                "epoch": self._broker.table.epoch,
                "uptime_seconds": round(time.monotonic() - self._started, 3),
                "requests_in_flight": len(self._broker.table),
                "draining": self.draining,
                "max_body_bytes": self._deployment.gateway.max_body_bytes,
                "needs_key": bool(self._deployment.gateway.api_keys),
            },
        }

    def _model(self, model: ModelDeployment) -> dict[str, object]:
        gate = self._turnstile.gates[model.name]
        return {
            "name": model.name,
            "status": "up" if self._unit.model_up(model.name) else "down",
            "pool": model.pool,
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "dtype": model.dtype,
            "block_tokens": model.block_tokens,
            "max_len": model.max_len,
            "rate": model.rate,
            "prefix_caching": model.prefix_caching,
            "slo": {"ttft_ms": model.slo_ttft_ms, "tpot_ms": model.slo_tpot_ms},
            "limits": {"max_concurrency": model.max_concurrency, "max_queue": model.max_queue},
            "gateway": {
                "running": gate.inside,
                "waiting": gate.waiting,
                "mean_service_seconds": round(gate.mean_seconds, 4),
            },
        }


class UnitCollector(Collector):
    """The unit's state and the gateway's queues as Prometheus metrics, from what was last heard."""

    def __init__(self, deployment: Deployment, unit: UnitStatus, turnstile: Turnstile) -> None:
        self._deployment = deployment
        self._unit = unit
        self._turnstile = turnstile

    def collect(self) -> Iterator[Metric]:
        yield self._gauge(
            "muxserve_unit_up", "1 while the unit scheduler answers.", [], {(): float(self._unit.answered)}
        )
        gates = self._turnstile.gates
        yield self._gauge(
            "muxserve_gateway_requests_running",
            "Requests past admission at the gateway.",
            ["model_name"],
            {(name,): gate.inside for name, gate in gates.items()},
        )
        yield self._gauge(
            "muxserve_gateway_requests_waiting",
            "Requests waiting for admission at the gateway.",
            ["model_name"],
            {(name,): gate.waiting for name, gate in gates.items()},
        )
        yield self._gauge(
            "muxserve_engine_up",
            "1 while the engine serves.",
            ["model_name", "phase"],
            {
                (model.name, phase): float(self._unit.engine_up(model.name, phase))
                for model in self._deployment.models
                for phase in PHASES
            },
        )
        if self._unit.answered:
            yield from self._of_unit()

    def _of_unit(self) -> Iterator[Metric]:
        for name, text, key, counts in MODEL_METRICS:
            family = self._counter if counts else self._gauge
            yield family(name, text, ["model_name"], self._per_model(key))
        yield self._gauge(
            "muxserve_unit_requests",
            "Requests of the unit by where they are: queued, prefilling, handed (between the engines), decoding.",
            ["model_name", "place"],
            {(name, place): value for place in PLACES for (name,), value in self._per_model(place).items()},
        )
        for name, text, key, counts in PHASE_METRICS:
            family = self._counter if counts else self._gauge
            yield family(name, text, ["model_name", "phase"], self._per_phase(key))
        for name, text, key in POOL_METRICS:
            yield self._gauge(name, text, ["pool"], self._per_pool(key))

    def _per_model(self, key: str) -> dict[tuple[str, ...], float]:
        return {(name,): float(model[key]) for name, model in self._unit.models().items() if key in model}

    def _per_phase(self, key: str) -> dict[tuple[str, ...], float]:
        return {
            (name, phase): float(model["phases"][phase][key])
            for name, model in self._unit.models().items()
            for phase in PHASES
            if key in model.get("phases", {}).get(phase, {})
        }

    def _per_pool(self, key: str) -> dict[tuple[str, ...], float]:
        pools = self._unit.state.get("pools")
        if not isinstance(pools, dict):
            return {}
        return {(name,): float(pool[key]) for name, pool in pools.items() if key in pool}

    @staticmethod
    def _gauge(name: str, text: str, labels: list[str], values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            family.add_metric(list(key), value)
        return family

    @staticmethod
    def _counter(
        name: str, text: str, labels: list[str], values: Mapping[tuple[str, ...], float]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            family.add_metric(list(key), value)
        return family
