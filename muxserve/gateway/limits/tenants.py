"""Tenants share the endpoint: what each may use, how much of it in a minute and at once, and what it has used.

The gateways of a fleet run on one machine, and the kernel spreads connections over them, so that a tenant's requests
may all come to one of them. So they keep what is left of each limit together, in a SQLite file of the run directory,
which goes with the run. Usage is added up in a file of its own, which stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CollectorRegistry, Counter

from muxserve.gateway.http.errors import RequestError, Send, respond_json, retry_after
from muxserve.net.sockets import local_secret
from muxserve.spec import FleetSpec, TenantSpec

log = logging.getLogger(__name__)

USAGE_PATH = "/admin/usage"
RATE_KINDS = ("requests", "tokens")
RATE_HEADERS = ("limit", "remaining", "reset")
# What is used by keys that belong to no tenant.
NOBODY = "-"
MINUTE = 60.0
# A gateway that is stopped while it writes must not stop the others: they let a request in instead.
LOCKED_SECONDS = 0.1
FLUSH_SECONDS = 1.0

_LIMITS = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS buckets (
    tenant TEXT, kind TEXT, level REAL, at REAL, PRIMARY KEY (tenant, kind)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS running (
    tenant TEXT, gateway INTEGER, requests INTEGER, PRIMARY KEY (tenant, gateway)) WITHOUT ROWID;
"""
_USAGE = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, model TEXT, requests INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER,
    output_tokens INTEGER, PRIMARY KEY (day, tenant, model)) WITHOUT ROWID;
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens, output_tokens = output_tokens + excluded.output_tokens
"""
FIELDS = ("day", "tenant", "model", "requests", "prompt_tokens", "cached_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class MinuteBucket:
    """A token bucket: `per_minute` flow in evenly, and those of one minute are kept at most.

    It may be overdrawn, since how long an answer becomes is not known before; then it must fill up first. `at` is when
    it had `level`, in seconds.
    """

    per_minute: int
    level: float
    at: float

    def filled(self, now: float) -> MinuteBucket:
        """The bucket at `now`."""
        level = self.level + max(0.0, now - self.at) * self.per_minute / MINUTE
        return MinuteBucket(self.per_minute, min(float(self.per_minute), level), now)

    def spend(self, amount: float) -> MinuteBucket:
        """The bucket with `amount` less."""
        return MinuteBucket(self.per_minute, self.level - amount, self.at)

    def seconds_until(self, level: float) -> float:
        """How long it takes until it has `level`."""
        return max(0.0, level - self.level) * MINUTE / self.per_minute


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of a tenant's limits by the minute, of those that it has: kind ("requests", "tokens") -> bucket."""

    buckets: dict[str, MinuteBucket] = field(default_factory=dict)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """As OpenAI's API tells it."""
        headers = []
        for kind, bucket in self.buckets.items():
            left = max(0, math.floor(bucket.level))
            told = bucket.per_minute, left, _duration(bucket.seconds_until(bucket.per_minute))
            for what, value in zip(RATE_HEADERS, told, strict=True):
                headers.append((f"x-ratelimit-{what}-{kind}".encode(), str(value).encode()))
        return headers


