"""API keys that are made while the fleet serves: kept by their SHA-256 in the usage database, for all gateways.

A gateway asks the file whenever such a key comes, so that a key that was revoked opens nothing from then on, in any
gateway. That takes some microseconds while the file is as it was.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable

import msgspec

from muxserve.gateway.usage.database import UsageDatabase, transaction

log = logging.getLogger(__name__)

# Who sees a key in a log, or in a file that should not have it, knows what it is.
PREFIX = "mux-"
_SHOWN = 4
_COLUMNS = "id, tenant, name, hint, created_at, expires_at, revoked_at"


class IssuedKey(msgspec.Struct, frozen=True):
    """A key without its text, of which `hint` has the end. Times are in seconds since 1970."""

    id: str
    tenant: str
    name: str
    hint: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def status(self, now: float) -> str:
        """`active`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


class IssuedKeys:
    """The keys in one database.

    Args:
        file: the usage database.
        clock: seconds since 1970.

    A file that cannot be read opens nothing that it has not opened before.
    """

    def __init__(self, file: str, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._database = UsageDatabase(file)
        # The state of the file that `_by_hash` is of.
        self._seen: tuple[int, int] | None = None
        self._by_hash: dict[str, IssuedKey] = {}

    def find(self, digest: bytes) -> IssuedKey | None:
        """The key with this SHA-256, if it is good at present."""
        try:
            self._refresh()
        except sqlite3.Error as error:
            log.error("API keys cannot be read from %s: %s", self._file, error)
            self._database.close()
        found = self._by_hash.get(digest.hex())
        return found if found is not None and found.status(self._clock()) == "active" else None

    def is_revoked(self, name: str) -> bool:
        """Whether `name` is a key that was revoked."""
        self._refresh()
        return any(key.id == name and key.revoked_at is not None for key in self._by_hash.values())

    def create(self, tenant: str, name: str, seconds: float | None) -> tuple[IssuedKey, str]:
        """A new key of `tenant`, good for `seconds`; and its text, which nobody can tell later.

        Raises:
            sqlite3.Error: it could not be written.
        """
        text = PREFIX + secrets.token_urlsafe(32)
        now = self._clock()
        expires = None if seconds is None else now + seconds
        key = IssuedKey(f"key_{secrets.token_hex(6)}", tenant, name, text[-_SHOWN:], now, expires)
        db = self._database.connection()
        with transaction(db):
            row = (key.id, digest_of(text), tenant, name, key.hint, now, expires, None)
            db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._seen = None
        return key, text

    def revoke(self, name: str) -> IssuedKey | None:
        """Open nothing with the key `name` any more; None if there is no such key. A second time changes nothing.

        Raises:
            sqlite3.Error: it could not be written.
        """
        db = self._database.connection()
        with transaction(db):
            query = "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
            db.execute(query, (self._clock(), name))
        self._seen = None
        return next((key for key in self.all() if key.id == name), None)

    def all(self) -> list[IssuedKey]:
        """Every key, also those that open nothing any more, in the order in which they were made.

        Raises:
            sqlite3.Error: they cannot be read.
        """
        self._refresh()
        return sorted(self._by_hash.values(), key=lambda key: (key.created_at, key.id))

    def last_days(self) -> dict[str, str]:
        """By key, the last day (UTC) on which it was used; also of keys in the fleet file.

        Raises:
            sqlite3.Error: they cannot be read.
        """
        return dict(self._database.connection().execute("SELECT key, max(day) FROM key_usage GROUP BY key"))

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _refresh(self) -> None:
        db = self._database.connection()
        (changed,) = db.execute("PRAGMA data_version").fetchone()
        state = (self._database.opened, changed)
        if state != self._seen:
            rows = db.execute(f"SELECT hash, {_COLUMNS} FROM keys").fetchall()
            self._by_hash = {row[0]: IssuedKey(*row[1:]) for row in rows}
            self._seen = state


def digest_of(text: str) -> str:
    """The SHA-256 of a key, as it is kept."""
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(digest: str) -> str:
    """What a key of the fleet file is called in usage, by its SHA-256: no key can be found by it."""
    return f"file-{digest[:8]}"
