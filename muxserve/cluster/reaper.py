"""What dead parents leave behind: their children become ours, are collected, and are ended when nobody needs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from muxserve.cluster.processes import has_children, kill_group, reap_group

_PAUSE_SECONDS = 0.01


class Reaper:
    """Process groups whose parent has died, and how processes ended that were not our children.

    One per controlling process, which calls `reap` at every SIGCHLD (see `processes.adopt_orphans`).
    """

    def __init__(self) -> None:
        # pid -> return code as in `subprocess`; whoever watches such a process asks here.
        self.exits: dict[int, int] = {}
        self._groups: set[int] = set()

    def add(self, group: int) -> None:
        """The parent of process group `group`, which has its pid, has ended."""
        self._groups.add(group)
        self.reap()

    def reap(self) -> None:
        """Collect what has ended; processes that load models are watched by nobody else."""
        for group in self._groups:
            self.exits.update(reap_group(group))

    async def end(self, groups: Iterable[int], seconds: float) -> None:
        """Kill and collect all that is left of `groups`, for at most `seconds`: what dies with its parent comes to us a
        moment later."""
        groups = set(groups)
        deadline = time.monotonic() + seconds
        while any(map(has_children, groups)) and time.monotonic() < deadline:
            for group in groups:
                kill_group(group)
                self.exits.update(reap_group(group))
            await asyncio.sleep(_PAUSE_SECONDS)
        self._groups -= groups
