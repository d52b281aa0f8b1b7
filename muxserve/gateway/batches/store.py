"""Batches and their files on a disk: in one directory, which all gateways share and which outlives them.

    batches.sqlite     batches, the state and the result of each of their lines, files, and which gateway runs them
    files/ID           the content of a file; it is there before the database says so

One gateway runs all batches: the one that holds the lease. It renews the lease every few seconds, and lets it go when
it drains; another gateway takes it over when it has expired. Whatever the runner writes is written only while the
lease is its own, so that a gateway that was stopped for some time can change nothing any more. A result is written
once, with the counts of its batch, in one transaction. Lines without a result are asked again by the next runner.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from muxserve.gateway.batches.lines import LineError, PlannedLine
from muxserve.gateway.usage.database import transaction
from muxserve.spec import BatchesSpec

LOCKED_SECONDS = 5.0
LEASE_SECONDS = 10.0
# Batches of a tenant that may be there at a time, and have not ended.
MOST_OPEN = 1000
# Lines of them without a result, which take room in the database beside what files may take.
MOST_OPEN_LINES = 1_000_000
OPEN = ("validating", "in_progress", "finalizing", "cancelling")

_LINE = "number, custom_id, offset, length, model FROM lines"
_TIMES = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_TABLES = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT, purpose TEXT, filename TEXT, bytes INTEGER, created_at REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT, key TEXT, endpoint TEXT, input_file_id TEXT, completion_window TEXT,
    status TEXT, created_at REAL, {", ".join(f"{name}_at REAL" for name in _TIMES)}, output_file_id TEXT,
    error_file_id TEXT, errors TEXT, metadata TEXT, total INTEGER, completed INTEGER, failed INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT, number INTEGER, custom_id TEXT, offset INTEGER, length INTEGER, model TEXT, ok INTEGER, result TEXT,
    PRIMARY KEY (batch, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runner (one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT, until REAL);
"""


class StoredFile(msgspec.Struct, frozen=True):
    """A file; `created_at` in seconds since 1970."""

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: float

    def shown(self, keep_seconds: float) -> dict[str, object]:
        """As OpenAI's API has it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created_at),
            "expires_at": int(self.created_at + keep_seconds),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch: whose it is, with which key it came, and how it stands."""

    id: str
    owner: str
    key: str
    endpoint: str
    status: str
    created_at: float
    expires_at: float
    input_file_id: str


class LeaseLostError(Exception):
    """Another gateway runs the batches by now."""


class FullError(Exception):
    """There is no room for another file or batch; the message says which bound it is."""


