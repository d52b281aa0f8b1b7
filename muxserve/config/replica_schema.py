"""The fleet file's objects for replicas: how many, which requests go first, and moving between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from muxserve.config.values import NAME_PATTERN, Seconds, Section, Size, switch
from muxserve.deployment import WatchdogRules
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.scaling import ScalingRules

_SCALING, _MIGRATION, _WATCHDOG = ScalingRules(), MigrationRules(), WatchdogRules()


class Replicas(Section):
    """How many replicas a model has. With `min` below `max` their number follows the load: their average freeness, in
    tokens per request (docs/replicas.md), is kept between `low` and `high`."""

    min: int = Field(default=1, ge=0, description="Fewest; 0: it may go to sleep, and a request wakes it")
    max: int = Field(ge=1, description="Most")
    start: int | None = Field(default=None, ge=0, description="At the start; else min, but at least 1")
    low: float = Field(
        default=_SCALING.low,
        allow_inf_nan=False,
        description="One more when freeness is below this, tokens per request",
    )
    high: float = Field(
        default=_SCALING.high,
        allow_inf_nan=False,
        description="One less when freeness is above this, tokens per request",
    )
    hold: Seconds = Field(default=_SCALING.hold, description="For so long on end, and so long between two changes")
    idle: Seconds = Field(
        default=_SCALING.idle_seconds, description="With min: 0, time without a request before the last one goes"
    )
    wake: Annotated[Seconds, Field(gt=0)] = Field(
        default=_SCALING.wake_limit, description="With min: 0, how long a request waits for a replica to come up"
    )

    @property
    def scales(self) -> bool:
        """Whether their number changes by itself."""
        return self.min < self.max

    @property
    def at_start(self) -> int:
        """How many there are at first."""
        return max(self.min, 1) if self.start is None else self.start


class ApiKey(Section):
    """An accepted key whose requests have a priority."""

    key: str = Field(min_length=1, description='Literal or "env:NAME"')
    priority: str | None = Field(default=None, description="Priority level of its requests; else the default one")


class Priority(Section):
    """One priority level."""

    rank: int = Field(ge=-1000, le=1000, description="Higher ranks go first")
    target_load: int | None = Field(
        default=None,
        ge=0,
        description="Tokens that a replica should hold at most while it runs a request of this level; else all it can",
    )


class Migration(Section):
    """Running requests move from full replicas to free ones. Freeness is in tokens per request."""

    source_below: float = Field(
        default=_MIGRATION.source_below,
        allow_inf_nan=False,
        description="Requests leave replicas of less freeness than this",
    )
    destination_above: float = Field(
        default=_MIGRATION.destination_above,
        allow_inf_nan=False,
        description="Requests go to replicas of more freeness than this",
    )
    in_flight: int = Field(
        default=_MIGRATION.in_flight, ge=1, description="Requests that may leave, or come to, one replica at a time"
    )
    bandwidth: Size | None = Field(
        default=None, description='Most bytes per second that leave a unit, e.g. "1GiB"; else no limit'
    )


class WatchdogTimes(Section):
    """When a process whose main loop gives no sign of life is passed over, and when it is killed."""

    suspect: Annotated[Seconds, Field(ge=0.5)] = Field(
        default=_WATCHDOG.suspect, description="After so long it gets no new work"
    )
    hung: Annotated[Seconds, Field(ge=1)] = Field(
        default=_WATCHDOG.hung, description="After so long it is killed and started again"
    )


DEFAULT_PRIORITIES = {level.name: Priority(rank=level.rank, target_load=level.target_load) for level in DEFAULT_LEVELS}


def _keys(value: object) -> object:
    return [value] if isinstance(value, (str, dict)) else value


def _key(value: object) -> object:
    if value == "":
        raise ValueError("must not be empty")
    if not isinstance(value, (str, dict, ApiKey)):
        raise ValueError(f'must be a text, or a mapping such as "{{key: env:NAME, priority: high}}", not {value!r}')
    return {"key": value} if isinstance(value, str) else value


def _replicas(value: object) -> object:
    wrong = 'must be a whole number of at least 1, or a mapping such as "{min: 1, max: 4}"'
    if isinstance(value, (dict, Replicas)):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{wrong}, not {value!r}")
    if value < 1:
        raise ValueError(f"{wrong}, not {value}; a model that may have none is {{min: 0, max: 1}}")
    return {"min": value, "max": value}


def _migration(value: object) -> object:
    switched = switch(value)
    if switched in ("on", "off"):
        return {} if switched == "on" else None
    if not isinstance(value, (dict, Migration)):
        raise ValueError(f'must be on, off, or a mapping such as "{{bandwidth: 1GiB}}", not {value!r}')
    return value


def _watchdog(value: object) -> object:
    switched = switch(value)
    if switched in ("on", "off"):
        return {} if switched == "on" else None
    if not isinstance(value, (dict, WatchdogTimes)):
        raise ValueError(f'must be on, off, or a mapping such as "{{hung: 30s}}", not {value!r}')
    return value


ReplicasOrNumber = Annotated[Replicas, BeforeValidator(_replicas)]
ApiKeys = Annotated[list[Annotated[ApiKey, BeforeValidator(_key)]], BeforeValidator(_keys)]
Priorities = dict[Annotated[str, Field(pattern=NAME_PATTERN)], Priority]
MigrationOrSwitch = Annotated[Migration | None, BeforeValidator(_migration)]
WatchdogOrSwitch = Annotated[WatchdogTimes | None, BeforeValidator(_watchdog)]
