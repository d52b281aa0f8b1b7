"""The answers of `/health` and `/fleet`."""

from __future__ import annotations

import time
from dataclasses import asdict
from statistics import fmean

from muxserve.costs.correction import corrected_profile
from muxserve.costs.profile import Overheads, Profile
from muxserve.gateway.grammars.compilers import GrammarCompilers
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.routing.patience import Wait, say_missing_pages
from muxserve.gateway.routing.placing import ITS_MODEL
from muxserve.gateway.status.fleet_status import FleetStatus, UnitStatus
from muxserve.spec import ModelSpec

# Fewer requests say nothing of how long they take to their unit.
FEWEST_DELAYS = 8


class Reports:
    """What one gateway says about itself and the fleet."""

    def __init__(
        self, status: FleetStatus, index: int, limiter: ConcurrencyLimiter, grammars: GrammarCompilers
    ) -> None:
        self._status = status
        self._grammars = grammars
        self._index = index
        self._limiter = limiter
        self._started = time.monotonic()
        self.draining = False

    def health(self) -> tuple[int, dict[str, object]]:
        """HTTP status and body. 503 until every model has been up once, and when draining.

        Afterwards requests are taken whatever happens below, since they survive it; so it stays 200, and `status`
        says `degraded` while something is being started again, gives no sign of life, or a model that sleeps could not
        be woken or exceeds the limit of memory.
        """
        status = self._status
        ready, whole = status.look()
        names = [model.name for model in status.fleet.models]
        if self.draining:
            word = "draining"
        elif ready and whole and not status.fleet.suspects and not any(map(status.trouble, names)):
            word = "ok"
        else:
            word = "degraded" if status.was_ready else "starting"
        body: dict[str, object] = {
            "status": word,
            "units": {name: "up" if unit.answered else "down" for name, unit in status.units.items()},
            "scheduler": status.broker.scheduler_word,
            "models": {name: self._health_of(name) for name in names},
            # Processes that give no sign of life; they are killed if that goes on.
            "suspects": [
                {"part": each.part, **({"unit": each.unit} if each.unit else {})} for each in status.fleet.suspects
            ],
            # In a fleet with one unit its state, otherwise whether any unit is up.
            "unit": "up" if any(unit.answered for unit in status.units.values()) else "down",
        }
        return (200 if word in ("ok", "degraded") else 503), body

    def _health_of(self, name: str) -> dict[str, object]:
        status = self._status
        replicas = status.replicas(name)
        gate = self._limiter.gates[name]
        return {
            "status": self._word(name),
            **self._trouble(name),
            "engines": {phase: "up" if up else "down" for phase, up in status.engines(name).items()},
            "replicas": {unit.name: self._replica_word(unit, name) for unit in replicas},
            "running": gate.inside,
            "waiting": gate.waiting,
        }

    def _replica_word(self, unit: UnitStatus, model: str) -> str:
        if self._status.fleet.is_suspect(unit.name, model):
            return "suspect"
        return "up" if unit.model_up(model) else "down"

    def _word(self, name: str) -> str:
        if self._status.fleet.is_retired(name):
            return "leaving"
        residence = self._status.resident(name).get("residence")
        if residence in ("waking", "leaving"):
            return str(residence)
        if name in self._status.refused:
            return "degraded"
        if self._status.model_up(name):
            return "up"
        if self._status.asleep(name):
            return "degraded" if self._status.trouble(name) else "asleep"
        if self._trouble(name):
            return "degraded"
        return "restarting" if self._status.was_up(name) else "starting"

    def _trouble(self, name: str) -> dict[str, object]:
        """Why a model cannot be served, or not as it should be; nothing of others."""
        reason = self._status.why_degraded(name) or self._status.trouble(name)
        return {"reason": reason} if reason else {}

    def _waits(self, name: str, now: float) -> list[Wait]:
        """What requests of a model wait for."""
        status, gate = self._status, self._limiter.gates[name]
        found = status.broker.patience.reasons(now).get(name, [])
        for wait in found:
            if wait.reason == ITS_MODEL:
                wait.reason = str(status.resident(name).get("waits_for") or ITS_MODEL)
        say_missing_pages(
            found, {unit.name: unit.models().get(name, {}).get("missing_pages", 0) for unit in status.replicas(name)}
        )
        before = ("its grammar to be compiled", self._grammars.waiting[name]), ("a place in service", gate.waiting)
        return found + [Wait(reason, count) for reason, count in before if count]

    @property
    def requests(self) -> int:
        """Requests in service or waiting here."""
        return self._limiter.occupied

    def fleet(self) -> dict[str, object]:
        """Everything that is known: the units' own states, and the models' limits and queues at the gateway."""
        status, broker = self._status, self._status.broker
        fleet = status.fleet
        units = [self._unit(unit) for unit in status.units.values()]
        health = self.health()[1]
        return {
            "status": health["status"],
            "units": units,
            "scheduler": health["scheduler"],
            "gpus": [gpu for unit in status.units.values() for gpu in self._gpus(unit)],
            "models": [self._model(model) for model in fleet.models],
            "levels": [
                {"name": level.name, "rank": level.rank, "target_load": level.target_load} for level in fleet.levels
            ],
            "default_level": fleet.priority_levels().default,
            "memory": status.memory or None,
            "unfollowed": fleet.unfollowed or None,
            "gateway": {
                "index": self._index,
                "count": fleet.gateway.count,
                "epoch": broker.table.epoch,
                "uptime_seconds": round(time.monotonic() - self._started, 3),
                "requests_in_flight": len(broker.table),
                "draining": self.draining,
                "max_body_bytes": fleet.gateway.http.max_body_bytes,
                "needs_key": fleet.needs_key,
                "generation": fleet.generation,
            },
            "unit": units[0] if units else None,
        }

    def profile(self) -> Profile:
        """What steps cost here, as `muxserve plan --costs` reads it: predictions, corrected by what was measured; and
        how long requests take to their unit."""
        units = self._status.units.values()
        profile = corrected_profile([(unit.entry.unit_spec.costs, unit.learnt()) for unit in units])
        delays = self._status.broker.request_delays
        if len(delays) >= FEWEST_DELAYS:
            profile.overheads = {each.device: Overheads(request=fmean(delays)) for each in profile.engines}
        names = ", ".join(dict.fromkeys(engine.model for engine in profile.engines)) or "no model yet"
        profile.about = f"steps of {names}, corrected while a fleet served"
        return profile

    def _unit(self, unit: UnitStatus) -> dict[str, object]:
        unit_spec = unit.entry.unit_spec
        return {
            "name": unit.name,
            "status": "up" if unit.answered else "down",
            "remote": unit.entry.remote,
            "serves": unit.entry.serves,
            "ranks": unit_spec.ranks,
            "stages": unit_spec.stages,
            "models": [model.name for model in unit_spec.models],
            "answered": unit.answered,
            "age_seconds": round(unit.age, 3) if unit.state else None,
            "requests_in_flight": self._status.broker.table.count(unit.name),
            "pools": [
                {"name": pool.name, "page_bytes": pool.page_bytes, "num_pages": pool.num_pages}
                for pool in unit_spec.pools
            ],
            "gpus": self._gpus(unit),
            "state": unit.state,
        }

    def _gpus(self, unit: UnitStatus) -> list[dict[str, object]]:
        return [] if unit.gpus is None else [{"unit": unit.name, **gpu} for gpu in unit.gpus.report()]

    def _model(self, model: ModelSpec) -> dict[str, object]:
        status = self._status
        gate, waits = self._limiter.gates[model.name], self._limiter.waits[model.name]
        wait = waits.seconds(time.monotonic())
        return {
            "name": model.name,
            "status": "up" if status.model_up(model.name) else ("asleep" if status.asleep(model.name) else "down"),
            # As `/health` has it: also `waking`, `leaving`, `starting`, `restarting`, `degraded`.
            "health": self._word(model.name),
            "degraded": status.why_degraded(model.name) or None,
            "replicas": [unit.name for unit in status.replicas(model.name)],
            "replica_bounds": status.fleet.replica_bounds(model.name),
            "shape": "one" if len(model.engines) == 1 else "split",
            "stages": model.stages,
            "rolling": model.rolling,
            "kv": model.kv,
            "kv_bytes": model.kv_bytes,
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
            "limits": {
                "max_concurrency": model.max_concurrency,
                "max_queue": model.max_queue,
                "max_wait_seconds": waits.longest,
            },
            "gateway": {
                "running": gate.inside,
                "waiting": gate.waiting,
                "waits": [asdict(wait) for wait in self._waits(model.name, time.monotonic())],
                "unplaced": status.broker.router.placing.waiting[model.name],
                "mean_service_seconds": round(gate.mean_seconds, 4),
                "predicted_wait_seconds": None if wait is None else round(wait, 4),
            },
        }
