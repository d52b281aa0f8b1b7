"""The endpoint around applications that do as the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pytest

from muxserve.gateway.http import body
from muxserve.gateway.http.app import GatewayApp
from muxserve.gateway.http.errors import App, Message, Receive, Scope, Send
from muxserve.gateway.http.own_paths import OwnPaths
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.limits.admission import ApiKeys
from muxserve.gateway.routing.model_names import ModelNames
from muxserve.spec import FleetSpec, GatewaySpec, HttpSpec
from tests.gateway.endpoint import endpoint_of
from tests.gateway.unit_specs import model

BEGIN = {"type": "http.response.start", "status": 200, "headers": []}


@dataclass
class Answer:
    """What a client was sent."""

    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        assert [m["type"] for m in self.messages].count("http.response.start") == 1
        status = self.messages[0]["status"]
        assert isinstance(status, int)
        return status

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(b"".join(m.get("body", b"") for m in self.messages[1:]))["error"]
        assert isinstance(error, dict)
        return error


def endpoint(
    app: App,
    page: Callable[[Scope, Send], Any] | None = None,
    model_page: Callable[[str, Scope, Send], Any] | None = None,
) -> GatewayApp:
    models = [model("m", max_concurrency=1, max_queue=1)]
    fleet = FleetSpec("", GatewaySpec("127.0.0.1", 0, http=HttpSpec(max_body_bytes=1000)), models, units=[])
    own = OwnPaths(
        pages={"/health": page} if page is not None else {},
        model_pages={"/metrics": model_page} if model_page is not None else {},
    )
    return endpoint_of(fleet, app, own)


async def ask(
    served: GatewayApp,
    path: str = "/v1/completions",
    content: bytes = b'{"model": "m"}',
    method: str = "POST",
    **more: Any,
) -> Answer:
    answer, sent = Answer(), False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Message) -> None:
        answer.messages.append(message)

    await served({"type": "http", "method": method, "path": path, "headers": [], **more}, receive, send)
    return answer


async def failing(scope: Scope, receive: Receive, send: Send) -> None:
    raise ZeroDivisionError("of the server's own making")


async def test_a_failure_of_the_server_is_an_error_like_others(caplog: pytest.LogCaptureFixture) -> None:
    served = endpoint(failing)
    answer = await ask(served)
    assert answer.status == 500
    assert answer.error["type"] == "InternalServerError"
    assert "ZeroDivisionError" not in answer.error["message"]  # for the log only
    assert "of the server's own making" in caplog.text
    # And nobody is kept out by it.
    assert (await ask(served)).status == 500


async def test_a_page_that_fails_says_so() -> None:
    async def page(scope: Scope, send: Send) -> None:
        raise KeyError("nothing")

    assert (await ask(endpoint(failing, page), "/health", b"", "GET")).error["code"] == 500


async def test_a_page_of_a_model_needs_no_key_and_all_else_below_it_does() -> None:
    async def page(model: str, scope: Scope, send: Send) -> None:
        await send({**BEGIN, "status": 200 if model == "m" else 500})

    served = endpoint(failing, model_page=page)
    served.access.keys = ApiKeys(["k"])
    assert (await ask(served, "/models/m/metrics", b"", "GET")).status == 200
    assert (await ask(served, "/models/other/metrics", b"", "GET")).status == 404
    for path in ("/models/m/v1/models", "/models/m/", "/models/m/health", "/metrics"):
        assert (await ask(served, path, b"", "GET")).status == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/models/m/v1/completions"])
async def test_a_model_may_be_removed_while_its_request_is_read(path: str) -> None:
    served = endpoint(failing)
    answer, halves = Answer(), [b'{"model": ', b'"m"}']

    async def receive() -> Message:
        if len(halves) == 1:
            served.models = {}
        return {"type": "http.request", "body": halves.pop(0), "more_body": bool(halves)}

    async def send(message: Message) -> None:
        answer.messages.append(message)

    await served({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    assert answer.status == 404
    assert "'m' does not exist" in answer.error["message"]


async def test_a_body_that_stops_coming_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "STALL_SECONDS", 0.01)
    answer, halves = Answer(), [b'{"model": ']

    async def receive() -> Message:
        if not halves:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": halves.pop(), "more_body": True}

    async def send(message: Message) -> None:
        answer.messages.append(message)

    await endpoint(failing)({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
    assert answer.status == 408
    assert "stopped after 10 bytes" in answer.error["message"]
    assert (b"connection", b"close") in answer.messages[0]["headers"]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", b'{"model": "m", "prompt": ["a", "b", "c"]}'),
        ("/v1/chat/completions", b'{"model": "m", "messages": [], "n": "3"}'),
        ("/v1/chat/completions/batch", b'{"model": "m", "messages": [[{}], [{}], [{}]]}'),
        ("/v1/completions/render", b'{"model": "m", "prompt": ["a", "b", "c"]}'),
    ],
)
async def test_what_one_request_asks_for_is_bounded_before_anything_reads_it(path: str, content: bytes) -> None:
    answer = await ask(endpoint(failing), path, content)
    assert answer.status == 400
    assert "asks for 3 answers" in answer.error["message"]
    assert "may ask for 2, a part of its limits.max_concurrency" in answer.error["message"]


async def test_choices_take_places_while_they_are_served() -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        inside.set()
        await leave.wait()
        await send(dict(BEGIN))

    served = endpoint(held)
    running = asyncio.create_task(ask(served, content=b'{"model": "m", "n": "2"}'))
    await inside.wait()
    assert (await ask(served)).status == 429
    leave.set()
    assert (await running).status == 200


@pytest.mark.parametrize(
    ("raw", "model", "below"),
    [
        ("/models/org%2FA:latest/v1/completions", "org/A:latest", "/v1/completions"),
        ("/models/org%2fA%3Alatest/v1/completions", "org/A:latest", "/v1/completions"),
        ("/models/org/A:latest/v1/completions", "org/A:latest", "/v1/completions"),
        ("/models/org%2FA%2FB/v1/chat/completions", "org/A/B", "/v1/chat/completions"),
        ("/models/org/A/B/v1/chat/completions", "org/A/B", "/v1/chat/completions"),
        ("/models/m/v1/completions", "m", "/v1/completions"),
        ("/models/short/v1/completions", "short", "/v1/completions"),
    ],
)
async def test_an_alias_with_slashes_is_a_model_of_a_path(raw: str, model: str, below: str) -> None:
    asked: list[tuple[str, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append((scope["path"], scope["raw_path"]))
        await send(dict(BEGIN))

    served = endpoint(app)
    aliases = ("m", "short", "org/A:latest", "org/A/B", "org/A")
    served.models = {"m": ServedApp(app, {alias: {"id": alias} for alias in aliases}, model="m")}
    content = f'{{"model": "{model}"}}'.encode()
    answer = await ask(served, unquote(raw), content, raw_path=raw.encode())
    assert answer.status == 200
    assert asked == [(below, below.encode())]
    listed = await ask(served, unquote(raw).removesuffix(below), b"", "GET", raw_path=raw.removesuffix(below).encode())
    assert listed.status == 200
    for unknown in ("/models/org/v1/completions", "/models/org%2FC/v1/completions", "/models//v1/completions"):
        assert (await ask(served, unquote(unknown), raw_path=unknown.encode())).status == 404


async def test_a_model_that_cannot_be_offered_is_not_unknown() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it is not asked")

    served = endpoint(app)
    served.names = ModelNames({"broken": {"broken"}})
    served.refused = {"broken": "its tokenizer is of cheese"}
    answer = await ask(served, content=b'{"model": "broken"}')
    assert answer.status == 503
    assert answer.error["message"] == "broken cannot be served: its tokenizer is of cheese"


async def test_a_model_that_is_replaced_is_not_unknown() -> None:
    """A client comes again, whichever of its names it has asked for, and by whatever path."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it is not asked")

    served = endpoint(app)
    served.models = {}
    served.names = ModelNames({"m": {"m"}, "alias": {"m"}})
    for path, content in (
        ("/v1/completions", b'{"model": "m"}'),
        ("/v1/completions", b'{"model": "alias"}'),
        ("/models/m/v1/completions", b"{}"),
    ):
        answer = await ask(served, path, content)
        assert answer.status == 503
        assert (b"retry-after", b"2") in answer.messages[0]["headers"]
        assert "is being started or replaced; try again in a moment" in answer.error["message"]
    assert (await ask(served, content=b'{"model": "other"}')).status == 404


