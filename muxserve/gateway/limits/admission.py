"""Who may send requests, and how many of each model are in service at once. No socket, no clock."""

from __future__ import annotations

import hmac
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256

from muxserve.gateway.usage.issued_keys import IssuedKey, fingerprint
from muxserve.spec import TenantSpec

# A client that should come back later than this would rather go elsewhere.
MAX_RETRY_AFTER_SECONDS = 60
# Weight of the newest request in the mean service time.
SMOOTHING = 0.2
# One request may ask for this percentage of the prompts that may be in service and wait: 1,024 with the usual limits,
# as many as vLLM takes in one body.
LARGEST_PERCENT = 80


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may come in; `level` is the priority level that the key has, if it has one."""

    level: str | None = None
    tenant: TenantSpec | None = None
    # What usage calls the key; empty without one.
    key: str = ""

    @property
    def is_admin(self) -> bool:
        """Whether the whole fleet's state is for this caller. Keys of no tenant are the operator's."""
        return self.tenant is None or self.tenant.admin

    def may_use(self, model: str) -> bool:
        """Whether `model` is there for this caller."""
        return self.tenant is None or self.tenant.may_use(model)


class ApiKeys:
    """The API keys that open the endpoint; none at all lets everyone in.

    Args:
        keys: the keys.
        levels: the priority levels of those that have one.
        tenants: whose keys open it as well.
        issued: finds keys of `tenants` that were made while the fleet served.
    """

    def __init__(
        self,
        keys: Iterable[str],
        levels: Mapping[str, str] | None = None,
        tenants: Iterable[TenantSpec] = (),
        issued: Callable[[bytes], IssuedKey | None] = lambda _: None,
    ) -> None:
        self._anyone = Caller()
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._issued = issued
        self._callers: list[tuple[bytes, Caller]] = []
        for key in keys:
            digest = sha256(key.encode()).digest()
            self._callers.append((digest, Caller((levels or {}).get(key), key=fingerprint(digest.hex()))))
        for tenant in self._tenants.values():
            for known in tenant.key_hashes:
                self._callers.append((bytes.fromhex(known), Caller(tenant.priority, tenant, fingerprint(known))))

    def __bool__(self) -> bool:
        return bool(self._callers or self._tenants)

    def admit(self, presented: bytes | None) -> Caller | None:
        """Who comes with the key `presented`; None if it is none of ours. Takes the same time whichever it is, and
        wherever it differs."""
        if not self:
            return self._anyone
        if presented is None:
            return None
        digest = sha256(presented).digest()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found if found is not None else self._issued_to(digest)

    def of(self, tenant: str, key: str) -> Caller | None:
        """Who came with `key` as `tenant`, empty for a key of none, when a batch was made; None if it is gone."""
        if not tenant:
            return Caller(key=key)
        spec = self._tenants.get(tenant)
        return Caller(spec.priority, spec, key) if spec is not None else None

    def _issued_to(self, digest: bytes) -> Caller | None:
        """Whose key that was made later this is; none where its tenant is no longer there."""
        issued = self._issued(digest) if self._tenants else None
        tenant = self._tenants.get(issued.tenant) if issued is not None else None
        return Caller(tenant.priority, tenant, issued.id) if issued is not None and tenant is not None else None


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The API key in ASGI `headers`: `Authorization: Bearer KEY`, or `X-Api-Key: KEY` as Anthropic's clients send."""
    found = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            found = value.strip()
    return found


