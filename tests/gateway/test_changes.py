"""Changes of the fleet over HTTP, to a controller that does what it is told."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from muxserve.gateway import changes
from muxserve.gateway.changes import ChangeRoutes
from muxserve.gateway.errors import Message, RequestError
from tests.control.fakes import Controller, broken, running
from tests.gateway.rig import Running
from tests.support.patience import PATIENCE


@pytest.fixture
def controller() -> Iterator[Controller]:
    units = {"u0": ["chat", "code"], "u1": ["chat"], "u2": list[str]()}
    with tempfile.TemporaryDirectory(prefix="mx") as directory, running(Path(directory) / "muxserve", units) as there:
        yield there


class Asked:
    """The endpoint's side: a body, and the answer to it."""

    def __init__(self, controller: Controller, keys: bool = True) -> None:
        self.routes = ChangeRoutes(controller.control.fleet.run_dir, lambda: keys)

    async def __call__(self, path: str, order: object, method: str = "POST") -> dict[str, Any]:
        """What came, or raises."""
        sent: list[Message] = []

        async def receive() -> Message:
            body = order if isinstance(order, bytes) else json.dumps(order).encode()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": []}
        await asyncio.wait_for(self.routes.apps()[path](scope, receive, send), PATIENCE)
        assert sent[0]["status"] == 200
        found = json.loads(sent[1]["body"])
        assert isinstance(found, dict)
        return found


async def test_changes_are_made(controller: Controller) -> None:
    ask = Asked(controller)
    answer = await ask("/admin/scale", {"model": "chat", "replicas": 3})
    assert answer["result"] == "done"
    assert "chat has 3 replicas" in answer["text"]
    assert answer["steps"] == ["chat: to 3"]
    await ask("/admin/drain", {"unit": "u2"})
    await ask("/admin/remove", {"model": "code"})
    assert controller.control.calls == [("scale", "chat", 3), ("drain", "u2"), ("remove", "code")]


@pytest.mark.parametrize(
    ("path", "order", "status", "words"),
    [
        ("/admin/scale", {"model": "chta", "replicas": 2}, 400, "chta"),
        ("/admin/scale", {"model": "chat"}, 400, "replicas"),
        ("/admin/scale", {"model": "chat", "replicas": "two"}, 400, "replicas"),
        ("/admin/scale", {"model": "chat", "replicas": 2, "more": 1}, 400, "more"),
        ("/admin/scale", b"{", 400, "/admin/scale"),
        ("/admin/drain", {"unit": "u9"}, 400, "there is no unit u9"),
        ("/admin/remove", {"model": "none"}, 400, "none"),
    ],
)
async def test_mistakes_are_refused(controller: Controller, path: str, order: object, status: int, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        await Asked(controller)(path, order)
    assert refused.value.status == status
    assert not controller.control.calls


async def test_a_change_that_fails_is_a_conflict(controller: Controller) -> None:
    controller.control.fails["remove", "code"] = broken("it cannot be taken out")
    with pytest.raises(RequestError, match="it cannot be taken out; nothing was changed") as refused:
        await Asked(controller)("/admin/remove", {"model": "code"})
    assert refused.value.status == 409


async def test_without_keys_nobody_changes_a_fleet(controller: Controller) -> None:
    with pytest.raises(RequestError, match="has no keys") as refused:
        await Asked(controller, keys=False)("/admin/scale", {"model": "chat", "replicas": 2})
    assert refused.value.status == 403
    assert not controller.control.calls


async def test_as_many_as_may_wait(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_WAITING", 0)
    with pytest.raises(RequestError, match="changes wait already") as refused:
        await Asked(controller)("/admin/scale", {"model": "chat", "replicas": 2})
    assert refused.value.status == 429


def test_at_a_real_gateway(gateway: Running, guarded: Running) -> None:
    order = {"model": "alpha", "replicas": 2}
    assert httpx.post(f"{gateway.url}/admin/scale", json=order, timeout=PATIENCE).status_code == 403  # it has no keys
    assert httpx.post(f"{guarded.url}/admin/scale", json=order, timeout=PATIENCE).status_code == 401
    key = {"Authorization": "Bearer first-key"}
    assert httpx.get(f"{guarded.url}/admin/scale", headers=key, timeout=PATIENCE).status_code == 405
    answer = httpx.post(f"{guarded.url}/admin/scale", json=order, headers=key, timeout=PATIENCE)
    assert answer.status_code == 409  # there is no controller behind it
    assert "has ended" in answer.json()["error"]["message"]