def _duration(seconds: float) -> str:
    """Such as OpenAI writes: "6m0s", "1.5s", "20ms"."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, seconds = divmod(math.ceil(10 * seconds) / 10, 60)
    return f"{int(minutes)}m{seconds:g}s" if minutes else f"{seconds:g}s"


class LimitExceededError(Exception):
    """A tenant is at its limit of `kind` (requests, tokens, concurrency); it may come again after `seconds`."""

    def __init__(self, kind: str, seconds: float, allowance: Allowance) -> None:
        super().__init__(kind)
        self.kind = kind
        self.seconds = seconds
        self.allowance = allowance


class SharedLimits:
    """What is left of each tenant's limits, for all gateways that open the same file. Nothing waits for a disk.

    If the file fails, everybody is let in: limits protect the fleet from its tenants, not from a full disk.

    Args:
        file: where it is kept.
        gateway: which gateway this is; what one before it under this number had in service counts no more.
        clock: seconds, the same for all gateways.
    """

    def __init__(self, file: str, gateway: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._clock = clock
        self._db = sqlite3.connect(file, timeout=LOCKED_SECONDS, isolation_level=None, check_same_thread=False)
        self._db.executescript(_LIMITS)
        with self._transaction():
            self._db.execute("DELETE FROM running WHERE gateway = ?", (gateway,))

    def enter(self, tenant: TenantSpec) -> Allowance:
        """A request of `tenant` begins.

        Raises:
            LimitExceededError: it may not; then nothing has changed.
        """
        if not tenant.limits:
            return Allowance()
        with self._transaction():
            allowance = self._read(tenant)
            if tenant.limits.max_concurrency:
                query = "SELECT sum(requests) FROM running WHERE tenant = ?"
                if (self._db.execute(query, (tenant.name,)).fetchone()[0] or 0) >= tenant.limits.max_concurrency:
                    raise LimitExceededError("concurrency", 1.0, allowance)
            for kind, bucket in allowance.buckets.items():
                if bucket.level < 1:
                    raise LimitExceededError(kind, bucket.seconds_until(1), allowance)
            if tenant.limits.max_concurrency:
                self._count(tenant, 1)
            return self._spend(tenant, allowance, "requests", 1)
        return Allowance()

    def spend(self, tenant: TenantSpec, tokens: int) -> Allowance:
        """`tenant`, whose tokens are limited, has used `tokens`."""
        with self._transaction():
            return self._spend(tenant, self._read(tenant), "tokens", tokens)
        return Allowance()

    def leave(self, tenant: TenantSpec) -> None:
        """A request that had entered is done."""
        if tenant.limits.max_concurrency:
            with self._transaction():
                self._count(tenant, -1)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except LimitExceededError:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            log.warning("limits of tenants are not held at present: %s", error)
            if self._db.in_transaction:
                self._db.rollback()

    def _read(self, tenant: TenantSpec) -> Allowance:
        now = self._clock()
        stored = {
            kind: (level, at)
            for kind, level, at in self._db.execute(
                "SELECT kind, level, at FROM buckets WHERE tenant = ?", (tenant.name,)
            )
        }
        limits = dict(
            zip(RATE_KINDS, (tenant.limits.requests_per_minute, tenant.limits.tokens_per_minute), strict=True)
        )
        return Allowance(
            {
                kind: MinuteBucket(limit, *stored.get(kind, (float(limit), now))).filled(now)
                for kind, limit in limits.items()
                if limit
            }
        )

    def _spend(self, tenant: TenantSpec, allowance: Allowance, kind: str, amount: float) -> Allowance:
        bucket = allowance.buckets.get(kind)
        if bucket is None:
            return allowance
        left = bucket.spend(amount)
        row = (tenant.name, kind, left.level, left.at)
        self._db.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?)", row)
        return Allowance({**allowance.buckets, kind: left})

    def _count(self, tenant: TenantSpec, change: int) -> None:
        self._db.execute(
            "INSERT INTO running VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET requests = max(0, requests + ?)",
            (tenant.name, self._gateway, max(0, change), change),
        )


@dataclass(slots=True)
class Used:
    """What a tenant used of a model."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Used) -> None:
        """`other` as well."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens


UsageRows = dict[tuple[str, str, str], Used]


class UsageLog:
    """What every tenant used of every model by day (UTC), in a SQLite file that several gateways add to.

    What a gateway has not written yet, that of a second, goes with it when it is killed.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._new: UsageRows = {}

    def add(self, tenant: str, model: str, used: Used) -> None:
        """Add to today's."""
        day = datetime.now(UTC).date().isoformat()
        self._new.setdefault((day, tenant, model), Used()).add(used)

    async def flush(self) -> None:
        """Write what is new; what cannot be written is kept for the next time."""
        rows, self._new = self._new, {}
        try:
            await asyncio.to_thread(self._write, rows)
        except sqlite3.Error as error:
            log.error("what tenants used cannot be written to %s: %s", self._file, error)
            for (day, tenant, model), used in rows.items():
                self._new.setdefault((day, tenant, model), Used()).add(used)

    def close(self) -> None:
        """Write what is new for the last time."""
        try:
            self._write(self._new)
        except sqlite3.Error as error:
            log.error("what tenants used cannot be written to %s: %s", self._file, error)

    def read(self, since: str, until: str, tenant: str | None) -> list[dict[str, object]]:
        """The usage from day `since` to day `until`, both included; by `tenant` alone, if it is given.

        Raises:
            sqlite3.Error: it cannot be read.
        """
        query = "SELECT * FROM usage WHERE day BETWEEN ? AND ? AND (? IS NULL OR tenant = ?) ORDER BY 1, 2, 3"
        with closing(self._open()) as db:
            return [dict(zip(FIELDS, row, strict=True)) for row in db.execute(query, (since, until, tenant, tenant))]

    def _write(self, rows: UsageRows) -> None:
        if not rows:
            return
        with closing(self._open()) as db, db:
            db.executemany(
                _ADD,
                [
                    (*key, used.requests, used.prompt_tokens, used.cached_tokens, used.output_tokens)
                    for key, used in rows.items()
                ],
            )

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._file)
        db.execute(_USAGE)
        return db


