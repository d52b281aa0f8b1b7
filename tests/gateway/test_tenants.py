"""Tenants at the endpoint, around an application that answers at once; and what gateways share."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from muxserve.gateway.http.errors import Receive, Scope, Send, respond, respond_json
from muxserve.gateway.http.http_request import current_http
from muxserve.gateway.http.own_paths import OwnPaths
from muxserve.gateway.limits.admission import Caller
from muxserve.gateway.limits.tenants import LimitExceededError, MinuteBucket, SharedLimits, Tenancy
from muxserve.gateway.routing.requests import Tracked
from muxserve.gateway.status.measure import RequestOutcome
from muxserve.gateway.usage.usage_log import Used
from muxserve.spec import FleetSpec, GatewaySpec, HttpSpec, TenantLimits, TenantSpec
from tests.gateway.endpoint import endpoint_of
from tests.gateway.unit_specs import model
from tests.support.requests import asking

OPERATOR = "of-the-operator"
FREE = TenantLimits()


def tenant(name: str, limits: TenantLimits = FREE, **more: Any) -> TenantSpec:
    """A tenant whose key is its name."""
    return TenantSpec(name, (hashlib.sha256(name.encode()).hexdigest(),), limits=limits, **more)


class Endpoint:
    """An endpoint with two models. Every answer has ten prompt tokens, three of them cached, and five of output."""

    def __init__(self, directory: Path, *tenants: TenantSpec) -> None:
        self.registry = CollectorRegistry()
        self.fleet = FleetSpec(
            run_dir=str(directory),
            gateway=GatewaySpec("127.0.0.1", 0, [OPERATOR], http=HttpSpec(access_log=True)),
            models=[model("a"), model("b")],
            units=[],
            tenants=tenants,
            usage_file=str(directory / "usage.sqlite"),
        )
        own = OwnPaths(pages={"/fleet": lambda scope, send: respond_json(send, {})})
        self.app = endpoint_of(self.fleet, self.serve, own, self.registry)
        self.tenancy = self.app.access.tenancy
        self.hold: asyncio.Event | None = None
        self.inside = asyncio.Event()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.inside.set()
        if self.hold is not None:
            await self.hold.wait()
        http = current_http.get()
        assert http is not None
        request = Tracked(
            "r",
            front_id="f",
            spec=asking(http.model, 10, 5),
            arrival=http.arrival,
            context=http,
            cached_tokens=3,
        )
        if http.tenant is not None:
            http.tenant.prompted(request.spec.prompt_tokens)
        request.emitted, request.first_token_at, request.last_token_at = [1, 2, 3, 4, 5], http.arrival, http.arrival
        self.app._measures.ended(request, RequestOutcome.COMPLETED, http.arrival)
        await respond(send, 200, b"{}")

    def client(self, key: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


async def ask(endpoint: Endpoint, key: str, name: str = "a") -> httpx.Response:
    async with endpoint.client(key) as http:
        return await http.post("/v1/completions", json={"model": name, "prompt": "x"})


async def get(endpoint: Endpoint, key: str, path: str) -> httpx.Response:
    async with endpoint.client(key) as http:
        return await http.get(path)


@pytest.fixture
async def closing() -> AsyncIterator[list[Endpoint]]:
    endpoints: list[Endpoint] = []
    yield endpoints
    for each in endpoints:
        each.tenancy.close()


# ------------------------------------------------------------ what each may use


async def test_a_tenant_has_its_own_models_only(tmp_path: Path, closing: list[Endpoint]) -> None:
    endpoint = Endpoint(tmp_path, tenant("first", models=("b",)), tenant("second"))
    closing.append(endpoint)
    listed = (await get(endpoint, "first", "/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["b"]
    assert len((await get(endpoint, "second", "/v1/models")).json()["data"]) == 2
    refused = await ask(endpoint, "first", "a")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "the model 'a' does not exist; this key has b"
    assert (await get(endpoint, "first", "/v1/models/a")).status_code == 404
    assert (await get(endpoint, "first", "/models/a/v1/models")).status_code == 404
    assert (await ask(endpoint, "first", "b")).status_code == 200
    # One that has one model only need not name it.
    async with endpoint.client("first") as http:
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert (await ask(endpoint, "nobody")).status_code == 401
    assert (await ask(endpoint, OPERATOR)).status_code == 200


async def test_the_access_log_names_the_tenant(
    tmp_path: Path, closing: list[Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint(tmp_path, tenant("first", models=("b",)))
    closing.append(endpoint)
    with caplog.at_level("INFO", logger="muxserve.access"):
        for key in ("first", OPERATOR, "nobody"):
            await ask(endpoint, key, "b")
        await ask(endpoint, "first", "a")
        await get(endpoint, "first", "/fleet")
    said = [dict(part.split("=", 1) for part in each.getMessage().split() if "=" in part) for each in caplog.records]
    assert [(each["tenant"], each["status"]) for each in said] == [
        *(("first", "200"), ("-", "200"), ("-", "401"), ("first", "404"), ("first", "403"))
    ]


async def test_the_fleets_state_is_for_admins(tmp_path: Path, closing: list[Endpoint]) -> None:
    endpoint = Endpoint(tmp_path, tenant("user"), tenant("boss", admin=True))
    closing.append(endpoint)
    answers = {key: (await get(endpoint, key, "/fleet")).status_code for key in ("user", "boss", OPERATOR)}
    assert answers == {"user": 403, "boss": 200, OPERATOR: 200}


# ------------------------------------------------------------ limits


async def test_requests_per_minute(tmp_path: Path, closing: list[Endpoint]) -> None:
    endpoint = Endpoint(tmp_path, tenant("one", TenantLimits(requests_per_minute=2)), tenant("other"))
    closing.append(endpoint)
    first, second, third = [await ask(endpoint, "one") for _ in range(3)]
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert [r.headers["x-ratelimit-limit-requests"] for r in (first, third)] == ["2", "2"]
    assert [r.headers["x-ratelimit-remaining-requests"] for r in (first, third)] == ["1", "0"]
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert 1 <= int(third.headers["retry-after"]) <= 30
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("RateLimitError", 429)
    assert error["message"].startswith("tenant one is at its limit of 2 requests per minute; try again in ")
    assert "x-ratelimit-limit-tokens" not in first.headers
    # Nobody else is concerned, and who has no limit is told of none.
    other = await ask(endpoint, "other")
    assert other.status_code == 200
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]
    refused = {"tenant": "one", "model_name": "a", "limit": "requests"}
    assert endpoint.sample("muxserve_tenant_requests_refused_total", **refused) == 1


async def test_tokens_per_minute_may_be_overdrawn_once(tmp_path: Path, closing: list[Endpoint]) -> None:
    endpoint = Endpoint(tmp_path, tenant("one", TenantLimits(tokens_per_minute=20)))
    closing.append(endpoint)
    first, second, third = [await ask(endpoint, "one") for _ in range(3)]
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-remaining-tokens"] == "5"  # of 20, without 10 of the prompt and 5 of the answer
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    # 10 too many, at 20 a minute.
    assert 20 <= int(third.headers["retry-after"]) <= 33
    assert "20 tokens per minute" in third.json()["error"]["message"]


async def test_concurrency(tmp_path: Path, closing: list[Endpoint]) -> None:
    endpoint = Endpoint(tmp_path, tenant("one", TenantLimits(max_concurrency=1)))
    closing.append(endpoint)
    endpoint.hold = asyncio.Event()
    running = asyncio.create_task(ask(endpoint, "one"))
    await endpoint.inside.wait()
    refused = await ask(endpoint, "one")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "1 requests at once" in refused.json()["error"]["message"]
    endpoint.hold.set()
    assert (await running).status_code == 200
    assert (await ask(endpoint, "one")).status_code == 200


async def test_a_limits_file_that_fails_lets_everybody_in(
    tmp_path: Path, closing: list[Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint(tmp_path, tenant("one", TenantLimits(requests_per_minute=1)))
    closing.append(endpoint)
    assert [(await ask(endpoint, "one")).status_code for _ in range(2)] == [200, 429]
    with sqlite3.connect(tmp_path / "tenants.sqlite", isolation_level=None) as db:
        db.execute("DROP TABLE buckets")
    assert [(await ask(endpoint, "one")).status_code for _ in range(2)] == [200, 200]
    assert "limits of tenants are not held at present" in caplog.text


async def test_a_limits_file_that_is_locked_for_a_moment_keeps_nobody_out(
    tmp_path: Path, closing: list[Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint(tmp_path, tenant("one", TenantLimits(max_concurrency=1)))
    closing.append(endpoint)
    limits = endpoint.tenancy.limits
    endpoint.hold = asyncio.Event()
    first = asyncio.create_task(ask(endpoint, "one"))
    await endpoint.inside.wait()
    assert (await ask(endpoint, "one")).status_code == 429
    other = sqlite3.connect(tmp_path / "tenants.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    endpoint.hold.set()
    # Neither what ends now fails, nor what begins, which is let in.
    assert (await first).status_code == 200
    assert (await ask(endpoint, "one")).status_code == 200
    assert "limits of tenants are not held at present: database is locked" in caplog.text
    other.execute("COMMIT")
    limits.settle()
    assert other.execute("SELECT requests FROM running").fetchall() == [(0,)]
    other.close()
    endpoint.hold, endpoint.inside = asyncio.Event(), asyncio.Event()
    next_one = asyncio.create_task(ask(endpoint, "one"))
    await endpoint.inside.wait()
    assert (await ask(endpoint, "one")).status_code == 429
    endpoint.hold.set()
    assert (await next_one).status_code == 200


def test_gateways_share_limits_and_one_that_died_holds_nothing(tmp_path: Path) -> None:
    now = 0.0
    pair = [SharedLimits(str(tmp_path / "limits"), index, lambda: now) for index in range(2)]
    limited = tenant("one", TenantLimits(requests_per_minute=3, max_concurrency=2))
    pair[0].enter(limited)
    pair[0].enter(limited)
    with pytest.raises(LimitExceededError) as refused:
        pair[1].enter(limited)
    assert refused.value.kind == "concurrency"
    # Gateway 0 dies; another takes its place.
    again = SharedLimits(str(tmp_path / "limits"), 0, lambda: now)
    pair[1].enter(limited)
    with pytest.raises(LimitExceededError) as refused:
        again.enter(limited)
    assert (refused.value.kind, refused.value.seconds) == ("requests", 20.0)
    now = 20.0
    again.enter(limited)
    for each in (*pair, again):
        each.close()


@settings(deadline=None)
@given(
    per_minute=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=50),
)
def test_a_bucket_lets_no_more_through_than_flowed_in(per_minute: int, steps: list[tuple[float, int]]) -> None:
    """With one amount of overdraft beyond what is full at the start."""
    bucket, now, spent, largest = MinuteBucket(per_minute, float(per_minute), 0.0), 0.0, 0, 0
    for pause, amount in steps:
        now += pause
        bucket = bucket.filled(now)
        if bucket.level < 1:
            assert bucket.filled(now + bucket.seconds_until(1) + 1e-6).level >= 1 - 1e-6
            continue
        bucket, spent, largest = bucket.spend(amount), spent + amount, max(largest, amount)
        assert spent <= per_minute + now * per_minute / 60 + largest + 1e-6


# ------------------------------------------------------------ what was used


async def test_usage_is_kept_over_restarts(tmp_path: Path, closing: list[Endpoint]) -> None:
    tenants = tenant("one"), tenant("two"), tenant("boss", admin=True)
    before = Endpoint(tmp_path, *tenants)
    for key, name in [("one", "a"), ("one", "a"), ("two", "b"), (OPERATOR, "a")]:
        await ask(before, key, name)
    before.tenancy.close()
    after = Endpoint(tmp_path, *tenants)
    closing.append(after)
    await ask(after, "one", "a")
    rows = (await get(after, "boss", "/admin/usage")).json()["data"]
    found = [tuple(row[key] for key in row if key != "day") for row in rows]
    assert found == [("-", "a", 1, 10, 3, 5), ("one", "a", 3, 30, 9, 15), ("two", "b", 1, 10, 3, 5)]
    # A tenant sees its own, whatever it asks for; days can be chosen.
    own = (await get(after, "two", "/admin/usage?tenant=one")).json()["data"]
    assert [row["tenant"] for row in own] == ["two"]
    assert (await get(after, "boss", "/admin/usage?tenant=one")).json()["data"] == [
        r for r in rows if r["tenant"] == "one"
    ]
    day = rows[0]["day"]
    assert (await get(after, OPERATOR, f"/admin/usage?since={day}&until={day}")).json()["data"] == rows
    assert (await get(after, OPERATOR, "/admin/usage?until=2000-01-01")).json()["data"] == []
    wrong = await get(after, OPERATOR, "/admin/usage?since=yesterday")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since")
    of_one = {"tenant": "one", "model_name": "a"}
    assert after.sample("muxserve_tenant_tokens_total", **of_one, kind="cached") == 3
    assert after.sample("muxserve_tenant_requests_total", **of_one, outcome="completed") == 1


async def test_usage_that_cannot_be_written_is_kept_for_later(
    tmp_path: Path, closing: list[Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint(tmp_path, tenant("one"))
    closing.append(endpoint)
    usage = endpoint.tenancy.usage
    assert usage is not None
    usage.add("one", "a", Used(output_tokens=7))
    for each in tmp_path.glob("usage.sqlite*"):
        each.unlink()
    (tmp_path / "usage.sqlite").mkdir()
    await usage.flush()
    assert "cannot be written" in caplog.text
    (tmp_path / "usage.sqlite").rmdir()
    usage.add("one", "a", Used(output_tokens=1))
    (row,) = (await get(endpoint, "one", "/admin/usage")).json()["data"]
    assert row["output_tokens"] == 8


async def test_a_model_that_was_removed_has_no_series(tmp_path: Path, closing: list[Endpoint]) -> None:
    closing.append(endpoint := Endpoint(tmp_path, tenant("one")))

    def models() -> set[str]:
        samples = [each for family in endpoint.registry.collect() for each in family.samples]
        return {each.labels["model_name"] for each in samples if "tenant" in each.labels}

    assert (await ask(endpoint, "one")).status_code == 200
    assert models() == {"a"}
    endpoint.tenancy.forget("a")
    assert models() == set()


async def test_nothing_is_counted_without_tenants(tmp_path: Path) -> None:
    declared = Endpoint(tmp_path).fleet
    for each in tmp_path.glob("usage.sqlite*"):
        each.unlink()
    alone = msgspec.structs.replace(declared, usage_file="")
    tenancy = Tenancy(alone, 0, CollectorRegistry())
    with tenancy.serving(Caller(), "a") as turn:
        assert turn is None
    assert not (tmp_path / "usage.sqlite").exists()
