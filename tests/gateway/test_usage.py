"""The usage database: several gateways, deaths in the middle of writes, keys, and what an earlier version left."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from muxserve.gateway.usage.database import UsageDatabase
from muxserve.gateway.usage.issued_keys import IssuedKeys
from muxserve.gateway.usage.usage_log import UsageLog, Used
from muxserve.spec import BudgetSpec
from tests.gateway.test_tenants import OPERATOR, Endpoint, ask, get, tenant

ALWAYS = ("0001-01-01", "9999-12-31", None)


def total(file: Path, by: str = "model") -> int:
    log = UsageLog(str(file))
    rows = log.read(*ALWAYS, by=by)
    log.close()
    return sum(int(str(row["output_tokens"])) for row in rows)


# ------------------------------------------------------------ writes


async def test_a_portion_that_was_written_and_is_tried_again_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error came behind the commit, as one of a disk may."""
    log = UsageLog(str(tmp_path / "usage.sqlite"))
    log.add("one", "a", Used(1, output_tokens=5), "key_1")
    read, failures = log._read_sums, [True]

    def fails_once(*args: Any) -> Any:
        if failures.pop() if failures else False:
            raise sqlite3.OperationalError("disk I/O error")
        return read(*args)

    monkeypatch.setattr(log, "_read_sums", fails_once)
    await log.flush()
    log.add("one", "a", Used(1, output_tokens=7), "key_1")
    await log.flush()
    log.close()
    assert total(tmp_path / "usage.sqlite") == total(tmp_path / "usage.sqlite", "key") == 12


def _write_until_killed(file: str, pipe: Any) -> None:
    log = UsageLog(file)

    async def write() -> None:
        count = 0
        while True:
            log.add("one", "a", Used(1, output_tokens=1), "key_1")
            count += 1
            await log.flush()
            pipe.send(count)

    asyncio.run(write())


def test_gateways_that_are_killed_lose_or_repeat_no_write(tmp_path: Path) -> None:
    """Each is killed in the middle of its writes; every one that it knew to be done is there, and at most one more."""
    file = str(tmp_path / "usage.sqlite")
    UsageDatabase(file).connection().close()
    context = multiprocessing.get_context("fork")
    known = 0
    for _ in range(3):
        running = []
        for _ in range(2):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_write_until_killed, args=(file, theirs))
            process.start()
            theirs.close()
            running.append((process, ours))
        for process, ours in running:
            while ours.recv() < 20:
                pass
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        for _, ours in running:
            last = 20
            try:
                while True:
                    last = max(last, ours.recv())
            except EOFError:
                known += last
    found = total(tmp_path / "usage.sqlite")
    assert known <= found <= known + 6
    assert found == total(tmp_path / "usage.sqlite", "key")


