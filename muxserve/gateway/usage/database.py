"""The usage database: one SQLite file, which all gateways of a fleet write and which outlives them.

No process owns the file. Each gateway adds what it has counted, in transactions of its own; SQLite's locks keep them
apart, and its log (WAL) keeps a transaction whole whoever dies. An earlier version of MuxServe, which may still drain
during an upgrade, adds to `usage` alone, so that this table stays as it was.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

# A gateway that is stopped while it writes must not stop the others for longer.
LOCKED_SECONDS = 5.0
# How long it is remembered which additions a gateway made last, after its end.
_WRITERS_SECONDS = 7 * 86400.0

_AMOUNTS = "requests INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER"
_TABLES = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, model TEXT, {_AMOUNTS}, PRIMARY KEY (day, tenant, model)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS key_usage (
    day TEXT, tenant TEXT, model TEXT, key TEXT, {_AMOUNTS}, PRIMARY KEY (day, tenant, model, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS writers (writer TEXT PRIMARY KEY, number INTEGER, at REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, hash TEXT UNIQUE, tenant TEXT, name TEXT, hint TEXT, created_at REAL, expires_at REAL,
    revoked_at REAL) WITHOUT ROWID;
"""


class UsageDatabase:
    """One connection to the database in `file`, opened when it is needed, and anew where the file is another one: it
    may have been restored from a backup."""

    def __init__(self, file: str) -> None:
        self.file = file
        # How often it was opened.
        self.opened = 0
        self._db: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None

    def connection(self) -> sqlite3.Connection:
        """The connection.

        Raises:
            sqlite3.Error: the file cannot be opened or written.
        """
        if self._db is None or self._inode != self._inode_now():
            self.close()
            self._db = _open(self.file)
            self._inode = self._inode_now()
            self.opened += 1
        return self._db

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _inode_now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.file)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _open(file: str) -> sqlite3.Connection:
    try:
        # Nobody else reads who asked how much.
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise sqlite3.OperationalError(f"{file}: {error.strerror}") from None
    db = sqlite3.connect(file, timeout=LOCKED_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(_TABLES)
        db.execute("DELETE FROM writers WHERE at < ?", (time.time() - _WRITERS_SECONDS,))
    except sqlite3.Error:
        db.close()
        raise
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing of what the block writes.

    Raises:
        sqlite3.Error: nothing was written.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.rollback()
        raise
