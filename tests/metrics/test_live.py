"""What a frame of the fleet says, made of what gateways and units say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from muxserve.metrics.live import LiveFrame, LiveJob, LiveMove, PoolPart, RecentLoad, Spread, live_frame


def unit(name: str, **models: dict[str, Any]) -> dict[str, Any]:
    """A unit as `/fleet` has it, which has said all this of its models."""
    state = {
        "policy": "adbs",
        "budget_used": 0.75,
        "models": {model: {"pool": "main", **of} for model, of in models.items()},
        "pools": {"main": {"total_pages": 999, "free_pages": 500}},
    }
    pools = [{"name": "main", "page_bytes": 4096, "num_pages": 1000}]
    return {"name": name, "status": "up", "remote": False, "serves": [*models], "pools": pools, "state": state}


def model(name: str, replicas: list[str], **more: Any) -> dict[str, Any]:
    slo = {"ttft_ms": 300.0, "tpot_ms": None}
    return {
        "name": name,
        "health": "up",
        "degraded": None,
        "replicas": replicas,
        "replica_bounds": (1, None),
        "shape": "split",
        "slo": slo,
    } | more


def frame(units: list[dict[str, Any]], models: list[dict[str, Any]], *loads: dict[str, RecentLoad]) -> LiveFrame:
    fleet = {"status": "ok", "units": units, "models": models, "gateway": {"count": len(loads)}}
    return live_frame(5.0, fleet, loads, [], [])


def test_replicas_and_gateways_are_added_up() -> None:
    counts = {
        "queued": 1,
        "prefilling": 2,
        "decoding": 3,
        "phases": {"prefill": {"tokens": 10}, "decode": {"tokens": 5}},
    }
    units = [unit("u0", m=counts), unit("u1", m=counts)]
    loads = [RecentLoad(1, 2, [0.1, 0.2], [0.01], 2, 1), RecentLoad(3, 4, [0.3], [], 1, 1)]
    (shown,) = frame(units, [model("m", ["u0", "u1"])], *({"m": load} for load in loads)).models
    assert (shown.running, shown.waiting, shown.queued, shown.prefilling, shown.decoding) == (4, 6, 2, 4, 6)
    assert (shown.tokens, shown.requests) == (30, 3)
    assert shown.ttft == Spread(0.2, pytest.approx(0.29))
    assert shown.tpot == Spread(0.01, 0.01)
    assert (shown.slo_ttft, shown.slo_tpot) == (0.3, None)
    assert shown.met == pytest.approx(2 / 3)


def test_a_model_without_requests_has_no_latencies() -> None:
    (shown,) = frame([unit("u0", m={})], [model("m", ["u0"])], {"m": RecentLoad()}).models
    assert (shown.ttft, shown.tpot, shown.met) == (None, None, None)


def test_why_a_model_cannot_be_served_is_said() -> None:
    (shown,) = frame([], [model("m", [], health="degraded", degraded="its weights are gone")]).models
    assert (shown.status, shown.reason) == ("degraded", "its weights are gone")


def test_pages_of_a_unit() -> None:
    parts = {"used_pages": 100, "cached_pages": 20, "quota_pages": 400}
    served = [model(name, ["u0"]) for name in "abc"]
    (shown,) = frame([unit("u0", a=parts, b={"pool": "other"}, c={"terminating": True})], served).units
    (pool,) = shown.pools
    assert (pool.pages, pool.free, pool.page_bytes) == (999, 500, 4096)
    assert pool.models == [PoolPart("a", 100, 20, 400), PoolPart("c", 0, 0, 0)]
    assert (shown.draining, shown.share_used, shown.policy) == (["c"], 0.75, "adbs")


def test_a_model_that_was_removed_is_gone() -> None:
    """Units remember it, and its jobs are in their timelines for a while."""
    left = unit("u0", m={"used_pages": 1}, gone={"used_pages": 2, "terminating": True})
    fleet = {"status": "ok", "units": [left], "models": [model("m", ["u0"])], "gateway": {"count": 1}}
    jobs = [LiveJob("u0", name, name, "decode", 0.5, 1.0, 2.0, 1, 1) for name in ("m", "gone")]
    moves = [LiveMove("u0", 1.0, name, "u1", 0.0) for name in ("m", "gone")]
    shown = live_frame(5.0, fleet, [], jobs, moves)
    assert [part.model for part in shown.units[0].pools[0].models] == ["m"]
    assert shown.units[0].draining == []
    assert [each.model for each in (*shown.jobs, *shown.moves)] == ["m", "m"]


def test_a_unit_that_has_not_spoken_yet() -> None:
    silent = {**unit("u0"), "status": "down", "state": {}}
    (shown,) = frame([silent], []).units
    assert (shown.status, shown.policy, shown.pools[0].free) == ("down", "", 1000)


def test_frames_are_read_as_they_were_written() -> None:
    job = LiveJob("u0", key="e.1", model="m", phase="decode", share=0.5, start=1.0, end=1.1, steps=3, tokens=12)
    before = msgspec.structs.replace(frame([unit("u0", m={})], [model("m", ["u0"])]), jobs=[job])
    before = msgspec.structs.replace(before, moves=[LiveMove("u0", 1.0, "m", "u1", 0.02)])
    assert msgspec.json.decode(msgspec.json.encode(before), type=LiveFrame) == before
