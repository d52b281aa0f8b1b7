"""Errors in OpenAI's shape, and plain JSON answers, straight over ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
# What answers GET at one path.
Page = Callable[[Scope, Send], Awaitable[None]]

JSON = b"application/json"
_EVENT_STREAM = b"text/event-stream"
# How vLLM's streams of server-sent events begin an error.
STREAMED_ERROR = b'data: {"error"'
# The connection ends with the answer.
CLOSE: Header = (b"connection", b"close")
MOST_SHOWN = 100
# vLLM's names where it has one.
TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "BadRequestError",
    HTTPStatus.REQUEST_TIMEOUT: "BadRequestError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "BadRequestError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


class RequestError(Exception):
    """A request that cannot go on; becomes the client's answer.

    Args:
        status: HTTP status.
        message: what is wrong and what to do, for the user.
        param: the offending field, if it is one.
        headers: more headers of the answer.
        kind: OpenAI's name for it, where programs look for that; else vLLM's names.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        headers: Iterable[Header] = (),
        kind: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = list(headers)
        self.kind = kind

    def body(self) -> bytes:
        """The answer's JSON."""
        error = {
            "message": self.message,
            "type": self.kind or TYPES.get(self.status, self.status.phrase),
            "param": self.param,
            "code": self.kind or int(self.status),
        }
        return msgspec.json.encode({"error": error})


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON,
    headers: Iterable[Header] = (),
) -> None:
    """Send a whole answer."""
    await send(
        {
            "type": "http.response.start",
            "status": int(status),
            "headers": [
                (b"content-type", content_type),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, content: object, status: int = 200) -> None:
    """Send `content` as JSON."""
    await respond(send, status, msgspec.json.encode(content))


async def respond_error(send: Send, error: RequestError) -> None:
    """Send an error."""
    await respond(send, error.status, error.body(), headers=error.headers)


def is_event_stream(start: Message) -> bool:
    """Whether an answer that begins with `start` is a stream of server-sent events."""
    return start["status"] == HTTPStatus.OK and any(
        name.lower() == b"content-type" and value.startswith(_EVENT_STREAM) for name, value in start.get("headers", ())
    )


def streamed_error(event: bytes) -> Any:
    """The JSON of an event that begins with `STREAMED_ERROR`.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(event.split(b"\n", 1)[0].removeprefix(b"data: "))


def retry_after(seconds: int) -> Header:
    """The header that tells a client when to come again."""
    return b"retry-after", str(seconds).encode()


def check_method(scope: Scope, *methods: str) -> None:
    """Refuse other methods than these.

    Raises:
        RequestError: it is another one (405).
    """
    if scope["method"] not in methods:
        raise RequestError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"{scope['path']} takes {' and '.join(methods)} only",
            headers=[(b"allow", ", ".join(methods).encode())],
        )


def only_get(scope: Scope) -> None:
    """Refuse other methods than GET and HEAD, as `check_method` does."""
    if scope["method"] != "HEAD":
        check_method(scope, "GET")


def no_such_path(scope: Scope) -> RequestError:
    """Nothing is served there."""
    return RequestError(HTTPStatus.NOT_FOUND, f"no such path: {scope['path']}; see docs/gateway.md for those served")


def shortened(name: str) -> str:
    """A name of a client's making, as an error shows it."""
    return repr(name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]}...")
