"""Whatever goes wrong on `/v1/messages` is said as Anthropic's clients expect it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from muxserve.gateway.http.anthropic_errors import AnthropicErrors, keep_reasons
from muxserve.gateway.http.errors import App, Message, Receive, Scope, Send, respond
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.limits.admission import ApiKeys
from tests.gateway.playing import user
from tests.gateway.test_app import Answer, ask, endpoint

PATHS = ["/v1/messages", "/v1/messages/count_tokens", "/models/m/v1/messages"]


def error_of(answer: Answer) -> tuple[int, str, str]:
    """Status, type and message of an answer that must be an error, and nothing besides."""
    content = b"".join(message.get("body", b"") for message in answer.messages[1:])
    headers = dict(answer.messages[0]["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(content)).encode()
    found = json.loads(content)
    assert found.keys() == {"type", "error"}
    assert found["type"] == "error"
    assert found["error"].keys() == {"type", "message"}
    return answer.status, found["error"]["type"], found["error"]["message"]


def answering(status: int, body: bytes) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, status, body)

    return app


async def failing(scope: Scope, receive: Receive, send: Send) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("path", PATHS)
async def test_errors_of_the_gateway(path: str) -> None:
    served = endpoint(failing)
    unknown = path.replace("/m/", "/nobody/")
    assert error_of(await ask(served, unknown, b'{"model": "nobody"}'))[:2] == (404, "not_found_error")
    assert error_of(await ask(served, path, b"{"))[:2] == (400, "invalid_request_error")
    assert error_of(await ask(served, path, b'{"model": "m", "x": "' + b"x" * 2000))[:2] == (413, "request_too_large")
    assert error_of(await ask(served, path, b"", "GET"))[:2] == (405, "invalid_request_error")
    assert error_of(await ask(served, path))[:2] == (500, "api_error")
    served.refusing = True
    status, kind, text = error_of(await ask(served, path))
    assert (status, kind, text) == (503, "overloaded_error", "this server is shutting down")
    served.access.keys = ApiKeys(["k"])
    refused = await ask(served, path)
    assert error_of(refused)[:2] == (401, "authentication_error")
    assert dict(refused.messages[0]["headers"])[b"www-authenticate"] == b"Bearer"


async def test_a_full_gate_says_when_to_come_back() -> None:
    served = endpoint(failing)
    gate = served._limiter.gates["m"]
    gate.arrive("first")
    gate.arrive("second")
    answer = await ask(served, "/v1/messages")
    assert error_of(answer)[:2] == (429, "rate_limit_error")
    assert int(dict(answer.messages[0]["headers"])[b"retry-after"]) >= 1


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, b'{"error": {"message": "no", "type": "BadRequestError", "code": 400}}', ("invalid_request_error", "no")),
        (404, b'{"type": "error", "error": {"type": "NotFoundError", "message": "no"}}', ("not_found_error", "no")),
        (503, b'{"error": {"message": "no", "code": 503}}', ("overloaded_error", "no")),
        (501, b'{"error": {"message": "no"}}', ("api_error", "no")),
        (422, b"plain text", ("invalid_request_error", "plain text")),
        (500, b"[]", ("api_error", "[]")),
    ],
)
async def test_errors_of_vllms_routes(status: int, body: bytes, expected: tuple[str, str]) -> None:
    served = endpoint(failing)
    served.models = {"m": ServedApp(answering(status, body), {"m": {}}, model="m")}
    assert error_of(await ask(served, "/v1/messages")) == (status, *expected)
    # Other routes keep OpenAI's.
    other = await ask(served)
    assert b"".join(message.get("body", b"") for message in other.messages[1:]) == body


async def test_answers_pass_unchanged() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    messages: list[Message] = [
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]},
        {"type": "http.response.body", "body": b"ab", "more_body": True},
        {"type": "http.response.body", "body": b"cd"},
    ]
    errors = AnthropicErrors(send)
    for message in messages:
        await errors(message)
    assert sent == messages


# ------------------------------------------------------------ streams

ERROR = 'data: {"error": {"message": "the reason", "type": "x", "param": null, "code": %d}}\n\n'


class Messages:
    """As vLLM's: makes an event of every chunk, and of an error a mistake of its own."""

    async def message_stream_converter(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        async for chunk in chunks:
            yield f"event: {chunk}"


async def converted(*chunks: str) -> list[str]:
    async def source() -> AsyncIterator[str]:
        for chunk in chunks:
            yield chunk

    messages: Any = Messages()
    keep_reasons(messages)
    return [event async for event in messages.message_stream_converter(source())]


async def test_a_stream_ends_with_the_reason_of_its_error() -> None:
    assert await converted("a", "b") == ["event: a", "event: b"]
    first, last = await converted("a", ERROR % 503, "data: [DONE]\n\n")
    assert first == "event: a"
    assert last == (
        'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"the reason"}}\n\n'
    )


@pytest.mark.parametrize(
    ("code", "kind"), [(400, "invalid_request_error"), (503, "overloaded_error"), (500, "api_error")]
)
async def test_a_stream_that_begins_with_an_error_is_none(code: int, kind: str) -> None:
    events = await converted(ERROR % code)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    served = endpoint(failing)
    served.models = {"m": ServedApp(app, {"m": {}}, model="m")}
    assert error_of(await ask(served, "/v1/messages")) == (code, kind, "the reason")


# ------------------------------------------------------------ a real gateway


@pytest.mark.parametrize(
    ("change", "status", "kind", "words"),
    [
        ({"max_tokens": "many"}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", ""),
        ({"messages": 3}, 400, "invalid_request_error", "messages"),
        ({"model": "nobody"}, 404, "not_found_error", "'nobody' does not exist"),
        ({"messages": user("x" * 100_000)}, 400, "invalid_request_error", "maximum context length"),
        ({"messages": user("x", refuse="there is no room")}, 400, "invalid_request_error", "there is no room"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_a_real_front_end(
    http: httpx.Client, change: dict[str, Any], status: int, kind: str, words: str, stream: bool
) -> None:
    asked = {"model": "alpha", "max_tokens": 20, "messages": user("x"), "stream": stream, **change}
    answer = http.post("/v1/messages", json=asked)
    found = answer.json()
    assert answer.status_code == status, found
    assert (found["type"], found["error"]["type"]) == ("error", kind)
    assert words in found["error"]["message"]


def test_a_stream_of_a_real_front_end_that_fails(http: httpx.Client) -> None:
    asked = {"model": "alpha", "max_tokens": 20, "messages": user("words", error=3)}
    whole = http.post("/v1/messages", json=asked)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")
    answer = http.post("/v1/messages", json={**asked, "stream": True})
    assert answer.status_code == 200
    *_, last = answer.text.strip().split("\n\n")
    event, data = last.split("\n")
    assert event == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert "validation error" not in error["error"]["message"]
