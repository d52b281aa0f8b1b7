"""Tenants on real engines: what each finds in the prefix caches of two replicas, by the tokens that were cached."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import yaml
import zmq

from muxserve.net import sockets
from muxserve.spec import load_fleet
from muxserve.wire import StateReply, StateRequest, decode, encode
from tests.e2e.fleet import ROOT, Fleet, running
from tests.support import preloaded
from tests.support.patience import PATIENCE, eventually

# What the salts are is tested in tests/gateway/test_prefix_salts.py.
pytestmark = pytest.mark.thorough
MODEL = "atlas"
KEYS = {"one": "key-one", "two": "key-two", "open": "key-open", "also-open": "key-also", "-": "key-operator"}
FLEET = {
    "gateway": {"api_keys": [KEYS["-"]]},
    "tenants": {
        "one": {"keys": ["env:KEY_ONE"]},
        "two": {"keys": ["env:KEY_TWO"]},
        "open": {"keys": ["env:KEY_OPEN"], "share_prefixes": True},
        "also-open": {"keys": ["env:KEY_ALSO"], "share_prefixes": True},
    },
    "models": [
        {
            "name": MODEL,
            "path": str(ROOT / "configs/models" / MODEL),
            "dtype": "float32",
            "replicas": 2,
            "max_len": 2048,
        }
    ],
}
ENVIRONMENT = {
    "KEY_ONE": KEYS["one"],
    "KEY_TWO": KEYS["two"],
    "KEY_OPEN": KEYS["open"],
    "KEY_ALSO": KEYS["also-open"],
    "MUXSERVE_API_KEY": KEYS["-"],
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    path = tmp_path_factory.mktemp("tenants") / "fleet.yaml"
    path.write_text(yaml.safe_dump(FLEET))
    with running(path, environment=ENVIRONMENT, start=preloaded.start) as deployed:
        yield deployed


class Asking:
    """Asks as a tenant, and says how many tokens of the prompt were cached."""

    def __init__(self, fleet: Fleet) -> None:
        self.http = httpx.Client(base_url=fleet.url, timeout=PATIENCE)
        process = fleet.part("muxserve.global_scheduler.process")
        assert process is not None
        line = process.cmdline()
        self.scheduler = load_fleet(line[line.index("--fleet") + 1]).scheduler_address

    def wait_idle(self) -> None:
        """Until the global scheduler has heard that the last request has ended. Before that, dispatch by prefix may
        choose the replica that does not have the prompt: at the other one, the same prompt seems to wait."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            sockets.connect(socket, self.scheduler)

            def idle() -> bool:
                socket.send(encode(StateRequest()))
                assert socket.poll(1000 * PATIENCE), "the global scheduler does not answer"
                reply = decode(socket.recv())
                assert isinstance(reply, StateReply)
                replicas = reply.state["models"][MODEL]["replicas"].values()  # type: ignore[index]
                return not any(each["running"] or each["waiting"] for each in replicas)

            eventually(idle, "idle replicas")

    def cached(self, tenant: str, first: int, **body: object) -> int:
        """Cached tokens of a prompt of 1,000 tokens."""
        self.wait_idle()
        before = self._used(tenant)
        prompt = [2 + (first + 7 * i) % 900 for i in range(1000)]
        answer = self.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **body},
            headers={"Authorization": f"Bearer {KEYS[tenant]}"},
        )
        assert answer.status_code == 200, answer.text
        return self._used(tenant) - before

    def _used(self, tenant: str) -> int:
        rows = self.http.get("/admin/usage", headers={"Authorization": f"Bearer {KEYS['-']}"}).json()["data"]
        return sum(row["cached_tokens"] for row in rows if row["tenant"] == tenant)


def test_no_tenant_finds_what_another_asked(fleet: Fleet) -> None:
    asking = Asking(fleet)
    assert asking.cached("one", 1) == 0
    own = asking.cached("one", 1)
    assert own >= 900
    for other in ("two", "-"):
        assert asking.cached(other, 1) == 0
    # Each has its own from then on, and nobody's salt leads to another's.
    assert [asking.cached(each, 1) for each in ("one", "two", "-")] == [own] * 3
    assert asking.cached("one", 1, cache_salt="mine") == 0
    assert asking.cached("two", 1, cache_salt="mine") == 0
    assert asking.cached("one", 1, cache_salt="mine") == own


def test_those_that_share_find_each_others(fleet: Fleet) -> None:
    asking = Asking(fleet)
    assert asking.cached("open", 300) == 0
    assert asking.cached("also-open", 300) >= 900
    assert asking.cached("-", 300) >= 900
    assert asking.cached("one", 300) == 0
