"""What answers in place of a model that is degraded or at its limit, around applications that do as the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from muxserve.gateway.http.errors import Receive, RequestError, Scope, Send, respond_error, respond_json
from muxserve.gateway.http.fallback import chain
from muxserve.gateway.http.http_request import current_http
from muxserve.gateway.usage.usage_log import Used
from muxserve.spec import BudgetSpec, FallbackSpec
from tests.gateway.test_tenants import OPERATOR, Endpoint, get, tenant
from tests.support.patience import PATIENCE

BEGIN = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
DEGRADED = b'data: {"error": {"message": "it cannot start", "code": 503}}\n\n'
CHAT = "/v1/chat/completions"
Does = Callable[[Scope, Receive, Send], Awaitable[None]]


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    http = current_http.get()
    assert http is not None
    asked = json.loads((await receive())["body"])
    await respond_json(send, {"by": http.model, "asked": asked})


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await respond_error(send, RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "it cannot start"))


def streams(*events: bytes) -> Does:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(dict(BEGIN))
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return stream


class FallingBack(Endpoint):
    """An endpoint whose model `a` does as `a` says, and `b` as `b` says."""

    def __init__(self, directory: Path, a: Does, b: Does = answers, *tenants: Any) -> None:
        super().__init__(directory, *tenants)
        self.does = {"a": a, "b": b}
        self.app.fallbacks = {"a": FallbackSpec("b")}
        self.app.names.models.update({"a": {"a"}, "b": {"b"}})  # type: ignore[attr-defined]

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = current_http.get()
        assert http is not None
        await self.does[http.model](scope, receive, send)

    async def ask(
        self, key: str = OPERATOR, name: str = "a", path: str = "", route: str = CHAT, **body: Any
    ) -> httpx.Response:
        async with self.client(key) as http:
            where = f"{path}{route}"
            return await http.post(where, json={**({} if path else {"model": name}), "messages": [], **body})

    async def usage(self) -> dict[str, tuple[int, int]]:
        rows = (await get(self, OPERATOR, "/admin/usage")).json()["data"]
        return {row["model"]: (row["requests"], row["output_tokens"]) for row in rows}


# ------------------------------------------------------------ another model


async def test_the_fallback_is_asked_by_its_own_name_and_named(tmp_path: Path) -> None:
    endpoint = FallingBack(tmp_path, refuses)
    for path in ("", "/models/a"):
        answer = await endpoint.ask(path=path, temperature=0)
        assert (answer.status_code, answer.headers["x-muxserve-fallback"]) == (200, "b")
        assert answer.json() == {"by": "b", "asked": {"model": "b", "messages": [], "temperature": 0}}
    assert endpoint.sample("muxserve_fallbacks_total", model_name="a", fallback="b") == 2
    direct = await endpoint.ask(name="b")
    assert "x-muxserve-fallback" not in direct.headers
    assert await endpoint.usage() == {"b": (3, 0)}


async def test_a_stream_that_begins_with_an_error_falls_back(tmp_path: Path) -> None:
    endpoint = FallingBack(tmp_path, streams(DEGRADED), streams(b"data: 1\n\n", b"data: [DONE]\n\n"))
    answer = await endpoint.ask(stream=True)
    assert (answer.status_code, answer.headers["x-muxserve-fallback"]) == (200, "b")
    assert answer.text == "data: 1\n\ndata: [DONE]\n\n"


async def test_nothing_takes_over_behind_the_first_token(tmp_path: Path) -> None:
    endpoint = FallingBack(tmp_path, streams(b"data: 1\n\n", DEGRADED), streams(b"data: other\n\n"))
    answer = await endpoint.ask(stream=True)
    assert "x-muxserve-fallback" not in answer.headers
    assert answer.text == "data: 1\n\n" + DEGRADED.decode()


async def test_a_model_at_its_limit_falls_back_and_has_its_own_place_again(tmp_path: Path) -> None:
    hold, inside = asyncio.Event(), asyncio.Event()

    async def holds(scope: Scope, receive: Receive, send: Send) -> None:
        inside.set()
        await hold.wait()
        await answers(scope, receive, send)

    endpoint = FallingBack(tmp_path, holds)
    endpoint.app._limiter.gates["a"].max_concurrency, endpoint.app._limiter.gates["a"].max_queue = 1, 1
    running = [asyncio.create_task(endpoint.ask()) for _ in range(2)]
    await inside.wait()
    while not endpoint.app._limiter.gates["a"].waiting:
        await asyncio.sleep(0)
    over = await endpoint.ask()
    assert (over.status_code, over.headers["x-muxserve-fallback"]) == (200, "b")
    hold.set()
    for answer in await asyncio.gather(*running):
        assert answer.json()["by"] == "a"
    assert (await endpoint.ask()).json()["by"] == "a"


async def test_the_first_refusal_is_the_answer_where_nobody_else_answers(tmp_path: Path) -> None:
    async def other(scope: Scope, receive: Receive, send: Send) -> None:
        await respond_error(send, RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "nor can this one"))

    for first in (refuses, streams(DEGRADED)):
        endpoint = FallingBack(tmp_path, first, other)
        answer = await endpoint.ask(stream=first is not refuses)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "it cannot start"
        assert "x-muxserve-fallback" not in answer.headers


async def test_a_mistake_of_the_client_does_not_fall_back(tmp_path: Path) -> None:
    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        await respond_error(send, RequestError(HTTPStatus.BAD_REQUEST, "too long"))

    answer = await FallingBack(tmp_path, wrong).ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")


async def test_a_tenant_gets_no_model_that_it_may_not_use_and_no_more_than_its_budgets(tmp_path: Path) -> None:
    only_a = tenant("only-a", models=("a",))
    poor = tenant("poor", budgets=(BudgetSpec("day", 1, "b"),))
    spent = tenant("spent", budgets=(BudgetSpec("day", 1, "a"),))
    endpoint = FallingBack(tmp_path, refuses, answers, only_a, poor, spent)
    usage = endpoint.tenancy.usage
    assert usage is not None
    usage.add("poor", "b", Used(output_tokens=1))
    usage.add("spent", "a", Used(output_tokens=1))
    for key in ("only-a", "poor"):
        answer = await endpoint.ask(key)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "it cannot start")
    assert (await endpoint.ask("spent")).json()["error"]["code"] == "insufficient_quota"


async def test_a_model_that_cannot_be_offered_falls_back(tmp_path: Path) -> None:
    endpoint = FallingBack(tmp_path, refuses)
    del endpoint.app.models["a"]  # type: ignore[attr-defined]
    for path in ("", "/models/a"):
        answer = await endpoint.ask(path=path)
        assert (answer.status_code, answer.headers["x-muxserve-fallback"]) == (200, "b")
    endpoint.does["b"] = refuses
    assert "is being started or replaced" in (await endpoint.ask()).json()["error"]["message"]


def test_a_chain_asks_nobody_twice() -> None:
    there = FallbackSpec("m", "http://there/v1")
    assert [each.model for each in chain({"a": FallbackSpec("b"), "b": FallbackSpec("c")}, "a")] == ["a", "b", "c"]
    assert [each.model for each in chain({"a": FallbackSpec("b"), "b": FallbackSpec("a")}, "a")] == ["a", "b"]
    assert chain({"a": there, "m": FallbackSpec("x")}, "a") == [FallbackSpec("a"), there]
    assert chain({}, "a") == [FallbackSpec("a")]


# ------------------------------------------------------------ another endpoint


class Elsewhere:
    """Another endpoint, which answers as it is told to and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, dict[str, Any]]] = []
        self.status = 200
        self.events: list[bytes] = []
        self.gone = asyncio.Event()
        self.endless = False
        self.breaks_off, self.cut = False, asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.headers.get("Authorization"), body))
        if not body.get("stream"):
            said = {"usage": {"prompt_tokens": 7, "completion_tokens": 3}, "by": "elsewhere"}
            if self.breaks_off:
                half = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
                await half.prepare(request)
                await half.write(b'{"by": ')
                return await self._cut(request, half)
            return web.json_response(said, status=self.status)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            for event in self.events:
                await answer.write(event)
            if self.breaks_off:
                return await self._cut(request, answer)
            while self.endless:
                await answer.write(b"data: more\n\n")
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            self.gone.set()
            raise
        return answer

    async def _cut(self, request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        await self.cut.wait()
        assert request.transport is not None
        request.transport.close()
        return answer


@pytest.fixture
async def elsewhere() -> AsyncIterator[Elsewhere]:
    stub = Elsewhere()
    app = web.Application()
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        app.router.add_post(path, stub.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield stub
    await runner.cleanup()


def beyond(tmp_path: Path, elsewhere: Elsewhere) -> FallingBack:
    endpoint = FallingBack(tmp_path, refuses)
    endpoint.app.fallbacks = {"a": FallbackSpec("big", elsewhere.url, "their-key")}
    return endpoint


async def test_another_endpoint_gets_its_key_and_its_name_of_the_model(tmp_path: Path, elsewhere: Elsewhere) -> None:
    endpoint = beyond(tmp_path, elsewhere)
    answer = await endpoint.ask(temperature=0)
    assert (answer.status_code, answer.json()["by"]) == (200, "elsewhere")
    assert answer.headers["x-muxserve-fallback"] == f"{elsewhere.url} big"
    assert elsewhere.asked == [("Bearer their-key", {"model": "big", "messages": [], "temperature": 0})]
    # It counts for the model that was asked for.
    assert await endpoint.usage() == {"a": (1, 3)}


EVENTS = [
    b'data: {"choices": [1]}\n\nda',
    b'ta: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}',
]
REST = b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("asked_for", [False, True])
async def test_streams_are_counted_and_have_what_the_client_asked_for(
    tmp_path: Path, elsewhere: Elsewhere, asked_for: bool
) -> None:
    elsewhere.events = [*EVENTS, REST]
    endpoint = beyond(tmp_path, elsewhere)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked_for else {}
    answer = await endpoint.ask(stream=True, **options)
    assert elsewhere.asked[0][1]["stream_options"] == {"include_usage": True}
    assert answer.headers["x-muxserve-fallback"].endswith(" big")
    assert ("usage" in answer.text) is asked_for
    assert answer.text.startswith('data: {"choices": [1]}\n\n')
    assert answer.text.endswith("data: [DONE]\n\n")
    assert await endpoint.usage() == {"a": (1, 3)}


@pytest.mark.parametrize(
    ("route", "events"),
    [
        (
            "/v1/responses",
            [
                b'event: response.created\ndata: {"response": {"id": "resp_1", "usage": null}}\n\n',
                b'event: response.completed\ndata: {"response": {"id": "resp_1", "usage": {"input_tokens": 7, '
                b'"output_tokens": 3, "input_tokens_details": {"cached_tokens": 2}}}}\n\n',
            ],
        ),
        (
            "/v1/messages",
            [
                b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}\n\n',
                b'event: message_delta\ndata: {"delta": {}, "usage": {"output_tokens": 3}}\n\n',
                b"event: message_stop\ndata: {}\n\n",
            ],
        ),
    ],
)
async def test_streams_of_named_events_are_counted(
    tmp_path: Path, elsewhere: Elsewhere, route: str, events: list[bytes]
) -> None:
    elsewhere.events = events
    endpoint = beyond(tmp_path, elsewhere)
    answer = await endpoint.ask(route=route, stream=True)
    assert answer.content == b"".join(events)
    assert "stream_options" not in elsewhere.asked[0][1]
    (row,) = (await get(endpoint, OPERATOR, "/admin/usage")).json()["data"]
    assert (row["prompt_tokens"], row["output_tokens"]) == (7, 3)


@pytest.mark.parametrize("tokens", ["-5", "1e400", "NaN", "1e30", '"many"'])
async def test_no_number_of_tokens_breaks_what_was_answered(tmp_path: Path, elsewhere: Elsewhere, tokens: str) -> None:
    elsewhere.events = [b'data: {"choices": [], "usage": {"completion_tokens": %s}}\n\n' % tokens.encode(), REST]
    endpoint = beyond(tmp_path, elsewhere)
    answer = await endpoint.ask(stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert await endpoint.usage() == {"a": (1, 0)}


async def test_options_of_a_stream_that_are_none_are_for_the_endpoint_to_refuse(
    tmp_path: Path, elsewhere: Elsewhere
) -> None:
    elsewhere.events = [REST]
    answer = await beyond(tmp_path, elsewhere).ask(stream=True, stream_options="x")
    assert answer.status_code == 200
    assert elsewhere.asked[0][1]["stream_options"] == "x"


async def test_requests_count_for_the_model_that_answers_or_was_asked_for(tmp_path: Path, elsewhere: Elsewhere) -> None:
    endpoint = FallingBack(tmp_path, refuses, refuses)
    endpoint.app.fallbacks = {"a": FallbackSpec("b"), "b": FallbackSpec("big", elsewhere.url)}
    assert (await endpoint.ask()).json()["by"] == "elsewhere"
    assert await endpoint.usage() == {"a": (1, 3)}
    elsewhere.status = 503
    assert (await endpoint.ask()).status_code == 503
    assert await endpoint.usage() == {"a": (2, 3)}


async def test_a_refusal_says_when_to_come_again_as_its_model_knows_it(tmp_path: Path) -> None:
    def after(seconds: int) -> Does:
        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            http = current_http.get()
            assert http is not None
            http.retry_after = seconds
            await refuses(scope, receive, send)

        return refuse

    assert (await FallingBack(tmp_path, after(7), after(40)).ask()).headers["retry-after"] == "7"


async def test_a_gateway_that_drains_waits_for_what_another_endpoint_answers(
    tmp_path: Path, elsewhere: Elsewhere
) -> None:
    elsewhere.events, elsewhere.endless = [EVENTS[0] + EVENTS[1] + b"\n\n"], True
    endpoint = beyond(tmp_path, elsewhere)
    asking = asyncio.create_task(endpoint.ask(stream=True))
    async with asyncio.timeout(PATIENCE):
        while not elsewhere.asked:
            await asyncio.sleep(0.001)
    drained = asyncio.create_task(endpoint.app.until_others_answered())
    await asyncio.sleep(0)
    assert not drained.done()
    elsewhere.endless = False
    assert (await asking).status_code == 200
    await drained


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_an_endpoint_that_refuses_has_not_answered(tmp_path: Path, elsewhere: Elsewhere, status: int) -> None:
    elsewhere.status = status
    answer = await beyond(tmp_path, elsewhere).ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "it cannot start")
    assert len(elsewhere.asked) == 1


async def test_an_endpoint_that_is_not_there_has_not_answered(tmp_path: Path, elsewhere: Elsewhere) -> None:
    elsewhere.url = "http://127.0.0.1:1/v1"
    answer = await beyond(tmp_path, elsewhere).ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "it cannot start")


