"""Who may send requests, and how many of each model are in service at once. Pure: no socket, no clock."""

from __future__ import annotations

import hmac
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

from muxserve.spec import TenantSpec

# A client told to come back later than this would rather go elsewhere.
MAX_RETRY_AFTER_SECONDS = 60
# Weight of the newest request in the mean service time.
SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may come in; `level` is the priority level that the key has, if it has one."""

    level: str | None = None
    tenant: TenantSpec | None = None

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
    """

    def __init__(
        self, keys: Iterable[str], levels: Mapping[str, str] | None = None, tenants: Iterable[TenantSpec] = ()
    ) -> None:
        self._anyone = Caller()
        self._callers = [(sha256(key.encode()).digest(), Caller((levels or {}).get(key))) for key in keys]
        for tenant in tenants:
            caller = Caller(tenant.priority, tenant)
            self._callers += [(bytes.fromhex(known), caller) for known in tenant.key_hashes]

    def __bool__(self) -> bool:
        return bool(self._callers)

    def admit(self, presented: bytes | None) -> Caller | None:
        """Who comes with the key `presented`; None if it is none of ours. Takes the same time whichever it is, and
        wherever it differs."""
        if not self._callers:
            return self._anyone
        digest = sha256(presented or b"").digest()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found if presented is not None else None


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


class Gate:
    """Lets `max_concurrency` requests of one model in at once; `max_queue` more wait, first come, first served.

    A request of several prompts or choices is one of them, since these take turns with other requests. But as many
    `prompts` as may be in service and wait are the most that are let in, beside others, together.
    """

    def __init__(self, max_concurrency: int, max_queue: int) -> None:
        self.max_concurrency = max_concurrency
        self.max_queue = max_queue
        self.inside = 0
        self.prompts = 0
        self.mean_seconds = 1.0
        # In order of arrival. In a deque each of many clients that leave at the same time would be looked for.
        self._waiting: OrderedDict[object, None] = OrderedDict()

    def resize(self, max_concurrency: int, max_queue: int) -> list[object]:
        """Other limits from now on. Returns the tickets that enter because of that."""
        self.max_concurrency, self.max_queue = max_concurrency, max_queue
        entering = []
        while self._waiting and self.inside < self.max_concurrency:
            entering.append(self._waiting.popitem(last=False)[0])
            self.inside += 1
        return entering

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def arrive(self, ticket: object, prompts: int = 1) -> AdmissionVerdict:
        """A request arrives; `ticket`, one of its own, is what `leave` and `withdraw` know it by if it has to wait."""
        if self.prompts and self.prompts + prompts > self.max_concurrency + self.max_queue:
            return AdmissionVerdict.REFUSE
        if self.inside < self.max_concurrency:
            self.inside += 1
            verdict = AdmissionVerdict.ENTER
        elif len(self._waiting) < self.max_queue:
            self._waiting[ticket] = None
            verdict = AdmissionVerdict.WAIT
        else:
            return AdmissionVerdict.REFUSE
        self.prompts += prompts
        return verdict

    def leave(self, seconds: float, prompts: int = 1) -> object | None:
        """A request that was inside for `seconds` is done. Returns the ticket that enters in its place, if any."""
        self.prompts -= prompts
        self.mean_seconds += SMOOTHING * (seconds - self.mean_seconds)
        if self._waiting and self.inside <= self.max_concurrency:
            return self._waiting.popitem(last=False)[0]
        self.inside -= 1
        return None

    def withdraw(self, ticket: object, prompts: int = 1) -> bool:
        """A waiting request's client went away. False if it has entered meanwhile."""
        if ticket not in self._waiting:
            return False
        del self._waiting[ticket]
        self.prompts -= prompts
        return True

    def retry_after(self) -> int:
        """Seconds after which a refused client may find room: the time that the queue takes to drain by half."""
        seconds = self.mean_seconds * (1 + len(self._waiting) / 2) / self.max_concurrency
        return min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(seconds)))
