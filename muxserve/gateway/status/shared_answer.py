"""Answers about the server that many ask for: rendered once for all who ask within a moment."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from muxserve.gateway.http.errors import JSON, Scope, Send, respond

# Prometheus text shrinks to a twentieth at the lowest level already; below `_SMALL_BYTES` it is not worth a thread.
_LEVEL = 1
_SMALL_BYTES = 500


@dataclass(frozen=True, slots=True)
class RenderedAnswer:
    """A whole answer; `packed` is its body in gzip, where that is worth it."""

    body: bytes
    content_type: bytes = JSON
    status: int = 200
    packed: bytes | None = None

    def pack(self) -> RenderedAnswer:
        """The same with its body in gzip as well; takes milliseconds for a large one."""
        packed = gzip.compress(self.body, _LEVEL) if len(self.body) >= _SMALL_BYTES else None
        return RenderedAnswer(self.body, self.content_type, self.status, packed)

    async def send(self, scope: Scope, send: Send, *headers: tuple[bytes, bytes]) -> None:
        """Answer the client of `scope`, in gzip if it takes that."""
        if self.packed is None:
            await respond(send, self.status, self.body, self.content_type, headers)
            return
        vary = (b"vary", b"accept-encoding")
        if any(name == b"accept-encoding" and b"gzip" in value for name, value in scope["headers"]):
            encoded = (b"content-encoding", b"gzip")
            await respond(send, self.status, self.packed, self.content_type, [*headers, vary, encoded])
        else:
            await respond(send, self.status, self.body, self.content_type, [*headers, vary])


class SharedAnswer:
    """One answer for all who ask while it is rendered, and for `max_age` seconds after that.

    Args:
        render: makes the answer; what it raises, everybody who waits for it gets, and it is tried again.
        max_age: seconds.
        about: what answers are about now; one about something else is given to nobody.
        clock: seconds of any clock.
    """

    def __init__(
        self,
        render: Callable[[], Awaitable[RenderedAnswer]],
        max_age: float,
        about: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._render = render
        self._max_age = max_age
        self._about = about
        self._clock = clock
        self._known: tuple[RenderedAnswer, float, object] | None = None
        self._rendering: tuple[asyncio.Task[RenderedAnswer], object] | None = None

    async def get(self, fresh: bool = False) -> RenderedAnswer:
        """The answer; with `fresh` none that was there before the call."""
        about = self._about()
        if self._rendering is None or self._rendering[1] != about:
            if not fresh and self._known is not None:
                answer, at, subject = self._known
                if subject == about and self._clock() - at < self._max_age:
                    return answer
            self._rendering = asyncio.ensure_future(self._renew(about)), about
        return await asyncio.shield(self._rendering[0])

    async def send(self, scope: Scope, send: Send, fresh: bool = False) -> None:
        """Answer the client of `scope`."""
        await (await self.get(fresh)).send(scope, send)

    async def _renew(self, about: object) -> RenderedAnswer:
        try:
            # In a thread: streams must not wait for the compression.
            answer = await asyncio.to_thread((await self._render()).pack)
            self._known = answer, self._clock(), about
            return answer
        finally:
            if self._rendering is not None and self._rendering[0] is asyncio.current_task():
                self._rendering = None
