"""Asking the endpoint of this gateway as a client would, without a connection."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus

from muxserve.gateway.http.errors import App, Message, RequestError, Scope
from muxserve.gateway.http.http_request import BATCH, BatchCaller

log = logging.getLogger(__name__)

# What a request may take to end after its client is gone.
LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer; `retry_after` in seconds if it says when to ask again."""

    status: int
    request_id: str
    body: bytes
    retry_after: float = 0.0


async def ask(app: App, caller: BatchCaller, path: str, body: bytes) -> WholeAnswer:
    """The answer to `body` at the route `path`. When the task is cancelled, the request ends as if its client had gone.

    Args:
        app: the endpoint.
        caller: who asks.
    """
    gone = asyncio.Event()
    messages: list[Message] = []
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(message)

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("batch", 0),
        "server": ("gateway", 0),
        BATCH: caller,
    }
    request = asyncio.ensure_future(app(scope, receive, send))
    try:
        await asyncio.shield(request)
    except asyncio.CancelledError:
        gone.set()
        await asyncio.wait((request,), timeout=LEAVE_SECONDS)
        request.cancel()
        raise
    except Exception:
        # An answer that broke off is no answer, as to a client whose connection is cut.
        log.exception("the answer to a request of a batch at %s broke off", path)
        failure = RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, "the answer broke off; the server's log says how")
        return WholeAnswer(failure.status, "", failure.body())
    return _answer(messages)


def _answer(messages: list[Message]) -> WholeAnswer:
    if not messages:
        return WholeAnswer(503, "", b"")
    headers = {name.lower(): value for name, value in messages[0].get("headers", ())}
    body = b"".join(message.get("body", b"") for message in messages[1:])
    after = headers.get(b"retry-after", b"0")
    request_id = headers.get(b"x-request-id", b"").decode("latin-1")
    return WholeAnswer(messages[0]["status"], request_id, body, float(after) if after.isdigit() else 0.0)