async def test_a_client_that_goes_ends_the_stream_there(tmp_path: Path, elsewhere: Elsewhere) -> None:
    elsewhere.events, elsewhere.endless = [EVENTS[0] + EVENTS[1] + b"\n\n"], True
    endpoint = beyond(tmp_path, elsewhere)
    leave, body, sent = asyncio.Event(), json.dumps({"model": "a", "messages": [], "stream": True}).encode(), False

    async def receive() -> Any:
        nonlocal sent
        if sent:
            await leave.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message.get("body"):
            leave.set()

    headers = [(b"authorization", f"Bearer {OPERATOR}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    await endpoint.app(scope, receive, send)
    await elsewhere.gone.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_endpoint_that_breaks_off_before_its_first_event_has_not_answered(
    tmp_path: Path, elsewhere: Elsewhere, stream: bool
) -> None:
    elsewhere.breaks_off = True
    elsewhere.cut.set()
    answer = await beyond(tmp_path, elsewhere).ask(stream=stream)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "it cannot start")


async def test_a_stream_of_an_endpoint_that_breaks_off_ends_with_an_error(tmp_path: Path, elsewhere: Elsewhere) -> None:
    elsewhere.events, elsewhere.breaks_off = [b'data: {"choices": [1]}\n\n'], True
    body, got = json.dumps({"model": "a", "messages": [], "stream": True}).encode(), b""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return unread.pop() if unread else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal got
        if message.get("body"):
            got += message["body"]
            elsewhere.cut.set()

    headers = [(b"authorization", f"Bearer {OPERATOR}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    await beyond(tmp_path, elsewhere).app(scope, receive, send)
    first, error, done = got.decode().removesuffix("\n\n").split("\n\n")
    assert (first, done) == ('data: {"choices": [1]}', "data: [DONE]")
    said = json.loads(error.removeprefix("data: "))["error"]
    assert said["code"] == 502
    assert f"{elsewhere.url} big broke off its answer" in said["message"]
