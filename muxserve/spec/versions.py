"""The versions of a model under one name.

A model that is replaced while the fleet serves is another model to units and gateways, under a name of its own: `chat`,
then `chat@2`. Page tables, quotas, prefixes and metrics of one version are never those of another one. Clients ask for
`chat`; the gateways know which version answers (`FleetSpec.versions`). No name in a fleet file has an `@`.
"""

from __future__ import annotations

from collections.abc import Iterable

_MARK = "@"


def public_name(model: str) -> str:
    """The name that clients ask for a version by."""
    return model.partition(_MARK)[0]


def next_version(model: str, taken: Iterable[str]) -> str:
    """The name of a version of `model` that comes after those among the `taken` names."""
    public = public_name(model)
    numbers = [int(each.partition(_MARK)[2] or 1) for each in taken if public_name(each) == public]
    return f"{public}{_MARK}{1 + max(numbers, default=1)}"