class BatchStore:
    """The batches of a fleet. Every method may be called in any thread, and raises sqlite3.Error or OSError if the
    directory cannot be read or written.

    Args:
        spec: where they are kept, how much and for how long.
        clock: seconds since 1970.
    """

    def __init__(self, spec: BatchesSpec, clock: Callable[[], float] = time.time) -> None:
        self.spec = spec
        self.clock = clock
        self.name = secrets.token_hex(8)
        self._files = Path(spec.directory) / "files"
        self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(spec.directory, 0o700)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            Path(spec.directory) / "batches.sqlite",
            timeout=LOCKED_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        self._db.executescript(_TABLES)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    # ------------------------------------------------------------ files

    def path(self, name: str) -> Path:
        """Where the content of a file is."""
        return self._files / name

    def new_path(self) -> Path:
        """Where a file is written before it is added."""
        return self._files / f"{secrets.token_hex(12)}.new"

    def add_file(self, owner: str, purpose: str, filename: str, written: Path) -> StoredFile:
        """Keep a file that was written to `new_path()`.

        Raises:
            FullError: there is no room for it.
        """
        file = StoredFile(
            f"file-{secrets.token_hex(12)}", owner, purpose, filename, written.stat().st_size, self.clock()
        )
        with self._transaction():
            (used,) = self._db.execute("SELECT total(bytes) FROM files").fetchone()
            if used + file.bytes > self.spec.max_bytes:
                raise FullError(f"{used:,.0f} bytes of files are kept here, and {self.spec.max_bytes:,} is the most")
            os.replace(written, self.path(file.id))
            self._insert_file(file)
        return file

    def files(self, owner: str) -> list[StoredFile]:
        """The files of `owner`, the newest first."""
        query = "SELECT * FROM files WHERE owner = ? AND created_at > ? ORDER BY created_at DESC, id DESC"
        return [StoredFile(*row) for row in self._rows(query, (owner, self._oldest))]

    def file(self, owner: str, name: str) -> StoredFile | None:
        """The file `name` of `owner`."""
        rows = self._rows("SELECT * FROM files WHERE owner = ? AND id = ?", (owner, name))
        return StoredFile(*rows[0]) if rows else None

    def is_in_use(self, name: str) -> bool:
        """Whether a batch that has not ended reads the file."""
        query = f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({_marks(OPEN)})"
        return bool(self._rows(query, (name, *OPEN)))

    def delete_file(self, name: str) -> None:
        """Keep a file no longer."""
        with self._transaction():
            self._db.execute("DELETE FROM files WHERE id = ?", (name,))
        self.path(name).unlink(missing_ok=True)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """A part of a file."""
        with open(self.path(name), "rb") as file:
            file.seek(offset)
            return file.read(length)

    # ------------------------------------------------------------ batches, for whoever asks for them

    def create(
        self, owner: str, key: str, endpoint: str, file: str, window: tuple[str, float], metadata: object
    ) -> str:
        """A new batch of the requests in `file`, which are to be answered within the `window`: as it was asked for, and
        in seconds. Returns its id.

        Raises:
            FullError: `owner` has as many batches as there may be.
        """
        name, now = f"batch_{secrets.token_hex(12)}", self.clock()
        with self._transaction():
            query = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({_marks(OPEN)})"
            if self._db.execute(query, (owner, *OPEN)).fetchone()[0] >= MOST_OPEN:
                raise FullError(f"{MOST_OPEN} batches are open already; try again when some have ended")
            self._db.execute(
                "INSERT INTO batches (id, owner, key, endpoint, input_file_id, completion_window, status, created_at, "
                "expires_at, metadata, total, completed, failed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0)",
                (
                    *(name, owner, key, endpoint, file, window[0], "validating", now, now + window[1]),
                    msgspec.json.encode(metadata).decode(),
                ),
            )
        return name

    def shown(self, owner: str, name: str | None = None) -> list[dict[str, Any]]:
        """The batches of `owner`, or the one called `name`, as OpenAI's API has them; the newest first."""
        with self._lock:
            cursor = self._db.execute(
                "SELECT * FROM batches WHERE owner = ? AND (? IS NULL OR id = ?) ORDER BY created_at DESC, id DESC",
                (owner, name, name),
            )
            columns = [each[0] for each in cursor.description]
            return [_shown(dict(zip(columns, row, strict=True))) for row in cursor]

    def cancel(self, name: str) -> None:
        """Ask no further line of a batch. One that has ended, or is about to, stays as it is."""
        with self._transaction():
            query = "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE id = ? AND status IN (?, ?)"
            self._db.execute(query, (self.clock(), name, "validating", "in_progress"))

    # ------------------------------------------------------------ for the runner

    def claim(self) -> bool:
        """Take or renew the lease; whether it is this gateway's."""
        now = self.clock()
        with self._transaction():
            holder = self._db.execute("SELECT name, until FROM runner").fetchone()
            # Nobody can have it for longer: where it seems so, the clock was set back.
            if holder is not None and holder[0] != self.name and now < holder[1] <= now + LEASE_SECONDS:
                return False
            self._db.execute("INSERT OR REPLACE INTO runner VALUES (1, ?, ?)", (self.name, now + LEASE_SECONDS))
        return True

    def release(self) -> None:
        """Let another gateway run the batches."""
        with self._transaction():
            self._db.execute("DELETE FROM runner WHERE name = ?", (self.name,))

    def open_batches(self) -> list[StoredBatch]:
        """The batches that have not ended, the oldest first."""
        columns = ", ".join(StoredBatch.__struct_fields__)
        query = f"SELECT {columns} FROM batches WHERE status IN ({_marks(OPEN)}) ORDER BY created_at, id"
        return [StoredBatch(*row) for row in self._rows(query, OPEN)]

    def begin(self, batch: str, lines: Iterable[PlannedLine]) -> None:
        """The file of a batch is good: these are its lines.

        Raises:
            FullError: with them the open batches of its owner have more lines than they may have.
            LeaseLostError: see `LeaseLostError`; likewise below.
        """
        rows = [(batch, each.number, each.custom_id, each.offset, each.length, each.model) for each in lines]
        with self._as_runner():
            query = (
                "SELECT total(total - completed - failed) FROM batches "
                f"WHERE owner = (SELECT owner FROM batches WHERE id = ?) AND status IN ({_marks(OPEN)})"
            )
            if self._db.execute(query, (batch, *OPEN)).fetchone()[0] + len(rows) > MOST_OPEN_LINES:
                raise FullError(
                    f"open batches have at most {MOST_OPEN_LINES:,} requests without a result; try again when some "
                    "have ended"
                )
            changed = self._db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ? "
                "WHERE id = ? AND status = 'validating'",
                (self.clock(), len(rows), batch),
            )
            if changed.rowcount:  # it may have been cancelled
                self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, NULL, NULL)", rows)

    def fail(self, batch: str, errors: Iterable[LineError]) -> None:
        """The file of a batch is wrong: nothing of it is asked."""
        said = msgspec.json.encode({"object": "list", "data": list(errors)}).decode()
        with self._as_runner():
            query = "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? WHERE id = ? AND status = ?"
            self._db.execute(query, (self.clock(), said, batch, "validating"))

    def models(self, batch: str) -> list[str]:
        """The models that lines of a batch without a result are for."""
        query = "SELECT DISTINCT model FROM lines WHERE batch = ? AND ok IS NULL ORDER BY 1"
        return [model for (model,) in self._rows(query, (batch,))]

    def pending(self, batch: str, model: str, after: int, most: int) -> list[PlannedLine]:
        """The lines of a batch for `model` that have no result, in their order: at most `most`, behind number
        `after`."""
        query = f"SELECT {_LINE} WHERE batch = ? AND model = ? AND number > ? AND ok IS NULL ORDER BY number LIMIT ?"
        return [PlannedLine(*row) for row in self._rows(query, (batch, model, after, most))]

    def finish(self, batch: str, number: int, ok: bool, result: str) -> None:
        """Keep the result of a line, which is a line of the output file if it is `ok`, else of the error file. A line
        that has one keeps that."""
        with self._as_runner():
            query = "UPDATE lines SET ok = ?, result = ? WHERE batch = ? AND number = ? AND ok IS NULL"
            if self._db.execute(query, (int(ok), result, batch, number)).rowcount:
                count = "completed" if ok else "failed"
                self._db.execute(f"UPDATE batches SET {count} = {count} + 1 WHERE id = ?", (batch,))

    def finalizing(self, batch: str) -> None:
        """All lines of a batch have their results, and its files are written next."""
        with self._as_runner():
            query = "UPDATE batches SET status = 'finalizing', finalizing_at = ? WHERE id = ? AND status = ?"
            self._db.execute(query, (self.clock(), batch, "in_progress"))

    def end(self, batch: StoredBatch, status: str, left: Callable[[PlannedLine], str]) -> None:
        """Write the files of a batch, and end it with `status`.

        Args:
            left: the line of the error file for a line that has no result.
        """
        open_lines = self._rows(f"SELECT {_LINE} WHERE batch = ? AND ok IS NULL", (batch.id,))
        rows = [(left(line), batch.id, line.number) for line in (PlannedLine(*row) for row in open_lines)]
        with self._as_runner():
            query = "UPDATE lines SET ok = 0, result = ? WHERE batch = ? AND number = ? AND ok IS NULL"
            count = self._db.executemany(query, rows).rowcount if rows else 0
            self._db.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", (count, batch.id))
        made = [self._write_results(batch, ok, kind) for ok, kind in ((1, "output"), (0, "error"))]
        try:
            with self._as_runner():
                query = f"SELECT 1 FROM batches WHERE id = ? AND status IN ({_marks(OPEN)})"
                if self._db.execute(query, (batch.id, *OPEN)).fetchone() is None:
                    return  # another runner has ended it
                for file, written in made:
                    if file.bytes:
                        os.replace(written, self.path(file.id))
                        self._insert_file(file)
                names = [file.id if file.bytes else None for file, _ in made]
                self._db.execute(
                    f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ? "
                    "WHERE id = ?",
                    (status, self.clock(), *names, batch.id),
                )
                self._db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        finally:
            for _, written in made:
                written.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Forget what is older than it is kept, and what was left in the middle of a write."""
        query = "SELECT id FROM files WHERE created_at <= ?"
        for (name,) in self._rows(query, (self._oldest,)):
            if not self.is_in_use(name):
                self.delete_file(name)
        with self._transaction():
            self._db.execute(
                f"DELETE FROM batches WHERE created_at <= ? AND status NOT IN ({_marks(OPEN)})", (self._oldest, *OPEN)
            )
        known = {row[0] for row in self._rows("SELECT id FROM files", ())}
        for path in self._files.iterdir():
            # What is being written is younger.
            if path.name not in known and path.stat().st_mtime < self.clock() - 3600.0:
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------ inside

    @property
    def _oldest(self) -> float:
        return self.clock() - self.spec.keep_seconds

    def _write_results(self, batch: StoredBatch, ok: int, kind: str) -> tuple[StoredFile, Path]:
        """The file of a batch with its results that are `ok`, or those that are not, and where it is written."""
        written = self.new_path()
        with open(written, "w", encoding="utf-8") as file:
            for result in self._results(batch.id, ok):
                file.write(f"{result}\n")
            file.flush()
            os.fsync(file.fileno())
        name = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        size = written.stat().st_size
        return StoredFile(name, batch.owner, "batch_output", f"{batch.id}_{kind}.jsonl", size, self.clock()), written

    def _results(self, batch: str, ok: int) -> Iterator[str]:
        """In the order of the lines; some at a time, since all may be large."""
        last = -1
        while True:
            query = "SELECT number, result FROM lines WHERE batch = ? AND ok = ? AND number > ? ORDER BY 1 LIMIT 100"
            rows = self._rows(query, (batch, ok, last))
            if not rows:
                return
            yield from (result for _, result in rows)
            last = rows[-1][0]

    def _insert_file(self, file: StoredFile) -> None:
        row = msgspec.structs.astuple(file)
        self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", row)

    def _rows(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, transaction(self._db):
            yield

    @contextmanager
    def _as_runner(self) -> Iterator[None]:
        with self._transaction():
            holder = self._db.execute("SELECT name FROM runner").fetchone()
            if holder is None or holder[0] != self.name:
                raise LeaseLostError
            yield


def _marks(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    times = {f"{name}_at": _whole(row[f"{name}_at"]) for name in ("created", *_TIMES)}
    names = ("id", "endpoint", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id")
    return {
        "object": "batch",
        **{name: row[name] for name in names},
        **times,
        "errors": msgspec.json.decode(row["errors"]) if row["errors"] else None,
        "metadata": msgspec.json.decode(row["metadata"]),
        "request_counts": {"total": row["total"], "completed": row["completed"], "failed": row["failed"]},
    }


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
