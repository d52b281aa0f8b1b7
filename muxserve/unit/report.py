"""The unit's state as data: for `/fleet`, `/metrics` and `muxserve status`."""

from __future__ import annotations

from collections.abc import Mapping

from muxserve.scheduling.admission import missing_pages
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.quotas import normalised_usage
from muxserve.scheduling.state import EngineState, ModelState
from muxserve.scheduling.types import WHOLE
from muxserve.unit.engines import EngineTable
from muxserve.unit.moving import Departures, Downtime
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.state import UnitState


def unit_state(
    state: UnitState,
    table: UnitRequestTable,
    moving: Departures,
    engines: EngineTable,
    degraded: Mapping[str, str],
    now: float,
) -> dict[str, object]:
    """JSON-ready. Times are seconds, shares fractions of the unit's compute, pages those of the model's pool."""
    unit_spec, ledger, policy, terminating = state.unit_spec, state.ledger, state.policy, state.terminating
    pids, idle, reconciliation = engines.pids, engines.bubbles, engines.reconciliation
    return {
        "unit": unit_spec.unit,
        "policy": policy.name,
        "shares": "per lease" if all(model.profile.engines.elastic for model in ledger.models) else "fixed",
        "epoch": state.epoch,
        "uptime_seconds": round(now - state.started, 3),
        "cores": unit_spec.cores,
        "budget_used": ledger.share_used / WHOLE,
        "memory_connected": ledger.memory_up,
        "gateways": len(table.gateways),
        "models": {
            model.name: _model(model, policy, now)
            | _both(model, idle.get(model.name, []))
            | _moves(model, model.name in terminating, moving)
            | {"missing": reconciliation.missing[model.name], "strays": reconciliation.strays[model.name]}
            | {"failures": engines.failures[model.name], "culprits": engines.culprits[model.name]}
            | {"costs": engines.costs.state(model.name), "stage_parts": engines.costs.stages(model.name)}
            | {"degraded": int(model.name in degraded), "degraded_reason": degraded.get(model.name, "")}
            for model in ledger.models
        },
        "pools": {
            name: {
                "total_pages": pool.profile.pages,
                "free_pages": pool.free,
                "cached_pages": pool.available - pool.free,
                "usage": {
                    m.name: round(r, 4)
                    for m, r in zip(
                        pool.models,
                        normalised_usage(pool, [m.profile for m in pool.models], [m.used for m in pool.models]),
                        strict=True,
                    )
                },
            }
            for name, pool in ledger.pools.items()
        },
        "engines": {
            f"{model.name}/{engine.phase}": _engine(engine, pids.get(f"{model.name}/{engine.phase}"), now)
            for model in ledger.models
            for engine in model.engines
        },
    }


def _model(model: ModelState, policy: Policy, now: float) -> dict[str, object]:
    tally = model.tally
    return {
        "pool": model.pool.profile.name,
        "queued": len(model.queue),
        "prefilling": len(model.prefilling),
        "handed": len(model.handed),
        "decoding": len(model.decoding),
        "arrived": tally.arrived,
        "finished": tally.finished,
        "returned": tally.returned,
        "lost": tally.lost,
        "cancelled": tally.cancelled,
        "quota_pages": model.quota,
        "limit_pages": policy.limit(model),
        "floor_pages": model.profile.floor_pages,
        "missing_pages": missing_pages(model, policy.limit(model)),
        "pages_per_block": model.pages_per_block,
        "used_pages": model.used,
        "cached_pages": model.cached,
        "phases": {str(engine.phase): _phase(engine, now) for engine in model.engines},
    }


def _both(model: ModelState, bubbles: list[float]) -> dict[str, object]:
    """For models with one engine of both phases: requests that waited for it to decode again after they had their first
    token, how long together, and the bubbles of its stages."""
    if not model.both:
        return {}
    return {
        "phase_switches": model.tally.phase_switches,
        "phase_switch_seconds": round(model.tally.phase_switch_seconds, 6),
        "bubbles": [round(seconds, 6) for seconds in bubbles],
    }


def _moves(model: ModelState, terminating: bool, moving: Departures) -> dict[str, object]:
    """How the model stands as a replica. `downtime_seconds` is for how long requests that moved away stood still;
    `moves` counts those under way by what they wait for."""
    tally = model.tally
    downtime = moving.downtimes.get(model.name, Downtime())
    return {
        "terminating": terminating,
        "retired": model.retired,
        "moving": len(model.moving),
        "moves": moving.under_way(model.name),
        "given_back": tally.given_back,
        "moved_in": tally.moved_in,
        "moved_out": tally.moved_out,
        "moves_aborted": tally.moves_aborted,
        "downtime_seconds": round(downtime.total, 6),
        "last_downtime_seconds": round(downtime.last, 6),
        "most_downtime_seconds": round(downtime.most, 6),
    }


def _phase(engine: EngineState, now: float) -> dict[str, object]:
    waiting = now - engine.wait_since if engine.wait_since is not None else 0.0
    found: dict[str, object] = {
        "jobs": engine.jobs,
        "tokens": engine.tokens,
        "busy_seconds": round(engine.busy_seconds, 6),
        "leases": engine.leases,
        "lease_waits": engine.waits,
        "lease_wait_seconds": round(engine.wait_seconds + waiting, 6),
        "share": engine.share / WHOLE,
        "step_seconds": round(engine.step_seconds, 6),
    }
    alone = engine.prefills
    if alone is None:
        return found
    return found | {
        "jobs": engine.jobs + alone.jobs,
        "tokens": engine.tokens + alone.tokens,
        "busy_seconds": round(engine.busy_seconds + alone.busy_seconds, 6),
        # Steps that did nothing but prefill; tokens of prompts, whatever the step.
        "prefill_jobs": alone.jobs,
        "prefill_tokens": alone.tokens,
        "prefill_busy_seconds": round(alone.busy_seconds, 6),
    }


def _engine(engine: EngineState, pid: int | None, now: float) -> dict[str, object]:
    lease = engine.lease
    return {
        "up": engine.up,
        "suspect": engine.suspect,
        "pid": pid,
        "requests": len(engine.inside),
        "lease": None
        if lease is None
        else {
            "id": lease.lease_id,
            "steps": lease.steps,
            "left": lease.left,
            "seconds_left": round(lease.deadline - now, 6),
            "share": lease.share / WHOLE,
            "phase": str(lease.phase),
        },
    }
