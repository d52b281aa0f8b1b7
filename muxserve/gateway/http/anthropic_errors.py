"""Errors of `/v1/messages` in Anthropic's shape, whether they come from this gateway, vLLM's routes or its streams.

{"type": "error", "error": {"type": "rate_limit_error", "message": "..."}}
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import msgspec

from muxserve.gateway.http.errors import JSON, STREAMED_ERROR, Message, Send, respond, streamed_error

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
# https://docs.anthropic.com/en/api/errors, where 529 stands for 503.
TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
_EVENT = b"event: error\ndata: "
_CHAT_ERROR = STREAMED_ERROR.decode()


def type_of(status: int) -> str:
    """Anthropic's name for an error of that HTTP status."""
    other = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    return TYPES.get(HTTPStatus(status), other)


def error_body(status: int, message: str) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode({"type": "error", "error": {"type": type_of(status), "message": message}})


def error_event(status: int, message: str) -> bytes:
    """An error as the last event of a stream."""
    return _EVENT + error_body(status, message) + b"\n\n"


class AnthropicErrors:
    """ASGI's `send`, which gives every answer that is an error this shape."""

    __slots__ = ("_body", "_send", "_start")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
            self._start, self._body = message, b""
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                start, self._start = self._start, None
                body = error_body(start["status"], _message(self._body))
                about = (b"content-type", b"content-length")
                headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() not in about]
                await respond(self._send, start["status"], body, JSON, headers)


def early_error(event: bytes) -> tuple[int, bytes] | None:
    """Status and body of the answer, if `event`, the first of a stream, is an error."""
    if not event.startswith(_EVENT):
        return None
    body = event.removeprefix(_EVENT).split(b"\n", 1)[0]
    try:
        named = msgspec.json.decode(body)["error"]["type"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return None
    status = next((status for status, name in TYPES.items() if name == named), HTTPStatus.INTERNAL_SERVER_ERROR)
    return int(status), body


def keep_reasons(messages: Any) -> None:
    """Have `messages`, vLLM's `AnthropicServingMessages`, end a stream that fails with the reason. By itself it takes
    the error of the chat below for a chunk that it cannot read."""
    stock = messages.message_stream_converter

    async def convert(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        failed: list[str] = []

        async def until_error() -> AsyncIterator[str]:
            async for chunk in chunks:
                if chunk.startswith(_CHAT_ERROR):
                    failed.append(chunk)
                    return
                yield chunk

        async for event in stock(until_error()):
            yield event
        for chunk in failed:
            error = streamed_error(chunk.encode())["error"]
            yield error_event(int(error["code"]), str(error["message"])).decode()

    messages.message_stream_converter = convert


def _message(body: bytes) -> str:
    """The words of an error in anybody's shape."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return body.decode(errors="replace")
