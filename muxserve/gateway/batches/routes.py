"""`/v1/files` and `/v1/batches`, as OpenAI's API has them.

POST   /v1/files                 a file of requests, as multipart/form-data: `purpose` (batch) and `file`
GET    /v1/files                 those of the key's tenant
GET    /v1/files/ID              about one; /content: what is in it
DELETE /v1/files/ID
POST   /v1/batches               {"input_file_id", "endpoint", "completion_window": "24h", "metadata"}
GET    /v1/batches, /v1/batches/ID
POST   /v1/batches/ID/cancel
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs

import msgspec
from python_multipart.multipart import MultipartParser, parse_options_header

from muxserve.gateway.batches.lines import ENDPOINTS
from muxserve.gateway.batches.store import BatchStore, FullError, StoredFile
from muxserve.gateway.http.body import BodyMemory, ClientGoneError, latest, read_order
from muxserve.gateway.http.errors import (
    CLOSE,
    Receive,
    RequestError,
    Scope,
    Send,
    check_method,
    no_such_path,
    only_get,
    respond_json,
    retry_after,
    shortened,
)
from muxserve.gateway.http.own_paths import CallerApp
from muxserve.gateway.limits.admission import Caller
from muxserve.gateway.limits.tenants import NOBODY

log = logging.getLogger(__name__)

FILES, BATCHES = "/v1/files", "/v1/batches"
MOST_FILE_BYTES = 200 << 20
MAX_BODY_BYTES = 1 << 16
# Files that are being sent at a time, of all tenants and of one.
MOST_UPLOADS, MOST_OF_ONE = 8, 4
CHUNK_BYTES = 1 << 20
# Of a form, which has `purpose` and `file`.
MOST_PARTS, MOST_FIELD_BYTES = 16, 1 << 16
_PLAIN = (b"binary", b"8bit", b"7bit")
MOST_LISTED = 100
# OpenAI's bounds of `metadata`.
MOST_ENTRIES, MOST_NAME, MOST_VALUE = 16, 64, 512
_WINDOW = re.compile(r"([0-9]{1,6})([smhd])")
_LIMIT = re.compile(r"[1-9][0-9]{0,8}")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_WINDOW_SECONDS = 7 * 86400.0


class BatchOrder(msgspec.Struct):
    """A batch that is to be made."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


def no_batches(scope: Scope) -> RequestError:
    """Why there are none in a fleet that keeps none."""
    return RequestError(
        HTTPStatus.NOT_FOUND, f"{scope['path']}: this server keeps no batches; set gateway.batches in its fleet file"
    )