def part_of(limit: int, index: int, count: int) -> int:
    """What gateway `index` of `count` has of a limit of them all: the parts add up to it where each can have 1."""
    return max(1, limit // count + (index < limit % count)) if limit else 0


class AdmissionVerdict(Enum):
    """What becomes of a request at the gate."""

    ENTER = "enter"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(slots=True, eq=False)
class GateShare:
    """What a tenant has of a gate. Tickets wait in order of arrival, with their number; in a deque each of many clients
    that leave at the same time would be looked for."""

    weight: float = 1.0
    inside: int = 0
    prompts: int = 0
    waiting: OrderedDict[object, int] = field(default_factory=OrderedDict)


class Gate:
    """Lets `max_concurrency` requests of one model in at once; `max_queue` more wait. The next comes from the waiting
    tenant with the fewest inside, by its weight; requests of one tenant, and tenants with equally many, first come,
    first served.

    A request of several prompts or choices is one of them, since these alternate with other requests. But as many
    `prompts` as may be in service and wait are the most that are let in together, and one request may bring `largest`
    of them, so that others find room beside it. Where others have taken all that, a tenant may still have its part: as
    much as if those that are there shared it.
    """

    def __init__(self, max_concurrency: int, max_queue: int) -> None:
        self.max_concurrency = max_concurrency
        self.max_queue = max_queue
        self.inside = 0
        self.waiting = 0
        self.prompts = 0
        self.mean_seconds = 1.0
        self._tenants: dict[str, GateShare] = {}
        self._arrivals = 0

    @property
    def largest(self) -> int:
        """Prompts that one request may bring."""
        return math.ceil((self.max_concurrency + self.max_queue) * LARGEST_PERCENT / 100)

    def resize(self, max_concurrency: int, max_queue: int) -> list[object]:
        """Other limits from now on. Returns the tickets that enter because of that."""
        self.max_concurrency, self.max_queue = max_concurrency, max_queue
        entering = []
        while self.waiting and self.inside < self.max_concurrency:
            entering.append(self._next())
            self.inside += 1
        return entering

    def arrive(self, ticket: object, prompts: int = 1, tenant: str = "", weight: float = 1.0) -> AdmissionVerdict:
        """A request arrives; `ticket`, one of its own, is what `leave` and `withdraw` know it by if it has to wait."""
        share = self._tenants.setdefault(tenant, GateShare())
        share.weight = weight
        if not self._has_room(share, prompts):
            self._forget(tenant)
            return AdmissionVerdict.REFUSE
        share.prompts += prompts
        self.prompts += prompts
        if self.inside < self.max_concurrency:
            self.inside += 1
            share.inside += 1
            return AdmissionVerdict.ENTER
        self._arrivals += 1
        share.waiting[ticket] = self._arrivals
        self.waiting += 1
        return AdmissionVerdict.WAIT

    def leave(self, seconds: float, prompts: int = 1, tenant: str = "") -> object | None:
        """A request that was inside for `seconds` is done. Returns the ticket that enters in its place, if any."""
        self._gone(tenant, prompts)
        self._tenants[tenant].inside -= 1
        self._forget(tenant)
        self.mean_seconds += SMOOTHING * (seconds - self.mean_seconds)
        if self.waiting and self.inside <= self.max_concurrency:
            return self._next()
        self.inside -= 1
        return None

    def withdraw(self, ticket: object, prompts: int = 1, tenant: str = "") -> bool:
        """A waiting request's client went away. False if it has entered meanwhile."""
        share = self._tenants.get(tenant)
        if share is None or ticket not in share.waiting:
            return False
        del share.waiting[ticket]
        self.waiting -= 1
        self._gone(tenant, prompts)
        self._forget(tenant)
        return True

    def retry_after(self) -> int:
        """Seconds after which a refused client may find room: the time that the queue takes to drain by half."""
        seconds = self.mean_seconds * (1 + self.waiting / 2) / self.max_concurrency
        return min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(seconds)))

    def _has_room(self, share: GateShare, prompts: int) -> bool:
        most = self.max_concurrency + self.max_queue
        if self.inside >= self.max_concurrency and self.waiting >= self.max_queue:
            if len(share.waiting) >= self.max_queue // len(self._tenants):
                return False
        elif self.prompts + prompts <= most:
            return True
        return share.prompts + prompts <= most // len(self._tenants)

    def _next(self) -> object:
        """The ticket that enters next."""
        waiting = [share for share in self._tenants.values() if share.waiting]
        share = min(waiting, key=lambda each: (each.inside / each.weight, next(iter(each.waiting.values()))))
        ticket, _ = share.waiting.popitem(last=False)
        share.inside += 1
        self.waiting -= 1
        return ticket

    def _gone(self, tenant: str, prompts: int) -> None:
        self._tenants[tenant].prompts -= prompts
        self.prompts -= prompts

    def _forget(self, tenant: str) -> None:
        share = self._tenants[tenant]
        if not share.inside and not share.waiting:
            del self._tenants[tenant]
