"""Tenants share the endpoint: what each may use, how much of it in a minute and at once, and what it has used.

The gateways of a fleet run on one machine, and the kernel spreads connections over them, so that a tenant's requests
may all come to one of them. So they keep what is left of each limit together, in a SQLite file of the run directory,
which goes with the run. Usage and budgets are in a database, which stays (`muxserve.gateway.usage`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CollectorRegistry, Counter

from muxserve.gateway.http.errors import RequestError, Send, respond_json, retry_after
from muxserve.gateway.limits.admission import Caller
from muxserve.gateway.usage.budgets import BudgetStatus, spent, statuses
from muxserve.gateway.usage.database import transaction
from muxserve.gateway.usage.issued_keys import IssuedKeys
from muxserve.gateway.usage.usage_log import COLUMNS, UsageLog, Used, today
from muxserve.net.sockets import local_secret
from muxserve.spec import FleetSpec, TenantSpec

log = logging.getLogger(__name__)

USAGE_PATH = "/admin/usage"
# OpenAI's name for a budget that is used up.
INSUFFICIENT_QUOTA = "insufficient_quota"
RATE_KINDS = ("requests", "tokens")
RATE_HEADERS = ("limit", "remaining", "reset")
# What is used by keys that belong to no tenant.
NOBODY = "-"
MINUTE = 60.0
# A gateway that is stopped while it writes must not stop the others: they let a request in instead.
LOCKED_SECONDS = 0.1
OPEN_SECONDS = 5.0
FLUSH_SECONDS = 1.0

_LIMITS = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS buckets (
    tenant TEXT, kind TEXT, level REAL, at REAL, PRIMARY KEY (tenant, kind)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS running (
    tenant TEXT, gateway INTEGER, requests INTEGER, PRIMARY KEY (tenant, gateway)) WITHOUT ROWID;
"""


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

    If the file fails, everybody is let in: limits protect the fleet from its tenants, not from a full disk. What this
    gateway has in service it knows by itself, and it corrects the file as soon as that can be written again.

    Args:
        file: where it is kept.
        gateway: which gateway this is; what one before it under this number had in service counts no more.
        clock: seconds, the same for all gateways.
    """

    def __init__(self, file: str, gateway: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._clock = clock
        # Requests of tenants that are limited in them, and the tenants of which the file says something else.
        self._inside: defaultdict[str, int] = defaultdict(int)
        self._unwritten: set[str] = set()
        # All gateways open the file at the same time, and nobody is served yet.
        self._db = sqlite3.connect(file, timeout=OPEN_SECONDS, isolation_level=None, check_same_thread=False)
        self._db.executescript(_LIMITS)
        with transaction(self._db):
            self._db.execute("DELETE FROM running WHERE gateway = ?", (gateway,))
        self._db.execute(f"PRAGMA busy_timeout = {round(1000 * LOCKED_SECONDS)}")

    def enter(self, tenant: TenantSpec) -> Allowance:
        """A request of `tenant` begins.

        Raises:
            LimitExceededError: it may not; then nothing has changed.
        """
        if not tenant.limits:
            return Allowance()
        allowance = self._try(partial(self._let_in, tenant))
        if tenant.limits.max_concurrency:
            self._inside[tenant.name] += 1
            if allowance is None:
                self._unwritten.add(tenant.name)
        return allowance or Allowance()

    def spend(self, tenant: TenantSpec, tokens: int) -> Allowance:
        """`tenant`, whose tokens are limited, has used `tokens`."""
        return self._try(lambda: self._spend(tenant, self._read(tenant), "tokens", tokens)) or Allowance()

    def leave(self, tenant: TenantSpec) -> None:
        """A request that had entered is done."""
        if tenant.limits.max_concurrency:
            self._inside[tenant.name] -= 1
            self._unwritten.add(tenant.name)
            self.settle()

    def settle(self) -> None:
        """Write how many requests are in service where the file says something else."""
        if self._unwritten:
            self._try(Allowance)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _try(self, change: Callable[[], Allowance]) -> Allowance | None:
        """What `change` comes to, with all that it writes; None if the file fails, and then it has written nothing."""
        try:
            with transaction(self._db):
                for name in self._unwritten:
                    self._write_inside(name, self._inside[name])
                allowance = change()
        except sqlite3.Error as error:
            log.warning("limits of tenants are not held at present: %s", error)
            return None
        self._unwritten.clear()
        return allowance

    def _let_in(self, tenant: TenantSpec) -> Allowance:
        allowance = self._read(tenant)
        inside = self._inside[tenant.name]
        if tenant.limits.max_concurrency:
            query = "SELECT total(requests) FROM running WHERE tenant = ? AND gateway != ?"
            (elsewhere,) = self._db.execute(query, (tenant.name, self._gateway)).fetchone()
            if inside + elsewhere >= tenant.limits.max_concurrency:
                raise LimitExceededError("concurrency", 1.0, allowance)
        for kind, bucket in allowance.buckets.items():
            if bucket.level < 1:
                raise LimitExceededError(kind, bucket.seconds_until(1), allowance)
        if tenant.limits.max_concurrency:
            self._write_inside(tenant.name, inside + 1)
        return self._spend(tenant, allowance, "requests", 1)

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

    def _write_inside(self, tenant: str, requests: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO running VALUES (?, ?, ?)", (tenant, self._gateway, requests))


def prefix_salt(secret: bytes, tenant: str, own: str | None) -> str:
    """What keeps the prefixes of `tenant` apart from all others', and those with the salt `own` from its other ones.
    Nobody who does not know `secret` can send a salt that comes to the same."""
    return hashlib.blake2b(msgspec.json.encode([tenant, own]), key=secret, digest_size=32).hexdigest()


class TenantRequest:
    """A request of a tenant while it is served: what it uses is taken from the limits and added up. `model` is what it
    is counted for, which may be another than it asked for."""

    __slots__ = ("_caller", "_limited", "_tenancy", "allowance", "model", "name", "weight")

    def __init__(self, tenancy: Tenancy, caller: Caller, model: str, allowance: Allowance, limited: bool) -> None:
        self._tenancy = tenancy
        self._caller = caller
        self._limited = limited
        tenant = caller.tenant
        self.model = model
        self.name = tenant.name if tenant is not None else NOBODY
        self.weight = tenant.weight if tenant is not None else 1.0
        self.allowance = allowance

    def cache_salt(self, own: str | None) -> str | None:
        """The salt of vLLM's block hashes for a request that came with the salt `own`: its KV is found only by requests
        with the same one."""
        tenant = self._caller.tenant
        if tenant is None or tenant.shares_prefixes:
            return own
        return prefix_salt(self._tenancy.secret, self.name, own)

    def prompted(self, tokens: int) -> None:
        """A prompt of `tokens` tokens is submitted."""
        self._spend(tokens)

    def ended(self, model: str, outcome: str, used: Used) -> None:
        """One of its answers is done, with what it used in all."""
        self._spend(used.output_tokens)
        self._tenancy.count(self._caller, model, outcome, used)

    def _spend(self, tokens: int) -> None:
        tenant = self._caller.tenant
        if self._limited and tenant is not None and tenant.limits.tokens_per_minute and tokens:
            self.allowance = self._tenancy.limits.spend(tenant, tokens)


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
        self.keys: IssuedKeys | None = None
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
            "Requests refused since the tenant was at a limit: requests, tokens, concurrency, or a budget.",
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
            self.usage.load()
            self.keys = IssuedKeys(fleet.usage_file)
        self._tenants = fleet.tenants

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
    def serving(self, caller: Caller, model: str, limited: bool = True) -> Iterator[TenantRequest | None]:
        """A request for `model` while it is served; None where nothing is counted. The limits by the minute and at once
        are for those that are `limited`.

        Raises:
            RequestError: the tenant is at one of its limits (429).
        """
        tenant = caller.tenant
        if self.usage is None and tenant is None:
            yield None
            return
        limited = limited and tenant is not None
        allowance = self._enter(tenant, model) if limited and tenant is not None else Allowance()
        request = TenantRequest(self, caller, model, allowance, limited)
        try:
            yield request
        finally:
            if limited and tenant is not None:
                self.limits.leave(tenant)
            if self.usage is not None:
                self.usage.add(request.name, request.model, Used(requests=1), caller.key)

    def check_budgets(self, caller: Caller, model: str) -> None:
        """Let a request for `model` pass unless a budget of its tenant is used up.

        Raises:
            RequestError: one is (429, `insufficient_quota`).
        """
        if caller.tenant is None or not caller.tenant.budgets:
            return
        used_up = spent(model, self.budgets(caller.tenant))
        if used_up is not None:
            self._refused.labels(caller.tenant.name, model, f"{used_up.period}_budget").inc()
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS,
                used_up.words,
                headers=[
                    retry_after(max(1, math.ceil(used_up.resets_at - time.time()))),
                    # OpenAI's clients would ask again at once.
                    (b"x-should-retry", b"false"),
                ],
                kind=INSUFFICIENT_QUOTA,
            )

    def budgets(self, tenant: TenantSpec) -> list[BudgetStatus]:
        """The budgets of `tenant`, with what is used of each."""
        if self.usage is None:
            return []
        return [*statuses(tenant.name, tenant.budgets, today(), self.usage.sums, self.usage.unwritten(tenant.name))]

    def count(self, caller: Caller, model: str, outcome: str, used: Used) -> None:
        """An answer has ended."""
        tenant = caller.tenant.name if caller.tenant is not None else NOBODY
        self._requests.labels(tenant, model, outcome).inc()
        tokens = {"prompt": used.prompt_tokens, "cached": used.cached_tokens, "output": used.output_tokens}
        for kind, count in tokens.items():
            self._tokens.labels(tenant, model, kind).inc(count)
        if self.usage is not None:
            self.usage.add(tenant, model, used, caller.key)

    async def keep(self) -> None:
        """Write the usage, again and again."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if self._limits is not None:
                self._limits.settle()
            if self.usage is not None:
                await self.usage.flush()

    async def report(self, query: bytes, tenant: TenantSpec | None, send: Send) -> None:
        """Answer `USAGE_PATH`: of all tenants, or of `tenant` alone if it is no admin.

        Raises:
            RequestError: `query` has something else than days, a tenant, and what the rows are by (400).
        """
        asked = {name: values[-1] for name, values in parse_qs(query.decode("latin-1")).items()}
        since, until = _day(asked, "since", "0001-01-01"), _day(asked, "until", "9999-12-31")
        by = asked.get("by", "model")
        if by not in COLUMNS:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"'by' is model or key, not {by[:40]!r}", param="by")
        of = tenant.name if tenant is not None and not tenant.admin else asked.get("tenant")
        rows: list[dict[str, object]] = []
        budgets: list[BudgetStatus] = []
        if self.usage is not None:
            await self.usage.flush()
            try:
                rows = await asyncio.to_thread(self.usage.read, since, until, of, by)
            except sqlite3.Error as error:
                log.error("what tenants used cannot be read: %s", error)
                raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the usage database cannot be read") from None
            budgets = [each for spec in self._tenants if of in (None, spec.name) for each in self.budgets(spec)]
        await respond_json(send, {"object": "list", "data": rows, "budgets": budgets})

    def close(self) -> None:
        """Write what is left to write."""
        if self.usage is not None:
            self.usage.close()
        if self.keys is not None:
            self.keys.close()
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