def prefix_salt(secret: bytes, tenant: str, own: str | None) -> str:
    """What keeps the prefixes of `tenant` apart from all others', and those with the salt `own` from its other ones.
    Nobody who does not know `secret` can send a salt that comes to the same."""
    return hashlib.blake2b(msgspec.json.encode([tenant, own]), key=secret, digest_size=32).hexdigest()


class TenantRequest:
    """A request of a tenant while it is served: what it uses is taken from the limits and added up."""

    __slots__ = ("_spec", "_tenancy", "allowance", "name", "weight")

    def __init__(self, tenancy: Tenancy, spec: TenantSpec | None, allowance: Allowance) -> None:
        self._tenancy = tenancy
        self._spec = spec
        self.name = spec.name if spec is not None else NOBODY
        self.weight = spec.weight if spec is not None else 1.0
        self.allowance = allowance

    def cache_salt(self, own: str | None) -> str | None:
        """The salt of vLLM's block hashes for a request that came with the salt `own`: its KV is found only by requests
        with the same one."""
        if self._spec is None or self._spec.shares_prefixes:
            return own
        return prefix_salt(self._tenancy.secret, self.name, own)

    def prompted(self, tokens: int) -> None:
        """A prompt of `tokens` tokens is submitted."""
        self._spend(tokens)

    def ended(self, model: str, outcome: str, used: Used) -> None:
        """One of its answers is done, with what it used in all."""
        self._spend(used.output_tokens)
        self._tenancy.count(self.name, model, outcome, used)

    def _spend(self, tokens: int) -> None:
        if self._spec is not None and self._spec.limits.tokens_per_minute and tokens:
            self.allowance = self._tenancy.limits.spend(self._spec, tokens)


