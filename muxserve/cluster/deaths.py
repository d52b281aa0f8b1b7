"""What follows from the death of a part of a unit for its other parts."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from muxserve import wire
from muxserve.cluster.effects import UnitEffects
from muxserve.cluster.events import PartId
from muxserve.cluster.processes import Reaper, exit_words, kill_group
from muxserve.cluster.starts import MEMORY, MIGRATOR, MPS, WARM, UnitStarts
from muxserve.cluster.supervision import WITH_PARENT, Part, exit_status


class Deaths:
    """Deaths in one unit.

    Args:
        reaper: collects what dead parents leave behind.
    """

    def __init__(self, starts: UnitStarts, reaper: Reaper, effects: UnitEffects) -> None:
        self._starts = starts
        self._reaper = reaper
        self._effects = effects
        # Process groups of warm parents (and MPS servers) that died.
        self.groups: set[int] = set()

    async def on_down(self, part: Part, reason: str) -> str:
        """A part has ended; answers why that does not count against it, in words, or nothing if it does."""
        if part.id.kind == "engine":
            parent, cause = self._ended_with_parent(part.id), wire.Cause.NONE
            if part.process is not None and not (parent or part.killed_for):
                code = await exit_status(part.process, self._effects)
                # SIGKILL comes from outside: from someone, or from the kernel for want of memory.
                killed = code in (None, -signal.SIGKILL) and not part.hung
                cause = wire.Cause.KILL if killed else wire.Cause.CRASH
                reason = exit_words(code) if reason == exit_words(None) else reason
            if cause != wire.Cause.NONE and self._starts.restarts_mps:
                # What it had launched may hang in the server.
                self._kill([MPS], "is started again after the death of an engine")
            await self._effects.tell(wire.EngineDown(part.id.model, part.id.phase, reason, cause, part.pid))
            return parent
        if part.id == WARM:
            # What it forked dies with it; what did not would hold its model twice.
            self._kill([*self._starts.engines, *self._starts.holders], WITH_PARENT)
            await self._starts.end_resting()
            await self._starts.drop_warm()
            if part.process is not None:
                self._leave(part.process.pid)
        elif part.id == MPS:
            # Its clients have lost their contexts on the GPUs, whether they have noticed or not.
            keepers = [*self._starts.holders, MEMORY] if self._starts.keepers_in_mps else []
            migrator = [MIGRATOR] if MIGRATOR in self._starts.parts else []
            self._kill([*self._starts.engines, *migrator, *keepers], "ended with the MPS server")
            await self._starts.end_resting()
            if keepers:
                self._starts.forget_memory()
            if part.process is not None:
                # Its daemon and server, should it have been killed before it could end them.
                self._leave(part.process.pid)
                kill_group(part.process.pid)
        elif part.id.kind == "weights":
            # Its engines compute on memory that was its, and would not fit beside a second copy.
            engines = [engine for engine in self._starts.engines if engine.model == part.id.model]
            self._kill(engines, "ended with the process that held its weights")
            return self._ended_with_parent(part.id)
        return ""

    def _leave(self, group: int) -> None:
        self.groups.add(group)
        self._reaper.add(group)

    def _kill(self, parts: Iterable[PartId], because: str) -> None:
        for part in parts:
            self._starts.parts[part].kill(because)

    def _ended_with_parent(self, part: PartId) -> str:
        """Words for a forked part that died with the warm parent; empty if that lives."""
        same = self._starts.runs(WARM) and self._starts.parent_of.get(part) is self._starts.warm
        return "" if same else WITH_PARENT
