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
# What answers GET at one path.
Page = Callable[[Scope, Send], Awaitable[None]]

JSON = b"application/json"
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
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = list(headers)

    def body(self) -> bytes:
        """The answer's JSON."""
        error = {
            "message": self.message,
            "type": TYPES.get(self.status, self.status.phrase),
            "param": self.param,
            "code": int(self.status),
        }
        return msgspec.json.encode({"error": error})


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON,
    headers: Iterable[tuple[bytes, bytes]] = (),
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


def only_get(scope: Scope) -> None:
    """Refuse other methods than GET and HEAD."""
    if scope["method"] not in ("GET", "HEAD"):
        raise RequestError(
            HTTPStatus.METHOD_NOT_ALLOWED, f"{scope['path']} takes GET only", headers=[(b"allow", b"GET")]
        )
