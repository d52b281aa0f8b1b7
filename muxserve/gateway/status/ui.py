"""The live page: its files at `/ui`, the stream of frames that it draws at `/ui/events`, and logs at `/ui/logs`. A
browser that asks for `/` is sent there.

The files hold nothing about the fleet, so that a browser may load them without a key; whoever opens the page is asked
for one there, and the stream wants it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

import msgspec

from muxserve.gateway.http.errors import (
    App,
    Page,
    Receive,
    RequestError,
    Scope,
    Send,
    no_such_path,
    only_get,
    respond,
    respond_json,
    retry_after,
)
from muxserve.gateway.status.fleet_status import MAX_AGE_SECONDS
from muxserve.gateway.status.live import OWN_LOAD, LiveView
from muxserve.gateway.status.shared_answer import RenderedAnswer, SharedAnswer
from muxserve.net.logs import log_files, tail

PAGE = "/ui"
EVENTS = "/ui/events"
LOGS = "/ui/logs"
MOST_LINES = 500
FRAME_SECONDS = 1.0
# Each of them costs the gateway a few milliseconds per second.
MOST_STREAMS = 32
FILES = Path(__file__).parent / "page"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
]


class LivePage:
    """What the page needs of one gateway, of a fleet whose sockets and logs are in `run_dir`."""

    def __init__(self, view: LiveView, run_dir: Path) -> None:
        self._view = view
        self._run_dir = run_dir
        self._streams = 0
        self._own_load = SharedAnswer(self._render_own_load, MAX_AGE_SECONDS)

    def pages(self) -> dict[str, Page]:
        """By path, what needs no key: the files, and what other gateways ask for."""
        files = {f"{PAGE}/{path.relative_to(FILES)}": path for path in FILES.rglob("*") if path.suffix in _TYPES}
        files[PAGE] = files.pop(f"{PAGE}/index.html")
        answers = {name: RenderedAnswer(path.read_bytes(), _TYPES[path.suffix]).pack() for name, path in files.items()}
        return {name: partial(_file, answer) for name, answer in answers.items()} | {OWN_LOAD: self._own, "/": _home}

    def apps(self) -> dict[str, App]:
        """By path, what wants a key where there are some."""
        return {EVENTS: self.events, LOGS: self.logs}

    async def _own(self, scope: Scope, send: Send) -> None:
        await self._own_load.send(scope, send)

    async def _render_own_load(self) -> RenderedAnswer:
        return RenderedAnswer(msgspec.json.encode(self._view.own_load()))

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A frame every `FRAME_SECONDS` as a server-sent event, until the client goes away or the gateway drains."""
        only_get(scope)
        if self._streams >= MOST_STREAMS:
            raise RequestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{MOST_STREAMS} live pages are open already; close one, or try again in a moment",
                headers=[retry_after(1)],
            )
        self._streams += 1
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._stream(send, gone)
        finally:
            self._streams -= 1
            gone.cancel()

    async def logs(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The parts that have logs on this machine as JSON, and the last lines of `?part=`."""
        only_get(scope)
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        await respond_json(send, await asyncio.to_thread(self._logs, asked.get("part", [""])[0]))

    def _logs(self, part: str) -> dict[str, object]:
        files = log_files(self._run_dir)
        if part and part not in files:
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is no log of {part!r}; there are {', '.join(files)}")
        return {"parts": [*files], "part": part, "lines": tail(files[part], MOST_LINES) if part else []}

    async def _stream(self, send: Send, gone: asyncio.Future[None]) -> None:
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        seen: dict[str, int] = {}
        while not gone.done() and not self._view.draining:
            frame = msgspec.json.encode(await self._view.frame(seen))
            await send({"type": "http.response.body", "body": b"data: " + frame + b"\n\n", "more_body": True})
            await asyncio.wait((gone,), timeout=FRAME_SECONDS)
        await send({"type": "http.response.body", "body": b""})


async def _file(answer: RenderedAnswer, scope: Scope, send: Send) -> None:
    await answer.send(scope, send, *_HEADERS)


async def _home(scope: Scope, send: Send) -> None:
    """Send browsers to the page; for others there is nothing at `/`."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    if b"text/html" not in accepted:
        raise no_such_path(scope)
    # Relative, for a proxy that serves the endpoint below a path of its own.
    headers = (b"location", PAGE.removeprefix("/").encode()), (b"vary", b"accept")
    await respond(send, HTTPStatus.TEMPORARY_REDIRECT, b"", b"text/html; charset=utf-8", headers)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
