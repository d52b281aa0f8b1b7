"""What happens to the requests of a model, in order, for whoever has to tell it elsewhere."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Event(StrEnum):
    """What became of a request."""

    CAME = "came"
    PREFILLED = "prefilled"
    LEFT = "left"


class Note(NamedTuple):
    """One event. Of a request that came: the `tokens` that it has, how many more it may generate at most, and whether
    it brought its KV with it. One that is preempted leaves, and comes again."""

    event: Event
    request_id: str
    tokens: int = 0
    max_tokens: int = 0
    with_kv: bool = False
