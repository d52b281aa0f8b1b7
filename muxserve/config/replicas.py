"""What types cannot say of replicas, priorities, migration and launchers: bounds and names that go together.

Like `checks`, these look at the raw data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from muxserve.config.problems import KeyPath, Problem, did_you_mean
from muxserve.config.source import Source
from muxserve.config.units import parse_duration
from muxserve.deployment import WatchdogRules
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import DEFAULT_LEVELS, NORMAL
from muxserve.replicas.scaling import ScalingRules

_SCALING, _MIGRATION, _WATCHDOG = ScalingRules(), MigrationRules(), WatchdogRules()


def check(source: Source) -> Iterator[Problem]:
    """Every such mistake in `source`."""
    models = source.data.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict) and isinstance(model.get("replicas"), dict):
            yield from _replicas(source, ("models", index, "replicas"), model["replicas"])
    yield from _priorities(source)
    yield from _migration(source)
    yield from _watchdog(source)
    cluster = source.data.get("cluster")
    if isinstance(cluster, dict) and "ray" in cluster and cluster.get("launcher", "local") == "local":
        yield source.problem(("cluster", "ray"), "is for `launcher: ray` only; set that, or leave this out")


def api_keys(source: Source) -> Iterator[tuple[KeyPath, object, str | None]]:
    """The entries of `gateway.api_keys`: place, key, and the priority if it has one."""
    gateway = source.data.get("gateway")
    keys = gateway.get("api_keys") if isinstance(gateway, dict) else None
    if not isinstance(keys, list):
        places: list[tuple[KeyPath, Any]] = [(("gateway", "api_keys"), keys)]
    else:
        places = [(("gateway", "api_keys", index), key) for index, key in enumerate(keys)]
    for path, key in places:
        if isinstance(key, dict):
            priority = key.get("priority")
            yield (*path, "key"), key.get("key"), priority if isinstance(priority, str) else None
        else:
            yield path, key, None


def _replicas(source: Source, at: KeyPath, given: dict[str, Any]) -> Iterator[Problem]:
    least, most, start = given.get("min", 1), given.get("max"), given.get("start")
    if _whole(least) and _whole(most) and most >= 1 and least > most:
        yield source.problem((*at, "min"), f"{least} are more than max ({most})")
    elif _whole(least) and _whole(most) and _whole(start) and not least <= start <= most:
        yield source.problem((*at, "start"), f"{start} is not between min ({least}) and max ({most})")
    low, high = given.get("low", _SCALING.low), given.get("high", _SCALING.high)
    if _number(low) and _number(high) and low >= high:
        key = "low" if "low" in given else "high"
        yield source.problem((*at, key), f"low ({low:g}) must be below high ({high:g}), with room between them")


def _priorities(source: Source) -> Iterator[Problem]:
    given = source.data.get("priorities")
    if given is not None and not (isinstance(given, dict) and given):
        return
    levels = [str(name) for name in given] if given else [level.name for level in DEFAULT_LEVELS]
    ranks: dict[int, str] = {}
    for name, level in (given or {}).items():
        rank = level.get("rank") if isinstance(level, dict) else None
        if _whole(rank):
            if rank in ranks:
                message = f"{ranks[rank]!r} has rank {rank}, too; which of them goes first must be clear"
                yield source.problem(("priorities", str(name), "rank"), message)
            ranks.setdefault(rank, str(name))
    default = source.data.get("default_priority")
    if isinstance(default, str) and default not in levels:
        yield source.problem(
            ("default_priority",), f"there is no priority level {default!r}{did_you_mean(default, levels)}"
        )
    elif default is None and NORMAL not in levels:
        message = f"needs `default_priority`, the level of requests that name none, since none is called {NORMAL!r}"
        yield source.problem(("priorities",), message)
    for path, _, priority in api_keys(source):
        if priority is not None and priority not in levels:
            where = (*path[:-1], "priority")
            yield source.problem(where, f"there is no priority level {priority!r}{did_you_mean(priority, levels)}")


def _migration(source: Source) -> Iterator[Problem]:
    given = source.data.get("migration")
    if not isinstance(given, dict):
        return
    below = given.get("source_below", _MIGRATION.source_below)
    above = given.get("destination_above", _MIGRATION.destination_above)
    if _number(below) and _number(above) and above < below:
        key = "source_below" if "source_below" in given else "destination_above"
        message = (
            f"source_below ({below:g}) must be at most destination_above ({above:g}), or requests would move to and fro"
        )
        yield source.problem(("migration", key), message)


def _watchdog(source: Source) -> Iterator[Problem]:
    given = source.data.get("watchdog")
    if not isinstance(given, dict):
        return
    try:
        suspect = parse_duration(given.get("suspect", _WATCHDOG.suspect))
        hung = parse_duration(given.get("hung", _WATCHDOG.hung))
    except ValueError:
        return  # told by its type
    if hung < suspect:
        key = "hung" if "hung" in given else "suspect"
        yield source.problem(("watchdog", key), f"hung ({hung:g} s) must be at least suspect ({suspect:g} s)")


def _whole(value: object) -> TypeGuard[int]:
    return type(value) is int


def _number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float)
