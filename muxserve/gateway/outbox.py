"""What `Router` wants done."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from muxserve.gateway.requests import Tracked
from muxserve.wire import Message


class Failure(Enum):
    """Why a request ends without its answer: it can `never` be served; no replica was there `late` into its wait; its
    model is `degraded`, and tried again at a time that is known; it makes engines fail (`error`); it may be `again`
    tried."""

    NEVER = "never"
    LATE = "late"
    DEGRADED = "degraded"
    ERROR = "error"
    AGAIN = "again"


@dataclass(slots=True)
class RouterOutbox:
    """What is to be done, each in order: messages by unit, messages to the global scheduler, requests that end with an
    error (no longer in the table), and what is to be counted: (model, reason) of requests that are served again, and
    (model, source, destination) of those that moved."""

    units: list[tuple[str, Message]] = field(default_factory=list)
    scheduler: list[Message] = field(default_factory=list)
    failed: list[tuple[Tracked, str, Failure]] = field(default_factory=list)
    again: list[tuple[str, str]] = field(default_factory=list)
    moved: list[tuple[str, str, str]] = field(default_factory=list)
