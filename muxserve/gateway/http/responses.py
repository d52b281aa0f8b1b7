"""Responses that are kept: what `previous_response_id` goes on from, and what `/v1/responses/ID` answers with.

All gateways of a fleet keep them in one SQLite file, which outlives them. A background response is
followed and cancelled in the gateway that runs it; the others pass such requests on to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qs

from muxserve.gateway.http.errors import (
    Receive,
    RequestError,
    Scope,
    Send,
    check_method,
    no_such_path,
    respond,
    respond_json,
    retry_after,
    shortened,
)
from muxserve.gateway.http.peers import OtherGateways
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.usage.database import transaction
from muxserve.spec import ResponsesSpec, public_name

log = logging.getLogger(__name__)

PATH = "/v1/responses/"
# A gateway that is stopped while it writes must not stop the others.
LOCKED_SECONDS = 1.0
TIDY_SECONDS = 5.0

_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA wal_autocheckpoint = 0;
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT, id TEXT, model TEXT, format TEXT, gateway INTEGER, status TEXT, at REAL, size INTEGER,
    response TEXT, messages TEXT, PRIMARY KEY (owner, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_age ON responses (at, size);
CREATE INDEX IF NOT EXISTS running ON responses (gateway) WHERE status IN ('queued', 'in_progress');
CREATE TABLE IF NOT EXISTS total (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER);
INSERT OR IGNORE INTO total VALUES (1, 0);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON responses BEGIN
    UPDATE total SET bytes = bytes - old.size; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF size ON responses BEGIN
    UPDATE total SET bytes = bytes + new.size - old.size; END;
"""
_SAVE = """
INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    status = excluded.status, size = excluded.size, response = excluded.response, messages = excluded.messages
"""
_FAIL = """
UPDATE responses SET status = 'failed', response = json_set(response, '$.status', 'failed', '$.error',
    json_object('code', 'server_error', 'message', ?))
WHERE status IN ('queued', 'in_progress') AND """
_ENDED = "status NOT IN ('queued', 'in_progress')"


class StoredResponse(NamedTuple):
    """A response as it is kept: its model and gateway, its JSON, and the `messages` of the whole
    conversation before it in the `format` of the model's front end."""

    model: str
    format: str
    gateway: int
    status: str
    response: str
    messages: str

    @property
    def is_running(self) -> bool:
        """Whether it is not complete yet."""
        return self.status in ("queued", "in_progress")


