"""An error behind the beginning of an answer. A stream of events ends with it as an event; any other answer is cut, so
that its client sees that something is missing."""

from __future__ import annotations

import re

import msgspec

from muxserve.gateway.http.anthropic_errors import PATHS as ANTHROPIC
from muxserve.gateway.http.anthropic_errors import error_event as anthropic_event
from muxserve.gateway.http.errors import Message, RequestError, is_event_stream
from muxserve.gateway.http.served_app import POSTS

RESPONSES = "/v1/responses"
_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


class AnswerProgress:
    """How far an answer is, by the messages that were sent of it."""

    __slots__ = ("_is_stream", "_last", "complete", "status")

    def __init__(self) -> None:
        # Of the answer; 0 before it has begun.
        self.status = 0
        self.complete = False
        self._is_stream = False
        self._last = b""

    def sent(self, message: Message) -> None:
        """`message` was sent."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_stream = is_event_stream(message)
            return
        self._last = message.get("body") or self._last
        self.complete = not message.get("more_body")

    def last_event(self, path: str, error: RequestError) -> bytes | None:
        """What ends a stream at the route `path` with `error`, in the form of that route; None where the answer is no
        such stream, or stands in the middle of an event."""
        last = bytes(self._last)
        if not self._is_stream or (last and not last.endswith(b"\n\n")):
            return None
        if path in ANTHROPIC:
            return anthropic_event(error.status, error.message)
        if path.startswith(RESPONSES):
            number = max((int(found) for found in _NUMBER.findall(last)), default=-1) + 1
            fields = {"message": error.message, "param": error.param, "sequence_number": number}
            event = {"type": "error", "code": error.kind or str(int(error.status)), **fields}
            return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
        return b"data: " + error.body() + b"\n\ndata: [DONE]\n\n" if path in POSTS else None
