"""Changes of the fleet over HTTP, to a controller that does what it is told."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from muxserve.gateway.http import changes
from muxserve.gateway.http.changes import ChangeRoutes
from muxserve.gateway.http.errors import Message, RequestError
from muxserve.spec import FallbackSpec
from tests.control.fakes import Controller, broken, running
from tests.gateway.rig import Running
from tests.support.checkpoint_files import write_checkpoint
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

    async def __call__(self, path: str, order: object, method: str = "POST", query: str = "") -> dict[str, Any]:
        """What came, or raises."""
        sent: list[Message] = []

        async def receive() -> Message:
            body = order if isinstance(order, bytes) else json.dumps(order).encode()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": query.encode()}
        apps = self.routes.apps()
        app = apps.get(path) or apps[path[: path.index("/", len("/admin/")) + 1]]
        await asyncio.wait_for(app(scope, receive, send), PATIENCE)
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


NEW = b"models:\n  - name: new\n    hub: org/new\n"
THEIRS = b"    fallback: {url: 'http://theirs.example/v1', key: 'env:HOME'}\n"


async def test_a_model_comes_and_goes_as_a_resource(controller: Controller) -> None:
    ask = Asked(controller)
    answer = await ask("/admin/models", NEW)
    assert (answer["result"], answer["text"]) == ("done", "new is served (u0)")
    assert answer["steps"] == ["loading weights"]
    json_too = {"models": [{"name": "second.new", "hub": "org/second"}]}
    await ask("/admin/models", json_too, query="unit=u0")
    await ask("/admin/models/second.new", b"", "DELETE")
    assert controller.control.calls == [
        ("add", "new", "org/new"),
        ("add", "second.new", "org/second", "u0"),
        ("remove", "second.new"),
    ]


async def test_a_fleet_file_is_applied_or_only_planned(controller: Controller) -> None:
    ask = Asked(controller)
    models = b"- {name: chat, hub: org/chat, replicas: 2}\n"
    answer = await ask("/admin/apply", b"models:\n" + models, query="dry_run=true")
    assert answer["result"] == "planned"
    assert "code" in answer["text"]
    assert not controller.control.calls
    answer = await ask("/admin/apply", b"models:\n" + models)
    assert answer["result"] == "done"
    assert controller.control.calls == [("remove", "code")]


async def test_what_needs_a_start_is_a_conflict(controller: Controller) -> None:
    models = b"models: [{name: chat, hub: org/chat, replicas: 2}, {name: code, hub: org/code}]\n"
    with pytest.raises(RequestError, match=r"1 change marked ! not made\n! kv_pool\.size: ") as refused:
        await Asked(controller)("/admin/apply", b"kv_pool: {size: 64MiB}\n" + models)
    assert refused.value.status == 409


async def test_paths_are_those_of_the_fleets_own_file_and_variables_the_controllers(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "weights")
    monkeypatch.setattr(controller.server, "_base", str(tmp_path))
    ask = Asked(controller)
    await ask("/admin/models", b"models: [{name: near, path: weights}]")
    assert controller.control.calls == [("add", "near", str(tmp_path / "weights"))]
    monkeypatch.setenv("A_KEY_OF_THE_TEST", "secret")
    models = "models: [{name: chat, hub: org/chat, replicas: 2}, {name: code, hub: org/code}]"
    text = f"gateway: {{api_keys: ['env:A_KEY_OF_THE_TEST']}}\n{models}"
    await ask("/admin/apply", text.encode())
    (adopted,) = controller.control.adopted
    assert [key.key for key in adopted.gateway.api_keys] == ["secret"]


@pytest.mark.parametrize(
    ("path", "body", "query", "words"),
    [
        (
            "/admin/models",
            b"models:\n  - name: new\n    hub: org/new\n    rate: fast\n",
            "",
            r"body:4: models\[0\].rate: ",
        ),
        ("/admin/models", b"{", "", "body:1: "),
        ("/admin/models", b"\xff", "", "no text in UTF-8"),
        ("/admin/models", NEW.replace(b"new", b"chat"), "", r"body:2: models\[0\].name: the fleet has a model 'chat'"),
        ("/admin/models", b"policy: fcfs\n" + NEW, "", "body:1: policy: belongs to the fleet"),
        ("/admin/models", NEW, "unit=u7", "there is no unit u7"),
        ("/admin/models", NEW, "units=u0", "takes unit behind its"),
        ("/admin/models", NEW, "unit=u0&unit=u1", "takes unit behind its"),
        (
            "/admin/models",
            NEW + b"    engine_args: {trust_remote_code: true}\n",
            "",
            r"body:4: .*engine_args: can name code",
        ),
        (
            "/admin/apply",
            NEW + b"    engine_args: {seed: 1}\n",
            "dry_run=true",
            r"body:4: .*engine_args: can name code",
        ),
        ("/admin/models", NEW + THEIRS, "", r"body:4: .*fallback: has a key of the fleet's own machine"),
        ("/admin/apply", NEW + THEIRS, "dry_run=true", r"body:4: .*fallback: has a key of the fleet's own machine"),
        ("/admin/apply", b"models: []", "", "body:1: models: "),
        ("/admin/apply", NEW, "dry_run=yes", "dry_run is true or false"),
    ],
)
async def test_mistakes_in_a_file_are_told_with_key_and_line(
    controller: Controller, path: str, body: bytes, query: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        await Asked(controller)(path, body, query=query)
    assert refused.value.status == 400
    assert not controller.control.calls


async def test_a_fallback_keeps_the_key_that_is_sent_there_already(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY_OF_THE_TEST", "secret")
    control = controller.control
    ours = FallbackSpec("chat", "http://theirs.example/v1", "secret")
    control.fleet = msgspec.structs.replace(control.fleet, fallbacks={"chat": ours})
    fallback = "fallback: {url: 'http://theirs.example/v1', key: 'env:A_KEY_OF_THE_TEST'}"
    text = f"models: [{{name: chat, hub: org/chat, replicas: 2, {fallback}}}, {{name: code, hub: org/code}}]"
    assert (await Asked(controller)("/admin/apply", text.encode()))["result"] == "done"
    with pytest.raises(RequestError, match="has a key of the fleet's own machine"):
        await Asked(controller)("/admin/apply", text.replace("theirs", "others").encode())


async def test_changes_that_wait_take_no_thread_of_anybody_else(controller: Controller) -> None:
    loop, ask = asyncio.get_running_loop(), Asked(controller)
    loop.set_default_executor(ThreadPoolExecutor(1))
    controller.control.hold = threading.Event()
    waiting = [asyncio.create_task(ask("/admin/scale", {"model": "chat", "replicas": 3})) for _ in range(2)]
    await asyncio.sleep(0)
    try:
        while not controller.control.began.is_set():
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "usage"), PATIENCE) == "usage"
    finally:
        controller.control.hold.set()
        await asyncio.gather(*waiting)


async def test_what_was_applied_before_a_failure_is_said_to_stay(controller: Controller) -> None:
    controller.control.fails["remove", "code"] = broken("it cannot be taken out")
    with pytest.raises(RequestError, match="what was done before stays; apply again goes on") as refused:
        await Asked(controller)("/admin/apply", b"models: [{name: chat, hub: org/chat, replicas: 2}]")
    assert refused.value.status == 409


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
    ask = Asked(controller)
    monkeypatch.setattr(changes, "MOST_WAITING", 0)
    with pytest.raises(RequestError, match="changes wait already") as refused:
        await ask("/admin/scale", {"model": "chat", "replicas": 2})
    assert refused.value.status == 429


def test_at_a_real_gateway(gateway: Running, guarded: Running) -> None:
    order = {"model": "alpha", "replicas": 2}
    assert httpx.post(f"{gateway.url}/admin/scale", json=order, timeout=PATIENCE).status_code == 403  # it has no keys
    assert httpx.post(f"{guarded.url}/admin/scale", json=order, timeout=PATIENCE).status_code == 401
    key = {"Authorization": "Bearer first-key"}
    assert httpx.get(f"{guarded.url}/admin/scale", headers=key, timeout=PATIENCE).status_code == 405
    for path, method in (("/admin/models", "GET"), ("/admin/models/alpha", "GET"), ("/admin/apply", "DELETE")):
        assert httpx.request(method, f"{guarded.url}{path}", headers=key, timeout=PATIENCE).status_code == 405
        assert httpx.request("POST", f"{guarded.url}{path}", timeout=PATIENCE).status_code == 401
    assert httpx.delete(f"{gateway.url}/admin/models/alpha", timeout=PATIENCE).status_code == 403
    assert httpx.delete(f"{guarded.url}/admin/models/alpha", headers=key, timeout=PATIENCE).status_code == 409
    answer = httpx.post(f"{guarded.url}/admin/scale", json=order, headers=key, timeout=PATIENCE)
    assert answer.status_code == 409  # there is no controller behind it
    assert "has ended" in answer.json()["error"]["message"]


def test_the_paths_are_described(gateway: Running) -> None:
    paths = httpx.get(f"{gateway.url}/openapi.json", timeout=PATIENCE).json()["paths"]
    own = {path: set(of) for path, of in paths.items() if path.startswith("/admin/") and path != "/admin/usage"}
    apps = ChangeRoutes("/run", lambda: True).apps()
    assert {path.partition("{")[0] for path in own} == set(apps)
    assert own["/admin/models/{model}"] == {"delete"}
    assert paths["/admin/scale"]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"] == [
        "model",
        "replicas",
    ]
    assert [each["name"] for each in paths["/admin/models"]["post"]["parameters"]] == ["unit"]
    assert "requestBody" not in paths["/admin/models/{model}"]["delete"]
