"""What the global scheduler decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to the instance."""

    request_id: str
    instance: str


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """The request cannot be served; `reason` is for the user. `late` tells one that has waited in vain for an instance
    from one that none could hold."""

    request_id: str
    reason: str
    late: bool = False


def too_long(model: str, demand: int, largest: int) -> str:
    """The reason for refusing a request that needs more KV (tokens) than the largest instance has."""
    return (
        f"the request needs KV cache for {demand} tokens and no instance of {model} has more than {largest}; "
        "shorten the prompt"
    )


def not_ready(model: str, limit: float) -> str:
    """The reason for refusing a request that has waited for an instance for `limit` seconds."""
    return f"{model} was not ready within {limit:g} s (wake_limit); try again, it may be starting"


@dataclass(frozen=True, slots=True)
class Pair:
    """From now on the source gives requests to the destination."""

    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Unpair:
    """The source gives away no more requests; those on their way arrive."""

    source: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start that many instances."""

    count: int


@dataclass(frozen=True, slots=True)
class Drain:
    """The instance takes no more requests; those that run are moved away or end, those that wait go elsewhere."""

    instance: str


@dataclass(frozen=True, slots=True)
class Resume:
    """The draining instance stays after all."""

    instance: str


@dataclass(frozen=True, slots=True)
class StopInstance:
    """The instance is drained: end it."""

    instance: str


Decision = Union[Dispatch, RefuseRequest, Pair, Unpair, Start, Drain, Resume, StopInstance]
