"""Requests that another fleet answers, while units go from one fleet to the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from muxserve.gateway.http.app import GatewayApp
from muxserve.gateway.http.errors import App, Receive, Scope, Send, respond_json
from muxserve.gateway.http.http_request import current_http
from muxserve.spec import FleetSpec, GatewaySpec, OtherFleet
from tests.gateway.endpoint import endpoint_of
from tests.gateway.test_app import Answer, ask
from tests.gateway.unit_specs import model
from tests.support.patience import PATIENCE


def answering(who: str) -> App:
    """Says who has answered, to which request."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        http = current_http.get()
        assert http is not None
        asked = json.loads((await receive())["body"])
        await respond_json(send, {"by": who, "asked": asked, "request": http.request_id})

    return answer


def fleet(app: App, *models: str) -> GatewayApp:
    specs = [model(name, max_concurrency=1, max_queue=1) for name in models]
    return endpoint_of(FleetSpec("", GatewaySpec("127.0.0.1", 0), specs, units=[]), app)


@asynccontextmanager
async def at_socket(app: App, path: Path) -> AsyncIterator[None]:
    """`app` answers at that Unix socket."""
    server = uvicorn.Server(uvicorn.Config(app, uds=str(path), lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(PATIENCE):
        while not server.started:
            await asyncio.sleep(0.001)
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def content(answer: Answer) -> dict[str, object]:
    found = json.loads(b"".join(message.get("body", b"") for message in answer.messages[1:]))
    assert isinstance(found, dict)
    return found


def said(answer: Answer) -> object:
    return content(answer).get("by")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "other.sock"


async def test_a_model_that_is_not_here_yet_is_asked_for_at_the_other_fleet(path: Path) -> None:
    here, there = fleet(answering("here"), "m", "n"), fleet(answering("there"), "m")
    here.other_fleet = OtherFleet((str(path),), ("m",))
    async with at_socket(there, path):
        answer = await ask(here, headers=[(b"x-request-id", b"mine"), (b"authorization", b"Bearer k")])
        assert content(answer) == {"by": "there", "asked": {"model": "m"}, "request": "mine"}
        headers = [name for name, _ in answer.messages[0]["headers"]]
        assert headers.count(b"x-request-id") == headers.count(b"content-type") == 1
        assert said(await ask(here, "/models/m/v1/completions", b"{}")) == "there"
        assert said(await ask(here, content=b'{"model": "n"}')) == "here"
        # The other one has sent it: it knows that the model has come here.
        assert said(await ask(here, server=(str(path), None))) == "here"
    # The other one has died: whoever starts the units says what is to be done.
    assert (await ask(here)).status == 503


async def test_what_is_here_no_longer_is_asked_for_at_the_other_fleet(path: Path) -> None:
    here, there = fleet(answering("here"), "m"), fleet(answering("there"), "m", "n")
    here.other_fleet = OtherFleet((str(path),))
    gone = b'{"model": "n"}'
    async with at_socket(there, path):
        assert said(await ask(here, content=gone)) == "there"
        assert said(await ask(here, "/models/n/v1/completions", b"{}")) == "there"
        assert said(await ask(here)) == "here"
        listed = content(await ask(here, "/v1/models", b"", "GET"))["data"]
        assert listed == [{"id": "m"}, {"id": "n"}]
        # Nothing goes to and fro.
        assert (await ask(here, content=gone, server=(str(path), None))).status == 503
    for answer in (await ask(here, content=gone), await ask(here, "/models/n/v1/completions", b"{}")):
        assert answer.status == 503
        assert b"retry-after" in dict(answer.messages[0]["headers"])
    assert content(await ask(here, "/v1/models", b"", "GET"))["data"] == [{"id": "m"}]


async def test_a_gateway_that_drains_waits_for_the_other_fleet_and_a_client_that_leaves_is_followed(path: Path) -> None:
    waits, left = asyncio.Event(), asyncio.Event()

    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        waits.set()
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    here = fleet(answering("here"), "m")
    here.other_fleet = OtherFleet((str(path),), ("m",))
    async with at_socket(hang, path), asyncio.timeout(PATIENCE):
        leave = asyncio.Event()
        messages = [{"type": "http.request", "body": b'{"model": "m"}', "more_body": False}]

        async def receive() -> dict[str, object]:
            if messages:
                return messages.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            raise AssertionError(f"nothing was answered: {message}")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        asking = asyncio.create_task(here(scope, receive, send))
        await waits.wait()
        drained = asyncio.create_task(here.until_others_answered())
        await asyncio.sleep(0)
        assert not drained.done()
        leave.set()
        await asking
        await drained
        await left.wait()
