"""The fleet at one moment, for people who look at it: what the gateway streams to its page and to `muxserve top`. Pure.

Times are seconds, shares fractions of a unit's compute, and pages those of a pool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from muxserve.metrics.definitions import percentile

# Latencies are of the requests that ended in this time; jobs and moves are shown for that long.
LATENCY_WINDOW_SECONDS = 60.0
JOBS_WINDOW_SECONDS = 30.0


class RecentLoad(msgspec.Struct):
    """What one gateway has of a model: requests in service and waiting, and of those that ended in the last
    `LATENCY_WINDOW_SECONDS` the latencies, how many were judged by objectives, and how many of these met all."""

    running: int = 0
    waiting: int = 0
    ttft: list[float] = []
    tpot: list[float] = []
    judged: int = 0
    met: int = 0


class Spread(msgspec.Struct, frozen=True):
    """Median and 95th percentile of a latency."""

    p50: float
    p95: float


class LiveModel(msgspec.Struct, frozen=True):
    """A model of the fleet; `status` is as `/health` has it, `reason` why it is degraded.

    `running` and `waiting` are at the gateways, the counts after them in the units; `tokens` are all that its engines
    computed, prompts included. `met` is the share of requests that met all objectives. `bounds` are the fewest and the
    most replicas that can be asked for (None: no limit); None in place of both where memory decides."""

    name: str
    status: str
    reason: str
    shape: str
    replicas: list[str]
    bounds: tuple[int, int | None] | None
    running: int
    waiting: int
    queued: int
    prefilling: int
    decoding: int
    tokens: int
    requests: int
    ttft: Spread | None
    tpot: Spread | None
    slo_ttft: float | None
    slo_tpot: float | None
    met: float | None


class PoolPart(msgspec.Struct, frozen=True):
    """What a model has of a pool: pages in use, pages of prefixes that only the cache holds, and its quota."""

    model: str
    used: int
    cached: int
    quota: int


class LivePool(msgspec.Struct, frozen=True):
    """A pool of pages."""

    name: str
    pages: int
    free: int
    page_bytes: int
    models: list[PoolPart]


class LiveUnit(msgspec.Struct, frozen=True):
    """A unit; `share_used` is what leases have of its compute now, `draining` the models that are leaving it."""

    name: str
    status: str
    policy: str
    remote: bool
    serves: list[str]
    draining: list[str]
    share_used: float
    pools: list[LivePool]


class LiveJob(msgspec.Struct, frozen=True, array_like=True):
    """Steps of one engine, end to end. `start` and `end` are Unix time. One that goes on comes again, longer, under the
    same `key`, which is unique in its unit."""

    unit: str
    key: str
    model: str
    phase: str
    share: float
    start: float
    end: float
    steps: int
    tokens: int


class LiveMove(msgspec.Struct, frozen=True, array_like=True):
    """A request went from `unit` to `destination` at `at`, Unix time, and stood still for `seconds`."""

    unit: str
    at: float
    model: str
    destination: str
    seconds: float


class LiveFrame(msgspec.Struct, frozen=True):
    """Everything at `time` (Unix). `jobs` and `moves` are those that are new since the frame before."""

    time: float
    status: str
    gateways: int
    models: list[LiveModel]
    units: list[LiveUnit]
    jobs: list[LiveJob]
    moves: list[LiveMove]


def live_frame(
    at: float,
    fleet: Mapping[str, Any],
    loads: Iterable[Mapping[str, RecentLoad]],
    jobs: list[LiveJob],
    moves: list[LiveMove],
) -> LiveFrame:
    """The frame of a fleet.

    Args:
        at: Unix time.
        fleet: the answer of `/fleet`; what a unit has not said yet may be missing.
        loads: of each gateway, by model.
        jobs, moves: what is new.
    """
    each = list(loads)
    units: list[Mapping[str, Any]] = fleet["units"]
    # Units remember models that were removed from the fleet.
    names = {model["name"] for model in fleet["models"]}
    return LiveFrame(
        at,
        fleet["status"],
        fleet["gateway"]["count"],
        [
            _model(model, units, [load[model["name"]] for load in each if model["name"] in load])
            for model in fleet["models"]
        ],
        [_unit(unit, names) for unit in units],
        [job for job in jobs if job.model in names],
        [move for move in moves if move.model in names],
    )


def _model(model: Mapping[str, Any], units: Sequence[Mapping[str, Any]], loads: Sequence[RecentLoad]) -> LiveModel:
    name = model["name"]
    said = [_models(unit).get(name) or {} for unit in units]
    ttft, tpot = [t for load in loads for t in load.ttft], [t for load in loads for t in load.tpot]
    judged = sum(load.judged for load in loads)
    slo_ttft, slo_tpot = (_seconds(model["slo"][key]) for key in ("ttft_ms", "tpot_ms"))
    return LiveModel(
        name=name,
        status=model["health"],
        reason=model.get("degraded") or "",
        shape=model["shape"],
        replicas=model["replicas"],
        bounds=model["replica_bounds"],
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        queued=sum(each.get("queued", 0) for each in said),
        prefilling=sum(each.get("prefilling", 0) for each in said),
        decoding=sum(each.get("decoding", 0) for each in said),
        tokens=sum(phase.get("tokens", 0) for each in said for phase in (each.get("phases") or {}).values()),
        requests=len(ttft),
        ttft=_spread(ttft),
        tpot=_spread(tpot),
        slo_ttft=slo_ttft,
        slo_tpot=slo_tpot,
        met=sum(load.met for load in loads) / judged if judged else None,
    )


def _unit(unit: Mapping[str, Any], names: Collection[str]) -> LiveUnit:
    state = unit.get("state") or {}
    models = {name: of for name, of in _models(unit).items() if name in names}
    spoken: Mapping[str, Mapping[str, Any]] = state.get("pools") or {}
    pools = []
    for pool in unit["pools"]:
        now = spoken.get(pool["name"]) or {}
        total = now.get("total_pages", pool["num_pages"])
        parts = [
            PoolPart(name, of.get("used_pages", 0), of.get("cached_pages", 0), of.get("quota_pages", 0))
            for name, of in models.items()
            if of.get("pool", pool["name"]) == pool["name"]
        ]
        pools.append(LivePool(pool["name"], total, now.get("free_pages", total), pool["page_bytes"], parts))
    return LiveUnit(
        name=unit["name"],
        status=unit["status"],
        policy=state.get("policy", ""),
        remote=unit["remote"],
        serves=unit["serves"],
        draining=[name for name, of in models.items() if of.get("terminating")],
        share_used=state.get("budget_used", 0.0),
        pools=pools,
    )


def _models(unit: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return (unit.get("state") or {}).get("models") or {}


def _spread(values: list[float]) -> Spread | None:
    return Spread(percentile(values, 0.5), percentile(values, 0.95)) if values else None


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
