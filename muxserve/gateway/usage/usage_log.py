"""What every tenant and key used of every model by day (UTC): counted in memory, and added to the database."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime

from muxserve.gateway.usage.budgets import PeriodSums
from muxserve.gateway.usage.database import UsageDatabase, transaction

log = logging.getLogger(__name__)

_ADD = """
INSERT INTO {} VALUES ({}) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens, output_tokens = output_tokens + excluded.output_tokens
"""
_ADD_USAGE = _ADD.format("usage", ", ".join("?" * 7))
_ADD_KEY_USAGE = _ADD.format("key_usage", ", ".join("?" * 8))
_AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
# Columns of the rows that are read, by what they are of.
COLUMNS = {"model": ("day", "tenant", "model", *_AMOUNTS), "key": ("day", "tenant", "model", "key", *_AMOUNTS)}


@dataclass(slots=True)
class Used:
    """What was used of a model."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Those that count for budgets."""
        return self.prompt_tokens + self.output_tokens

    def add(self, other: Used) -> None:
        """`other` as well."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens


# By day, tenant, model and key.
UsageRows = dict[tuple[str, str, str, str], Used]


class UsageLog:
    """The usage of one gateway, which several add to one file.

    Rows are added in numbered portions, one after the other, and the number is written with them: a portion is in the
    file once, also where it was tried again after an error that came behind its commit. What is not written yet goes
    with the gateway when it is killed.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._database = UsageDatabase(file)
        self._new: UsageRows = {}
        # What is being written, or could not be.
        self._portion: UsageRows = {}
        self._number = 0
        self._writer = secrets.token_hex(8)
        self._writing = threading.Lock()
        self._flushing = asyncio.Lock()
        self._sums = PeriodSums(date.min, {}, {})
        # The state of the file that `_sums` is of.
        self._seen: tuple[int, int, date] | None = None

    def add(self, tenant: str, model: str, used: Used, key: str = "") -> None:
        """Add to today's."""
        self._new.setdefault((today().isoformat(), tenant, model, key), Used()).add(used)

    @property
    def sums(self) -> PeriodSums:
        """What the file has of the current day and month, by the last `flush`."""
        return self._sums

    def unwritten(self, tenant: str) -> Iterator[tuple[date, str, int]]:
        """Day, model and tokens of what `tenant` used and `sums` does not have."""
        for rows in (self._portion, self._new):
            for (day, whose, model, _), used in rows.items():
                if whose == tenant and used.tokens:
                    yield date.fromisoformat(day), model, used.tokens

    async def flush(self) -> None:
        """Write what is new, and read what all gateways have written; what cannot be written is kept for the next
        time."""
        async with self._flushing:
            for _ in range(2):  # a portion that could not be written before, and what came after it
                self._begin_portion()
                try:
                    self._sums = await asyncio.to_thread(self._exchange)
                except sqlite3.Error as error:
                    log.error("what tenants used cannot be written to %s: %s", self._file, error)
                    return
                self._portion = {}
                if not self._new:
                    return

    def load(self) -> None:
        """Read what was used before, at the start."""
        try:
            self._sums = self._exchange()
        except sqlite3.Error as error:
            log.error("what tenants used cannot be read from %s: %s", self._file, error)

    def close(self) -> None:
        """Write what is new for the last time."""
        try:
            for _ in range(2):  # as in `flush`
                self._begin_portion()
                self._exchange()
                self._portion = {}
        except sqlite3.Error as error:
            log.error("what tenants used cannot be written to %s: %s", self._file, error)
        with self._writing:
            self._database.close()

    def read(self, since: str, until: str, tenant: str | None, by: str = "model") -> list[dict[str, object]]:
        """The usage from day `since` to day `until`, both included; by `tenant` alone, if it is given, and also by key
        if that is what it is `by`.

        Raises:
            sqlite3.Error: it cannot be read.
        """
        columns, table = COLUMNS[by], "usage" if by == "model" else "key_usage"
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE day BETWEEN ? AND ? AND (? IS NULL OR tenant = ?) "
        with self._writing:
            rows = (
                self._database.connection()
                .execute(f"{query}ORDER BY 1, 2, 3, 4", (since, until, tenant, tenant))
                .fetchall()
            )
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _begin_portion(self) -> None:
        if not self._portion and self._new:
            self._portion, self._new = self._new, {}
            self._number += 1

    def _exchange(self) -> PeriodSums:
        with self._writing:
            try:
                db = self._database.connection()
                if self._portion:
                    with transaction(db):
                        self._write(db, self._portion.items())
                return self._read_sums(db, today())
            except sqlite3.Error:
                self._database.close()
                raise

    def _write(self, db: sqlite3.Connection, rows: Iterable[tuple[tuple[str, str, str, str], Used]]) -> None:
        query = "SELECT number FROM writers WHERE writer = ?"
        (number,) = db.execute(query, (self._writer,)).fetchone() or (0,)
        if number >= self._number:
            return
        db.execute("INSERT OR REPLACE INTO writers VALUES (?, ?, ?)", (self._writer, self._number, time.time()))
        for (day, tenant, model, key), used in rows:
            amounts = (used.requests, used.prompt_tokens, used.cached_tokens, used.output_tokens)
            db.execute(_ADD_USAGE, (day, tenant, model, *amounts))
            if key:
                db.execute(_ADD_KEY_USAGE, (day, tenant, model, key, *amounts))

    def _read_sums(self, db: sqlite3.Connection, day: date) -> PeriodSums:
        """The sums of now; those known already where neither the file nor the day is another."""
        (changed,) = db.execute("PRAGMA data_version").fetchone()
        state = (self._database.opened, changed, day)
        if not self._portion and state == self._seen:
            return self._sums
        query = "SELECT tenant, model, sum(prompt_tokens + output_tokens) FROM usage WHERE day BETWEEN ? AND ? "

        def sums(first: date) -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = {}
            bounds = (first.isoformat(), day.isoformat())
            for tenant, model, tokens in db.execute(f"{query}GROUP BY tenant, model", bounds):
                found.setdefault(tenant, {})[model] = tokens
            return found

        self._seen = state
        return PeriodSums(day, sums(day), sums(day.replace(day=1)))


def today() -> date:
    """The day in UTC."""
    return datetime.now(UTC).date()