class Tenancy:
    """The tenants of a gateway.

    Args:
        fleet: has the tenants; others may come with `learn`.
        index: which of its gateways this is.
        registry: where it is counted what they use.
    """

    def __init__(self, fleet: FleetSpec, index: int, registry: CollectorRegistry) -> None:
        self._limits: SharedLimits | None = None
        self._limits_file = fleet.socket("tenants").removesuffix(".sock") + ".sqlite"
        self._run_dir = Path(fleet.run_dir)
        self._index = index
        self.secret = b""
        self.usage: UsageLog | None = None
        by = ["tenant", "model_name"]
        self._requests = Counter(
            "muxserve_tenant_requests", "Answers that ended, by outcome.", [*by, "outcome"], registry=registry
        )
        self._tokens = Counter(
            "muxserve_tenant_tokens",
            "Tokens of prompts, those of them that were cached, and tokens of answers.",
            [*by, "kind"],
            registry=registry,
        )
        self._refused = Counter(
            "muxserve_tenant_requests_refused",
            "Requests refused since the tenant was at a limit: requests, tokens, concurrency.",
            [*by, "limit"],
            registry=registry,
        )
        self.learn(fleet)

    def learn(self, fleet: FleetSpec) -> None:
        """These are the tenants now."""
        if fleet.tenants and self._limits is None:
            self._limits = SharedLimits(self._limits_file, self._index)
            # All gateways of a run have the same, also those that are started again: tenants find their prefixes.
            self.secret = local_secret(self._run_dir, binding=True) or b""
        if fleet.usage_file and self.usage is None:
            self.usage = UsageLog(fleet.usage_file)

    def forget(self, model: str) -> None:
        """Show nothing of `model` any more: the fleet has it no longer. What is kept of its usage stays."""
        for metric in (self._requests, self._tokens, self._refused):
            metric.remove_by_labels({"model_name": model})

    @property
    def limits(self) -> SharedLimits:
        """What is left of the limits; only where there are tenants."""
        assert self._limits is not None
        return self._limits

    @contextmanager
    def serving(self, tenant: TenantSpec | None, model: str) -> Iterator[TenantRequest | None]:
        """A request for `model` while it is served; None where nothing is counted.

        Raises:
            RequestError: `tenant` is at one of its limits (429).
        """
        if self.usage is None and tenant is None:
            yield None
            return
        request = TenantRequest(self, tenant, self._enter(tenant, model) if tenant is not None else Allowance())
        try:
            yield request
        finally:
            if tenant is not None:
                self.limits.leave(tenant)
            if self.usage is not None:
                self.usage.add(request.name, model, Used(requests=1))

    def count(self, tenant: str, model: str, outcome: str, used: Used) -> None:
        """An answer has ended."""
        self._requests.labels(tenant, model, outcome).inc()
        tokens = {"prompt": used.prompt_tokens, "cached": used.cached_tokens, "output": used.output_tokens}
        for kind, count in tokens.items():
            self._tokens.labels(tenant, model, kind).inc(count)
        if self.usage is not None:
            self.usage.add(tenant, model, used)

    async def keep(self) -> None:
        """Write the usage, again and again."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if self.usage is not None:
                await self.usage.flush()

    async def report(self, query: bytes, tenant: TenantSpec | None, send: Send) -> None:
        """Answer `USAGE_PATH`: of all tenants, or of `tenant` alone if it is no admin.

        Raises:
            RequestError: `query` has no two days.
        """
        asked = {name: values[-1] for name, values in parse_qs(query.decode("latin-1")).items()}
        since, until = _day(asked, "since", "0001-01-01"), _day(asked, "until", "9999-12-31")
        rows: list[dict[str, object]] = []
        if self.usage is not None:
            await self.usage.flush()
            of = tenant.name if tenant is not None and not tenant.admin else asked.get("tenant")
            rows = await asyncio.to_thread(self.usage.read, since, until, of)
        await respond_json(send, {"object": "list", "data": rows})

    def close(self) -> None:
        """Write what is left to write."""
        if self.usage is not None:
            self.usage.close()
        if self._limits is not None:
            self._limits.close()

    def _enter(self, tenant: TenantSpec, model: str) -> Allowance:
        try:
            return self.limits.enter(tenant)
        except LimitExceededError as limit:
            self._refused.labels(tenant.name, model, limit.kind).inc()
            most = {
                "requests": f"{tenant.limits.requests_per_minute} requests per minute",
                "tokens": f"{tenant.limits.tokens_per_minute} tokens per minute",
                "concurrency": f"{tenant.limits.max_concurrency} requests at once",
            }[limit.kind]
            after = max(1, math.ceil(limit.seconds))
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"tenant {tenant.name} is at its limit of {most}; try again in {after} s",
                headers=[retry_after(after), *limit.allowance.headers()],
            ) from None


def _day(asked: dict[str, str], name: str, default: str) -> str:
    value = asked.get(name, default)
    try:
        return datetime.strptime(value, "%Y-%m-%d").date().isoformat()
    except ValueError:
        raise RequestError(
            HTTPStatus.BAD_REQUEST, f"'{name}' must be a day such as 2026-05-31, not {value[:40]!r}", param=name
        ) from None