async def test_a_name_that_models_share_is_served_by_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    """And metrics, the access log and limits have the version that served."""
    asked: list[str] = []

    def app_of(name: str) -> App:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            asked.append(name)
            await send(dict(BEGIN))

        return app

    models = [model("v1"), model("v2@3")]
    gateway = GatewaySpec("127.0.0.1", 0, http=HttpSpec(access_log=True))
    served = endpoint_of(FleetSpec("", gateway, models, units=[]), failing)
    served.models = {
        name: ServedApp(app_of(version), {each: {"id": each} for each in (name, "chat")}, model=version)
        for name, version in (("v1", "v1"), ("v2", "v2@3"))
    }
    served.names = ModelNames({"chat": {"v1", "v2"}}, {"chat": {"v1": 1, "v2": 1}})
    with caplog.at_level("INFO", logger="muxserve.access"):
        for number in range(40):
            headers = [(b"x-request-id", f"id-{number}".encode())]
            assert (await ask(served, content=b'{"model": "chat"}', headers=headers)).status == 200
    first = asked[:]
    assert set(first) == {"v1", "v2@3"}
    logged = [record.getMessage().split("model=")[1].split()[0] for record in caplog.records]
    assert logged == first
    # The same requests go to the same models.
    asked.clear()
    for number in range(40):
        headers = [(b"x-request-id", f"id-{number}".encode())]
        await ask(served, content=b'{"model": "chat"}', headers=headers)
    assert asked == first
    # Without one of them, the other one has all.
    asked.clear()
    del served.models["v1"]
    for _ in range(5):
        assert (await ask(served, content=b'{"model": "chat"}')).status == 200
    assert set(asked) == {"v2@3"}
    listed = await ask(served, "/v1/models", b"", "GET")
    cards = json.loads(b"".join(m.get("body", b"") for m in listed.messages[1:]))["data"]
    assert [card["id"] for card in cards] == ["v2", "chat"]