def test_rows_of_an_earlier_version_are_read_and_it_may_write_beside_this_one(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    before = sqlite3.connect(file, isolation_level=None)
    before.execute(
        "CREATE TABLE usage (day TEXT, tenant TEXT, model TEXT, requests INTEGER, prompt_tokens INTEGER, "
        "cached_tokens INTEGER, output_tokens INTEGER, PRIMARY KEY (day, tenant, model)) WITHOUT ROWID"
    )
    before.execute("INSERT INTO usage VALUES ('2026-01-01', 'one', 'a', 1, 2, 0, 3)")
    log = UsageLog(str(file))
    log.load()
    before.execute("INSERT INTO usage VALUES ('2026-01-02', 'one', 'a', 1, 2, 0, 4)")
    before.close()
    log.close()
    assert total(file) == 7


async def test_a_restored_file_is_written_to(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    log = UsageLog(str(file))
    log.add("one", "a", Used(output_tokens=1))
    await log.flush()
    for each in tmp_path.glob("usage.sqlite*"):
        each.unlink()
    log.add("one", "a", Used(output_tokens=2))
    await log.flush()
    log.close()
    assert total(file) == 2


# ------------------------------------------------------------ budgets


async def test_a_budget_that_is_used_up_is_refused_as_openai_does(tmp_path: Path) -> None:
    spec = tenant("one", budgets=(BudgetSpec("day", 30), BudgetSpec("month", 15, "b")))
    endpoint = Endpoint(tmp_path, spec, tenant("other"))
    assert (await ask(endpoint, "one", "b")).status_code == 200  # 15 tokens
    refused = await ask(endpoint, "one", "b")
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert "15 tokens of its budget of 15 per month for model b; the budget is reset at 20" in error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "false"
    assert (await ask(endpoint, "one", "a")).status_code == 200
    # Another gateway knows of it, and so does the next run.
    endpoint.tenancy.close()
    after = Endpoint(tmp_path, spec, tenant("other"))
    refused = await ask(after, "one", "a")
    assert "30 tokens of its budget of 30 per day for all models" in refused.json()["error"]["message"]
    assert (await ask(after, "other", "a")).status_code == 200
    assert (await ask(after, OPERATOR, "a")).status_code == 200
    told = (await get(after, "one", "/admin/usage")).json()["budgets"]
    assert [(each["period"], each["model"], each["used"], each["tokens"]) for each in told] == [
        ("day", "", 30, 30),
        ("month", "b", 15, 15),
    ]
    labels = {"tenant": "one", "model_name": "a", "limit": "day_budget"}
    assert after.sample("muxserve_tenant_requests_refused_total", **labels) == 1
    after.tenancy.close()


async def test_gateways_count_for_each_other(tmp_path: Path) -> None:
    spec = tenant("one", budgets=(BudgetSpec("day", 15),))
    pair = [Endpoint(tmp_path, spec) for _ in range(2)]
    assert (await ask(pair[0], "one")).status_code == 200
    for each in pair:
        usage = each.tenancy.usage
        assert usage is not None
        await usage.flush()
    assert (await ask(pair[1], "one")).status_code == 429
    for each in pair:
        each.tenancy.close()


# ------------------------------------------------------------ keys


class Keys:
    def __init__(self, file: Path) -> None:
        self.now = 1000.0
        self.first, self.second = (IssuedKeys(str(file), lambda: self.now) for _ in range(2))

    def find(self, keys: IssuedKeys, text: str) -> str | None:
        import hashlib

        found = keys.find(hashlib.sha256(text.encode()).digest())
        return found.id if found is not None else None


def test_a_key_opens_every_gateway_until_it_is_revoked_or_expires(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "usage.sqlite")
    for_ever, text = keys.first.create("one", "ci", None)
    keys.now += 1.0
    brief, other = keys.second.create("one", "", 60.0)
    for each in (keys.first, keys.second):
        assert (keys.find(each, text), keys.find(each, other)) == (for_ever.id, brief.id)
        assert keys.find(each, "mux-nonsense") is None
    keys.now += 60.0
    assert keys.find(keys.first, other) is None
    revoked = keys.second.revoke(for_ever.id)
    assert revoked is not None
    assert revoked.revoked_at == keys.now
    assert keys.find(keys.first, text) is None
    assert keys.first.is_revoked(for_ever.id)
    assert not keys.first.is_revoked(brief.id)
    keys.now += 1.0
    again = keys.first.revoke(for_ever.id)
    assert again == revoked
    assert keys.first.revoke("key_none") is None
    assert [key.status(keys.now) for key in keys.first.all()] == ["revoked", "expired"]
    # The file has no key, only what it comes to.
    assert not [file for file in tmp_path.glob("usage.sqlite*") if text.encode() in file.read_bytes()]
    assert (tmp_path / "usage.sqlite").stat().st_mode & 0o077 == 0
    keys.first.close()
    keys.second.close()


async def admin(endpoint: Endpoint, method: str, path: str, key: str = OPERATOR, **body: Any) -> httpx.Response:
    from muxserve.gateway.http.keys import KeyRoutes

    if not endpoint.app._own.apps:
        routes = KeyRoutes(endpoint.tenancy, lambda: [each.name for each in endpoint.fleet.tenants])
        endpoint.app._own.apps.update(routes.apps())  # type: ignore[attr-defined]
    async with endpoint.client(key) as http:
        return await http.request(method, path, json=body or None)


async def test_keys_are_made_and_revoked_over_http(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path, tenant("one", models=("a",)), tenant("boss", admin=True))
    made = (await admin(endpoint, "POST", "/admin/keys", tenant="one", name="ci", expires_in=3600)).json()
    assert made["key"].startswith("mux-")
    assert (made["tenant"], made["status"], made["hint"]) == ("one", "active", made["key"][-4:])
    assert (await ask(endpoint, made["key"], "a")).status_code == 200
    assert (await ask(endpoint, made["key"], "b")).status_code == 404  # its tenant may not use it
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"tenant": "on"}, "there is no tenant 'on'; did you mean 'one'?"),
        ({"tenant": "one", "expires_in": -1}, "'expires_in' is a number of seconds"),
        ({"tenant": "one", "name": "x" * 65}, "'name' has at most 64"),
        ({"name": "ci"}, "missing required field `tenant`"),
    ]
    for wrong, words in wrongs:
        refused = await admin(endpoint, "POST", "/admin/keys", "boss", **wrong)
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]
    assert (await admin(endpoint, "GET", "/admin/keys", "one")).status_code == 403
    assert (await admin(endpoint, "GET", "/admin/keys", made["key"])).status_code == 403
    usage = endpoint.tenancy.usage
    assert usage is not None
    await usage.flush()
    (listed,) = (await admin(endpoint, "GET", "/admin/keys?tenant=one", "boss")).json()["data"]
    assert "key" not in listed
    assert (listed["id"], listed["last_used_on"]) == (made["id"], (await rows_by_key(endpoint))[made["id"]]["day"])
    assert (await admin(endpoint, "DELETE", f"/admin/keys/{made['id']}", "boss")).json()["status"] == "revoked"
    assert (await ask(endpoint, made["key"], "a")).status_code == 401
    assert (await admin(endpoint, "DELETE", "/admin/keys/none")).status_code == 404
    endpoint.tenancy.close()


async def rows_by_key(endpoint: Endpoint) -> dict[str, Any]:
    rows = (await get(endpoint, OPERATOR, "/admin/usage?by=key")).json()["data"]
    return {row["key"]: row for row in rows}


async def test_usage_by_key_adds_up_to_that_of_the_tenant(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path, tenant("one"))
    made = (await admin(endpoint, "POST", "/admin/keys", tenant="one")).json()
    for key in ("one", made["key"], made["key"], OPERATOR):
        assert (await ask(endpoint, key)).status_code == 200
    rows = await rows_by_key(endpoint)
    assert rows[made["id"]]["output_tokens"] == 10
    assert sorted(row["tenant"] for row in rows.values()) == ["-", "one", "one"]
    assert sum(name.startswith("file-") for name in rows) == 2
    assert (await get(endpoint, OPERATOR, "/admin/usage?by=week")).status_code == 400
    endpoint.tenancy.close()


async def test_a_tenant_without_keys_leaves_no_endpoint_open(tmp_path: Path) -> None:
    from muxserve.gateway.limits.admission import ApiKeys
    from muxserve.spec import TenantSpec

    keys = ApiKeys([], {}, [TenantSpec("one", ())])
    assert keys.admit(None) is None
    assert keys.admit(b"anything") is None
