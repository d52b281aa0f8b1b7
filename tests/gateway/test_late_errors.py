"""Answers that fail after they have begun: streams end with an error event, others are cut so that a client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from http import HTTPStatus

import anthropic
import httpx
import openai
import pytest
import uvicorn
from vllm.exceptions import GracefulHTTPError

from muxserve.gateway.batches.asking import ask
from muxserve.gateway.http.errors import App, Receive, RequestError, Scope, Send
from muxserve.gateway.http.http_request import BatchCaller
from muxserve.gateway.http.protocol import GuardedProtocol
from muxserve.gateway.limits.admission import Caller
from muxserve.spec import FleetSpec, GatewaySpec
from tests.gateway.endpoint import endpoint_of
from tests.gateway.unit_specs import model

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
CHUNK = b'data: {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": []}\n\n'
FAILURES = [
    (ZeroDivisionError("of the server's own making"), 500, "the server failed; its log says how"),
    (RequestError(HTTPStatus.BAD_REQUEST, "too late"), 400, "too late"),
    (GracefulHTTPError("no engine", HTTPStatus.SERVICE_UNAVAILABLE), 503, "no engine"),
]


def answering(*parts: bytes, fails: Exception, headers: list[tuple[bytes, bytes]], whole: bool = False) -> App:
    """Answers with `parts`, and fails behind them: once they are a `whole` answer, or before it is one."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if whole:
            await send({"type": "http.response.body", "body": b""})
        raise fails

    return app


def endpoint(app: App) -> App:
    return endpoint_of(FleetSpec("", GatewaySpec("127.0.0.1", 0), [model("m")], units=[]), app)


@contextlib.asynccontextmanager
async def served(app: App) -> AsyncIterator[str]:
    """The URL of a real server of `app`."""
    config = uvicorn.Config(
        endpoint(app), "127.0.0.1", 0, http=GuardedProtocol, ws="none", lifespan="off", log_level="critical"
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await running


async def post(app: App, path: str = "/v1/completions") -> httpx.Response:
    async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
        return await http.post(path, json={"model": "m"})


@pytest.mark.parametrize(("failure", "status", "message"), FAILURES)
@pytest.mark.parametrize("path", ["/v1/completions", "/models/m/v1/chat/completions"])
async def test_a_stream_ends_with_an_error_event(path: str, failure: Exception, status: int, message: str) -> None:
    answer = await post(answering(CHUNK, fails=failure, headers=[EVENTS]), path)
    first, error, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert (answer.status_code, f"{first}\n\n".encode(), done) == (200, CHUNK, "data: [DONE]")
    said = json.loads(error.removeprefix("data: "))["error"]
    assert (said["code"], said["message"]) == (status, message)


async def test_openais_client_raises_the_error_of_a_stream() -> None:
    app = answering(CHUNK, fails=RequestError(HTTPStatus.BAD_REQUEST, "too late"), headers=[EVENTS])
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="m", prompt="", stream=True)
        assert (await anext(stream)).id == "1"
        with pytest.raises(openai.APIError, match="too late"):
            await anext(stream)


async def test_a_stream_of_responses_has_the_error_event_of_that_route() -> None:
    created = b'event: response.in_progress\ndata: {"type": "response.in_progress", "sequence_number": 1}\n\n'
    app = answering(created, fails=RequestError(HTTPStatus.BAD_REQUEST, "too late"), headers=[EVENTS])
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.responses.create(model="m", input="", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "error"
    assert (events[-1].code, events[-1].message, events[-1].sequence_number) == ("400", "too late", 2)


async def test_anthropics_client_raises_the_error_of_a_stream() -> None:
    start = b'event: ping\ndata: {"type": "ping"}\n\n'
    app = answering(start, fails=RequestError(HTTPStatus.BAD_REQUEST, "too late"), headers=[EVENTS])
    async with served(app) as url, anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.messages.create(model="m", max_tokens=1, messages=[], stream=True)
        with pytest.raises(anthropic.APIError, match="too late"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(("failure", "status", "message"), FAILURES)
@pytest.mark.parametrize(
    ("part", "headers"),
    [
        (b'{"id": ', [(b"content-type", b"application/json"), (b"content-length", b"100")]),
        (b'{"id": ', [(b"content-type", b"application/json")]),  # in chunks
        (CHUNK[:-1], [EVENTS]),  # an event that is not whole: nothing can be said behind it
    ],
)
async def test_any_other_answer_is_cut_so_that_the_client_sees_it(
    part: bytes, headers: list[tuple[bytes, bytes]], failure: Exception, status: int, message: str
) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await post(answering(part, fails=failure, headers=headers))


async def test_a_failure_behind_a_whole_answer_is_for_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    app = answering(b"{}", fails=ZeroDivisionError(), headers=[(b"content-type", b"application/json")], whole=True)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
        for _ in range(2):  # and the connection goes on
            assert (await http.post("/v1/completions", json={"model": "m"})).json() == {}
    assert "ZeroDivisionError" in caplog.text


async def test_an_answer_that_breaks_off_is_none_to_a_batch() -> None:
    app = endpoint(answering(b'{"id": ', fails=ZeroDivisionError(), headers=[(b"content-type", b"application/json")]))
    answer = await ask(app, BatchCaller(Caller()), "/v1/completions", b'{"model": "m"}')
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (500, 500)
