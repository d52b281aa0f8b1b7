"""A stream that begins with an error is no stream: the client gets the error's own status, as if it had not streamed.

vLLM begins to answer before it has looked at everything that a request asks for.
"""

from __future__ import annotations

import msgspec

from muxserve.gateway.errors import Message, Send, respond

_STREAM = b"text/event-stream"
_ERROR = b'data: {"error"'


class EarlyErrors:
    """ASGI's `send`, which holds back the start of a stream until the first event."""

    __slots__ = ("_done", "_send", "_start")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        # An error was sent instead of the stream; nothing of that is passed on.
        self._done = False

    async def __call__(self, message: Message) -> None:
        if self._done:
            return
        if message["type"] == "http.response.start" and _is_stream(message):
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
        await self._send(message)


def _is_stream(start: Message) -> bool:
    return start["status"] == 200 and any(
        name.lower() == b"content-type" and value.startswith(_STREAM) for name, value in start.get("headers", ())
    )


def _error(message: Message) -> tuple[int, bytes] | None:
    """Status and body of the answer, if this first event is an error."""
    body = bytes(message.get("body", b""))
    if not body.startswith(_ERROR):
        return None
    try:
        told = msgspec.json.decode(body.split(b"\n", 1)[0].removeprefix(b"data: "))
        status = int(told["error"]["code"])
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        return None
    return (status, msgspec.json.encode(told)) if 400 <= status < 600 else None
