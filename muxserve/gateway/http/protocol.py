"""HTTP connections that a client can neither hold open by sending little nor fill memory with by sending much.

uvicorn bounds the idle time between two requests. This module bounds the time before a connection's first request, the
time and size of a request's head and trailers, and the time for the remaining bytes of a request that is already
answered. (`body` limits bodies that are read.)
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from muxserve.gateway.http.errors import RequestError

# From a request's first byte to the end of its head. Browsers and proxies send a head at once; this is for bad lines.
HEAD_SECONDS = 30.0
# Request line, headers and trailers together. What one read brings is looked at afterwards, so that as much more (256
# KiB) may have been taken in.
MOST_HEAD_BYTES = 64 << 10
# What a header costs in memory beside its text.
HEADER_BYTES = 64


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the limits above."""

    _late: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _complete = True
    _parsed = False

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # As long as it may be idle later on; ends with the first byte.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._in_time()

    def data_received(self, data: bytes) -> None:
        self._parsed = False
        super().data_received(data)
        if not self._parsed:
            # The middle of a header, or of something else that the parser keeps or skips.
            self._head_bytes += len(data)
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the request's headers have more than {MOST_HEAD_BYTES} bytes, which is the most that is taken",
            )

    # ------------------------------------------------------------ the parser

    def on_message_begin(self) -> None:
        self._parsed = True
        self._complete = False
        self._head_bytes = 0
        self._watch()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parsed = True
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed = True
        self._head_bytes += len(name) + len(value) + HEADER_BYTES
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._parsed = True
        self._in_time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._parsed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._parsed = True
        self._complete = True
        self._in_time()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._complete and not self._serving():
            # Nobody reads the remaining bytes of the request, which would end uvicorn's wait for the next one.
            self._watch()

    # ------------------------------------------------------------ limits

    def _serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        self._in_time()
        self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        text = f"the request's headers did not come within {HEAD_SECONDS:g} s of its first byte"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, text)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """End the connection; with an answer unless the answer to this request has begun, or that to an earlier one."""
        if self.transport.is_closing():
            return
        begun = self.cycle is not None and self.cycle.scope is self.scope
        if self._serving() and not begun:
            # An earlier request has its answer first.
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        if not begun or not (self.cycle.response_started or self.pipeline):
            body = RequestError(status, text).body()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
