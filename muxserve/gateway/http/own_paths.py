"""What a gateway answers itself, by path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from muxserve.gateway.http.errors import App, Page, Receive, Scope, Send
from muxserve.gateway.limits.admission import Caller

ModelPage = Callable[[str, Scope, Send], Awaitable[None]]
# What answers somebody about what is theirs.
CallerApp = Callable[[Caller, Scope, Receive, Send], Awaitable[None]]
_App = TypeVar("_App")


@dataclass(frozen=True, slots=True)
class OwnPaths:
    """What the gateway answers itself.

    `pages` are about the server, for GET: those that are `open` need no key, the others one of an admin. `model_pages`
    are below `/models/NAME`, for GET and without a key, and are given the name. `apps` are for admins, `caller_apps`
    for everybody with a key. Both answer at paths of their own or, where one ends with a slash, below it.
    """

    pages: Mapping[str, Page] = field(default_factory=dict)
    open: frozenset[str] = frozenset()
    model_pages: Mapping[str, ModelPage] = field(default_factory=dict)
    apps: Mapping[str, App] = field(default_factory=dict)
    caller_apps: Mapping[str, CallerApp] = field(default_factory=dict)


def app_at(apps: Mapping[str, _App], path: str) -> _App | None:
    """What answers at `path`: by the path itself, or by its beginning."""
    below = (app for start, app in apps.items() if start.endswith("/") and path.startswith(start))
    return apps.get(path) or next(below, None)
