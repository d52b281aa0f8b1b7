"""A stream that begins with an error is no stream: the client gets the error's own status, as if it had not streamed.

vLLM begins to answer before it has looked at everything that a request asks for.
"""

from __future__ import annotations

import asyncio

import msgspec

from muxserve.gateway.http.anthropic_errors import early_error
from muxserve.gateway.http.errors import STREAMED_ERROR, Message, Send, is_event_stream, respond, streamed_error


class EarlyErrors:
    """ASGI's `send`, which holds back the start of a stream until the first event, or until the client is shown a sign
    of life (`comment`)."""

    __slots__ = ("_commented", "_done", "_send", "_start", "_turn")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        # An error was sent instead of the stream; nothing of that is passed on.
        self._done = False
        # The stream has begun with comments, and has had no event yet.
        self._commented = False
        # Who sends; there is one as soon as there may be two.
        self._turn: asyncio.Lock | None = None

    async def comment(self, text: str) -> None:
        """If a stream is to come and has had no event yet, send a comment line, which clients of server-sent events
        take no notice of. An error is an event of the stream from then on."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            if self._start is not None:
                start, self._start = self._start, None
                self._commented = True
                await self._send(start)
            if self._commented:
                line = f": {text}\n\n".encode()
                await self._send({"type": "http.response.body", "body": line, "more_body": True})

    async def __call__(self, message: Message) -> None:
        if self._turn is None:
            await self._pass_on(message)
            return
        async with self._turn:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if self._done:
            return
        if message["type"] == "http.response.start" and is_event_stream(message):
            self._start = message
            return
        if self._start is not None:
            error = _error(message)
            if error is not None:
                self._done = True
                await respond(self._send, *error)
                return
            if not message.get("body") and message.get("more_body"):
                return
            start, self._start = self._start, None
            await self._send(start)
        if message.get("body") or not message.get("more_body"):
            self._commented = False
        await self._send(message)


def _error(message: Message) -> tuple[int, bytes] | None:
    """Status and body of the answer, if this first event is an error."""
    body = bytes(message.get("body", b""))
    if not body.startswith(STREAMED_ERROR):
        return early_error(body)
    try:
        error = streamed_error(body)
        status = int(error["error"]["code"])
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        return None
    return (status, msgspec.json.encode(error)) if 400 <= status < 600 else None
