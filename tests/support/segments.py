"""Shared memory that tests leave: what is in /dev/shm under a name that belongs to a directory of this test session.

Other sessions may run beside this one, so that a name counts only if it was derived from a directory that this process
made, or from one below it (`muxserve.memory.server.prefix`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"muxserve-(?P<place>[0-9a-f]{12})-(?P<unit>[A-Za-z0-9_-]*)")

_made: dict[str, None] = {}
_mkdir = os.mkdir


def watch_directories() -> None:
    """Remember from now on which directories this process makes."""

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        _mkdir(path, *args, **kwargs)
        if not isinstance(path, int):
            _made[os.path.abspath(os.fsdecode(path))] = None

    os.mkdir = mkdir


def left(directories: Iterable[str] | None = None) -> dict[Path, str]:
    """The segments that belong to these directories, by default all that this process has made, each with the
    directory."""
    names = {path: found for path in SHARED_MEMORY.iterdir() if (found := _NAME.match(path.name))}
    if not names:
        return {}
    made = list(_made if directories is None else directories)
    return {
        path: directory
        for path, name in names.items()
        for directory in _candidates(made, name["unit"])
        if hashlib.sha256(directory.encode()).hexdigest()[:12] == name["place"]
    }


def remove(segments: Iterable[Path]) -> None:
    """Remove them."""
    for path in segments:
        path.unlink(missing_ok=True)


def _candidates(made: Iterable[str], unit: str) -> Iterator[str]:
    """Run directories of a unit of that name: a fleet's, which another process makes, are below the fleet's own."""
    for directory in made:
        yield directory
        yield os.path.join(directory, unit)