class ResponseStore:
    """The kept responses of a fleet, in a file that its gateways share. Nothing waits for a disk but `tidy`.

    Args:
        spec: where they are kept, how many bytes of them, and for how long.
        gateway: which gateway this is; what one before it under this number was making has failed.
        count: how many gateways there are.
        clock: seconds since 1970.
        taking_over: from another fleet, whose gateways have the same numbers and still finish what they make.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        spec: ResponsesSpec,
        gateway: int,
        count: int,
        clock: Callable[[], float] = time.time,
        taking_over: bool = False,
    ) -> None:
        self._spec = spec
        self._gateway = gateway
        self._clock = clock
        # What has become of background responses, as far as that could not be written.
        self._unwritten: dict[tuple[str, str], StoredResponse] = {}
        self._running: set[tuple[str, str]] = set()
        try:
            # Conversations are nobody else's; what SQLite puts beside the file gets its mode.
            os.close(os.open(spec.file, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = self._open()
            if not taking_over:
                words = "the server ended before this response was complete"
                with transaction(self._db):
                    self._db.execute(f"{_FAIL}(gateway = ? OR gateway >= ?)", (words, gateway, count))
        except (OSError, sqlite3.Error) as error:
            raise OSError(f"responses cannot be kept in {spec.file}: {error}") from None

    def find(self, owner: str, name: str) -> StoredResponse | None:
        """The response `name` of `owner`.

        Raises:
            RequestError: the file cannot be read at present (503).
        """
        query = "SELECT model, format, gateway, status, response, messages FROM responses WHERE owner = ? AND id = ?"
        with self._told():
            row = self._db.execute(f"{query} AND at > ?", (owner, name, self._oldest)).fetchone()
        return None if row is None else StoredResponse(*row)

    def save(self, owner: str, name: str, made: StoredResponse) -> None:
        """Keep a response, or what has become of it. The oldest ones go where there is no room.

        If it cannot be kept, the log says so; the client has its answer all the same. The end of a response in the
        background, for which clients wait, is written as soon as it can be.
        """
        key = owner, name
        try:
            self._write(key, made)
        except sqlite3.Error as error:
            log.error("response %s cannot be kept in %s: %s", name, self._spec.file, error)
            if key in self._running:
                self._unwritten[key] = made
            return
        self._unwritten.pop(key, None)
        if made.is_running:
            self._running.add(key)
        else:
            self._running.discard(key)

    def _write(self, key: tuple[str, str], made: StoredResponse) -> None:
        owner, name = key
        size = len(made.response.encode()) + len(made.messages.encode())
        with transaction(self._db):
            if size > self._spec.max_bytes:
                log.warning("response %s has %d bytes, more than may be kept", name, size)
                words = f"this response has {size} bytes, more than this server keeps"
                self._db.execute(f"{_FAIL}owner = ? AND id = ?", (words, owner, name))
                return
            row = (owner, name, made.model, made.format, made.gateway, made.status, self._clock(), size)
            self._db.execute(_SAVE, (*row, made.response, made.messages))
            self._make_room(key)

    def write_rest(self) -> None:
        """Try again to write the ends of responses that could not be written."""
        for (owner, name), made in [*self._unwritten.items()]:
            self.save(owner, name, made)

    def delete(self, owner: str, name: str) -> None:
        """Keep a response no longer.

        Raises:
            RequestError: the file cannot be written at present (503).
        """
        with self._told(), transaction(self._db):
            self._db.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, name))

    async def keep(self) -> None:
        """Delete what is too old, and bring the file up to date, again and again."""
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            self.write_rest()
            try:
                await asyncio.to_thread(self.tidy)
            except sqlite3.Error as error:
                log.error("kept responses in %s: %s", self._spec.file, error)

    def tidy(self) -> None:
        """Delete what is too old, and bring the file up to date. In any thread.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        with closing(self._open()) as db:
            db.execute(f"DELETE FROM responses WHERE at <= ? AND {_ENDED}", (self._oldest,))
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Close the file."""
        self.write_rest()
        self._db.close()

    @property
    def _oldest(self) -> float:
        return self._clock() - self._spec.keep_seconds

    def _make_room(self, newest: tuple[str, str]) -> None:
        (used,) = self._db.execute("SELECT bytes FROM total").fetchone()
        if used <= self._spec.max_bytes:
            return
        query = f"SELECT owner, id, size FROM responses WHERE (owner, id) != (?, ?) AND {_ENDED} ORDER BY at"
        going = []
        for owner, name, size in self._db.execute(query, newest):
            going.append((owner, name))
            used -= size
            if used <= self._spec.max_bytes:
                break
        self._db.executemany("DELETE FROM responses WHERE owner = ? AND id = ?", going)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            log.error("kept responses in %s: %s", self._spec.file, error)
            raise RequestError(
                HTTPStatus.SERVICE_UNAVAILABLE, "responses cannot be read at present", headers=[retry_after(1)]
            ) from None

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._spec.file, timeout=LOCKED_SECONDS, isolation_level=None)
        db.executescript(_TABLES)
        return db


class ResponseRoutes:
    """Answers requests about one response: GET (also as the stream that it is), DELETE, and POST to its `/cancel`.

    Args:
        store: has them; None where none are kept.
        index: which gateway this is.
        models: the applications of the models that they come from, by version.
        peers: the other gateways.
    """

    def __init__(
        self, store: ResponseStore | None, index: int, models: Mapping[str, ServedApp], peers: OtherGateways
    ) -> None:
        self._store = store
        self._index = index
        self._models = models
        self._peers = peers

    async def answer(
        self, owner: str, model: str | None, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request for `path`, which begins with `PATH`.

        Args:
            owner: whose responses may be asked for.
            model: only those of this model, if it is given.

        Raises:
            RequestError: there is no such response, or not for this.
        """
        name, _, action = path.removeprefix(PATH).partition("/")
        methods = {"": ("GET", "DELETE"), "cancel": ("POST",)}.get(action)
        if not name or methods is None:
            raise no_such_path(scope)
        check_method(scope, *methods)
        if self._store is None:
            raise not_kept(name)
        found = self._store.find(owner, name)
        if found is None or model not in (None, public_name(found.model)):
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is no response {shortened(name)}", param="response_id")
        if scope["method"] == "DELETE":
            if found.is_running:
                raise RequestError(HTTPStatus.BAD_REQUEST, f"{name} is not complete yet; cancel it first")
            self._store.delete(owner, name)
            await respond_json(send, {"id": name, "object": "response", "deleted": True})
        elif not action and not _wants_stream(scope):
            await respond(send, HTTPStatus.OK, found.response.encode())
        elif action and not found.is_running:
            raise RequestError(
                HTTPStatus.BAD_REQUEST,
                f"{name} is {found.status}; only a background response can be cancelled",
                param="response_id",
            )
        elif found.gateway != self._index:
            await self._peers.relay(found.gateway, scope, send)
        elif found.model in self._models:
            inner = {**scope, "path": path, "raw_path": path.encode()}
            await self._models[found.model].app(inner, receive, send)
        else:
            raise RequestError(HTTPStatus.NOT_FOUND, f"the model {found.model!r} of {name} is not served any more")


def not_kept(name: str) -> RequestError:
    """Why there is no response in a fleet that keeps none."""
    return RequestError(
        HTTPStatus.NOT_FOUND,
        f"there is no response {shortened(name)}: this server keeps none; set gateway.responses in its fleet file",
        param="response_id",
    )


def _wants_stream(scope: Scope) -> bool:
    asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("stream", ["false"])[-1]
    return asked.lower() in ("1", "true", "yes", "on")
