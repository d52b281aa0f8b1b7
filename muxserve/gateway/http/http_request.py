"""The HTTP request that a task works for, from its arrival to its answer."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muxserve.gateway.limits.admission import Caller
from muxserve.gateway.limits.priorities import RequestLevels
from muxserve.gateway.limits.tenants import NOBODY, TenantRequest

if TYPE_CHECKING:
    from muxserve.gateway.status.tracing import HttpTrace


# The key of a scope under which a request of a batch has who asked for it; clients set no keys of scopes.
BATCH = "muxserve.batch"


@dataclass(frozen=True, slots=True)
class BatchCaller:
    """Whose batch a request is of."""

    caller: Caller


@dataclass(slots=True, eq=False)
class HttpRequest:
    """The HTTP request that a task works for. `arrival` is in seconds of the monotonic clock; `retry_after`, in
    seconds, is the header of that name if the answer is 503. It `waited` if it was not let in at once. `request_id` is
    its name for the client and in logs; units have other names for its requests to them."""

    arrival: float
    disconnected: bool = False
    waited: bool = False
    priority: RequestLevels = field(default_factory=RequestLevels)
    retry_after: int | None = None
    group: str = ""
    model: str = ""
    tenant: TenantRequest | None = None
    trace: HttpTrace | None = None
    request_id: str = ""
    # What answers in place of its model, if that is something else.
    fallback: str = ""
    # Who has asked for it in a batch.
    batch: BatchCaller | None = None
    # Whose responses it may see and leaves; the messages before the one that it asks for, where that is kept; and what
    # makes it after the client has been answered.
    owner: str = NOBODY
    conversation: list[Any] | None = None
    background: asyncio.Task[Any] | None = None

    def group_of(self, request_id: str) -> str:
        """What the requests to units that this one makes have in common: the id of the first of them."""
        self.group = self.group or request_id
        return self.group


current_http: ContextVar[HttpRequest | None] = ContextVar("current_http", default=None)