async def refuse(caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers in such a fleet."""
    raise no_batches(scope)


def apps(routes: BatchRoutes | None) -> dict[str, CallerApp]:
    """By path, or by its beginning where that ends with a slash."""
    files: CallerApp = routes.files if routes is not None else refuse
    batches: CallerApp = routes.batches if routes is not None else refuse
    return {FILES: files, f"{FILES}/": files, BATCHES: batches, f"{BATCHES}/": batches}


class BatchRoutes:
    """Answers what is about files and batches.

    Args:
        store: keeps them.
        changed: is called when there is something to run, or no longer.
    """

    def __init__(self, store: BatchStore, changed: Callable[[], None]) -> None:
        self._store = store
        self._changed = changed
        self._bodies = BodyMemory(MAX_BODY_BYTES)
        self._uploads: Counter[str] = Counter()

    # ------------------------------------------------------------ files

    async def files(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at `FILES`, or below it."""
        owner = _owner(caller)
        name, _, part = scope["path"].removeprefix(FILES).removeprefix("/").partition("/")
        with _told():
            if not name:
                check_method(scope, "GET", "POST")
                if scope["method"] == "POST":
                    await self._upload(owner, scope, receive, send)
                    return
                found = await asyncio.to_thread(self._store.files, owner)
                purpose = _query(scope).get("purpose")
                rows = [self._shown(file) for file in found if purpose in (None, file.purpose)]
                await respond_json(send, _page(rows, scope))
                return
            file = await asyncio.to_thread(self._store.file, owner, name)
            if file is None or part not in ("", "content"):
                raise RequestError(HTTPStatus.NOT_FOUND, f"there is no file {shortened(name)}", param="file_id")
            if part:
                only_get(scope)
                await self._content(file, send)
                return
            check_method(scope, "GET", "DELETE")
            if scope["method"] == "DELETE":
                await self._delete(file)
                await respond_json(send, {"id": file.id, "object": "file", "deleted": True})
            else:
                await respond_json(send, self._shown(file))

    def _shown(self, file: StoredFile) -> dict[str, object]:
        return file.shown(self._store.spec.keep_seconds)

    async def _delete(self, file: StoredFile) -> None:
        if await asyncio.to_thread(self._store.is_in_use, file.id):
            message = f"{file.id} is the input of a batch that has not ended; cancel that first"
            raise RequestError(HTTPStatus.BAD_REQUEST, message, param="file_id")
        await asyncio.to_thread(self._store.delete_file, file.id)

    async def _content(self, file: StoredFile, send: Send) -> None:
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(file.bytes).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for offset in range(0, file.bytes, CHUNK_BYTES):
            part = await asyncio.to_thread(self._store.read, file.id, offset, CHUNK_BYTES)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _upload(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        own, all_uploads = self._uploads[owner], self._uploads.total()
        if own >= MOST_OF_ONE or all_uploads >= MOST_UPLOADS:
            message = f"{max(own, all_uploads)} files are being sent already; try again in a moment"
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, headers=[CLOSE, retry_after(1)])
        self._uploads[owner] += 1
        written = self._store.new_path()
        try:
            form = await _read_form(scope, receive, written)
            purpose = form.fields.get("purpose")
            if purpose != "batch":
                message = f"'purpose' must be batch here, not {shortened(purpose or '')}"
                raise RequestError(HTTPStatus.BAD_REQUEST, message, param="purpose")
            if form.filename is None:
                raise RequestError(HTTPStatus.BAD_REQUEST, "the form has no 'file'", param="file")
            try:
                file = await asyncio.to_thread(self._store.add_file, owner, "batch", form.filename, written)
            except FullError as error:
                message = f"{error}; delete files that are needed no longer"
                raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message) from None
        finally:
            self._uploads[owner] -= 1
            written.unlink(missing_ok=True)
        await respond_json(send, self._shown(file))

    # ------------------------------------------------------------ batches

    async def batches(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at `BATCHES`, or below it."""
        owner = _owner(caller)
        name, _, action = scope["path"].removeprefix(BATCHES).removeprefix("/").partition("/")
        with _told():
            if not name:
                check_method(scope, "GET", "POST")
                if scope["method"] == "POST":
                    name = await self._create(owner, caller.key, scope, receive)
                else:
                    await respond_json(send, _page(await asyncio.to_thread(self._store.shown, owner), scope))
                    return
            elif action not in ("", "cancel"):
                raise no_such_path(scope)
            else:
                check_method(scope, "POST" if action else "GET")
            found = await asyncio.to_thread(self._store.shown, owner, name)
            if not found:
                raise RequestError(HTTPStatus.NOT_FOUND, f"there is no batch {shortened(name)}", param="batch_id")
            await respond_json(send, await self._cancel(owner, found[0]) if action else found[0])

    async def _create(self, owner: str, key: str, scope: Scope, receive: Receive) -> str:
        order = await read_order(receive, scope, self._bodies, BatchOrder, MAX_BODY_BYTES)
        seconds = _checked(order)
        file = await asyncio.to_thread(self._store.file, owner, order.input_file_id)
        if file is None or file.purpose != "batch":
            message = f"there is no file {shortened(order.input_file_id)} of purpose batch"
            raise RequestError(HTTPStatus.BAD_REQUEST, message, param="input_file_id")
        window = (order.completion_window, seconds)
        try:
            name = await asyncio.to_thread(
                self._store.create, owner, key, order.endpoint, file.id, window, order.metadata
            )
        except FullError as error:
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, str(error)) from None
        self._changed()
        return name

    async def _cancel(self, owner: str, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if batch["status"] not in ("validating", "in_progress", "cancelling"):
            raise RequestError(HTTPStatus.BAD_REQUEST, f"{batch['id']} is {batch['status']} and cannot be cancelled")
        await asyncio.to_thread(self._store.cancel, batch["id"])
        self._changed()
        (now,) = await asyncio.to_thread(self._store.shown, owner, batch["id"])
        return now


def _checked(order: BatchOrder) -> float:
    """The completion window of `order` in seconds.

    Raises:
        RequestError: something in it cannot be had (400).
    """
    if order.endpoint not in ENDPOINTS:
        message = f"'endpoint' is one of {', '.join(ENDPOINTS)}, not {shortened(order.endpoint)}"
        raise RequestError(HTTPStatus.BAD_REQUEST, message, param="endpoint")
    found = _WINDOW.fullmatch(order.completion_window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= MOST_WINDOW_SECONDS:
        message = f"'completion_window' is a time such as 24h, at most 7d, not {shortened(order.completion_window)}"
        raise RequestError(HTTPStatus.BAD_REQUEST, message, param="completion_window")
    entries = order.metadata or {}
    if len(entries) > MOST_ENTRIES or any(len(n) > MOST_NAME or len(v) > MOST_VALUE for n, v in entries.items()):
        message = f"'metadata' has at most {MOST_ENTRIES} entries, of {MOST_NAME} and {MOST_VALUE} characters"
        raise RequestError(HTTPStatus.BAD_REQUEST, message, param="metadata")
    return seconds


def _owner(caller: Caller) -> str:
    return caller.tenant.name if caller.tenant is not None else NOBODY


def _query(scope: Scope) -> dict[str, str]:
    asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    return {name: values[-1] for name, values in asked.items()}


def _page(rows: Sequence[Mapping[str, Any]], scope: Scope) -> dict[str, object]:
    """The part of a list that `?after=ID&limit=N` asks for."""
    asked = _query(scope)
    limit = asked.get("limit", str(MOST_LISTED if scope["path"].startswith(FILES) else 20))
    if _LIMIT.fullmatch(limit) is None:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"'limit' is a number above 0, not {limit[:20]!r}", param="limit")
    after = asked.get("after")
    first = next((place + 1 for place, row in enumerate(rows) if row["id"] == after), 0 if after is None else len(rows))
    page = rows[first : first + int(limit)]
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ids, "has_more": first + len(page) < len(rows)}


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        log.error("batches: %s", error)
        raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "batches cannot be read or written at present") from None


# ---------------------------------------------------------------- forms


class UploadForm:
    """Reads a form as it comes: its fields, and its `file`, whose content goes to `written`; then `filename` is set.

    Each method raises ValueError if it is no form, or has more than a form for a file has.
    """

    def __init__(self, boundary: bytes, written: Path) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._written = written
        self._target: BinaryIO | None = None
        self._header, self._about = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._options: dict[bytes, bytes] = {}
        self._value = bytearray()
        self._parts = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._about.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take,
                "on_part_end": self._end,
            },
        )

    def write(self, data: bytes) -> None:
        """The next part of the body."""
        self._parser.write(data)

    def close(self) -> None:
        """Read no more."""
        if self._target is not None:
            self._target.close()
            self._target = None

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS} parts")
        self._headers.clear()
        self._value.clear()

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._about)
        self._header.clear()
        self._about.clear()

    def _end_headers(self) -> None:
        _, self._options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in self._options:
            raise ValueError("a part of it has no name")
        if self._headers.get(b"content-transfer-encoding", b"binary").strip().lower() not in _PLAIN:
            raise ValueError("a part of it is encoded; send it as it is")
        if self._is_file and self.filename is None:
            self._target = open(self._written, "wb")  # noqa: SIM115 -- closed with its part

    @property
    def _is_file(self) -> bool:
        return self._options[b"name"] == b"file" and b"filename" in self._options

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._target is not None:
            self._target.write(data[start:end])
        elif len(self._value) + end - start > MOST_FIELD_BYTES:
            raise ValueError(f"a field of it has more than {MOST_FIELD_BYTES} bytes")
        else:
            self._value += data[start:end]

    def _end(self) -> None:
        if self._target is not None:
            self.close()
            self.filename = Path(self._options[b"filename"].decode(errors="replace")).name or "batch.jsonl"
        elif not self._is_file:
            self.fields[self._options[b"name"].decode(errors="replace")] = self._value.decode(errors="replace")


async def _read_form(scope: Scope, receive: Receive, written: Path) -> UploadForm:
    """Read multipart/form-data; the content of `file` goes to `written`.

    Raises:
        RequestError: it is none (400), too large (413), or stopped coming (408).
        ClientGoneError: the client closed the connection.
    """
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise RequestError(HTTPStatus.BAD_REQUEST, "send the file as multipart/form-data, with `purpose` and `file`")
    form = UploadForm(options[b"boundary"], written)
    size, more = 0, True
    clock = asyncio.get_running_loop().time
    begun = clock()
    try:
        while more:
            try:
                async with asyncio.timeout_at(latest(begun, clock(), size)):
                    message = await receive()
            except TimeoutError:
                text = f"the file stopped coming after {size} bytes, or came too slowly"
                raise RequestError(HTTPStatus.REQUEST_TIMEOUT, text, headers=[CLOSE]) from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > MOST_FILE_BYTES:
                text = f"a file has at most {MOST_FILE_BYTES} bytes"
                raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, param="file", headers=[CLOSE])
            await asyncio.to_thread(form.write, part)
    except ValueError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the form cannot be read: {error}") from None
    finally:
        form.close()
    return form
