"""Tenants do not find each other's prefixes: what engines hash prompts with, and the global scheduler knows them by."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from muxserve.gateway.limits.tenants import prefix_salt
from muxserve.spec import TenantSpec
from tests.gateway.fake_scheduler import FakeScheduler, at
from tests.gateway.playing import play
from tests.gateway.rig import Rig, Running
from tests.gateway.test_fleet import fleet_in, report
from tests.support.patience import PATIENCE, eventually

SECRET = b"of the run"


def tenant(name: str, shares_prefixes: bool = False) -> TenantSpec:
    return TenantSpec(name, (sha256(name.encode()).hexdigest(),), shares_prefixes=shares_prefixes)


@pytest.fixture(scope="module")
def shared(rig: Rig, gateway: Running, tmp_path_factory: pytest.TempPathFactory) -> Running:
    directory = rig.directory / "salts"
    directory.mkdir()
    tenants = (tenant("one"), tenant("two"), tenant("open", shares_prefixes=True))
    usage = str(tmp_path_factory.mktemp("salts") / "usage.sqlite")
    fleet = msgspec.structs.replace(fleet_in(directory, ("s0", "s1")), tenants=tenants, usage_file=usage)
    running = rig.start(fleet)
    for entry in fleet.units:
        report(rig, entry.unit_spec)
    return running


@pytest.fixture(scope="module")
def http(shared: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=PATIENCE) as client:
        while client.get("/health").json()["status"] != "ok":
            pass
        yield client


def sent(rig: Rig, http: httpx.Client, key: str, **body: Any) -> str | None:
    """The salt with which that request came to its unit."""
    mark = rig.unit.mark()
    asked = {"model": "alpha", "prompt": play("ok" + 100 * "."), "max_tokens": 9, **body}
    answer = http.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    salt = rig.unit.wait("submit", mark)["cache_salt"]
    assert salt is None or isinstance(salt, str)
    return salt


def test_a_tenant_has_a_salt_of_its_own(rig: Rig, http: httpx.Client) -> None:
    one, two = sent(rig, http, "one"), sent(rig, http, "two")
    assert one != two
    assert None not in (one, two)
    assert sent(rig, http, "one") == one
    # Each choice of a prompt finds the prefix that the first one left.
    assert sent(rig, http, "one", n=2) == one
    # Those that share have none, as keys of no tenant.
    assert sent(rig, http, "open") is sent(rig, http, "plain") is None


def test_a_clients_salt_divides_its_tenants_prefixes_further(rig: Rig, http: httpx.Client) -> None:
    one = sent(rig, http, "one")
    mine = sent(rig, http, "one", cache_salt="mine")
    assert mine == sent(rig, http, "one", cache_salt="mine")
    assert len({mine, one, "mine", sent(rig, http, "two", cache_salt="mine")}) == 4
    assert sent(rig, http, "open", cache_salt="mine") == sent(rig, http, "plain", cache_salt="mine") == "mine"
    # Whoever knows another tenant's salt gets no further with it.
    assert one is not None
    assert sent(rig, http, "two", cache_salt=one) != one


def test_the_salt_outlives_a_gateway_and_is_the_same_in_all(rig: Rig, shared: Running, http: httpx.Client) -> None:
    secret = (Path(shared.fleet.run_dir) / "secret").read_bytes()
    assert sent(rig, http, "one") == prefix_salt(secret, "one", None)


def test_replicas_are_chosen_by_prefixes_of_the_tenant(rig: Rig, shared: Running, http: httpx.Client) -> None:
    with FakeScheduler(shared.fleet.scheduler_address, at("s1")) as scheduler:
        health = {"Authorization": "Bearer plain"}
        eventually(lambda: http.get("/fleet", headers=health).json()["scheduler"] == "up", "the scheduler is up")
        for key in ("one", "two", "one", "plain", "open"):
            sent(rig, http, key)
        one, two, again, plain, shares = [place.prefix for place in scheduler.places[-5:]]
    assert one == again
    assert plain == shares
    assert b"" not in (one, two, plain)
    assert len({one, two, plain}) == 3


def test_salts_cannot_be_confused() -> None:
    given = [("a", None), ("a", ""), ("a", "b"), ("ab", None), ("a", '","'), ('a","', None), ("", "a"), ("a", "null")]
    assert len({prefix_salt(SECRET, *each) for each in given}) == len(given)
    assert prefix_salt(SECRET, "a", None) != prefix_salt(b"of another run", "a", None)
    # As vLLM wants it.
    assert len(prefix_salt(SECRET, "a", 128 * "b")) == 64
