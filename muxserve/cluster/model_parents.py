"""The processes that have loaded the models of a unit on a CPU and fork their engines. That of a model that sleeps may
stay, with its memory in a file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from muxserve.cluster.processes import Process
from muxserve.cluster.starts import UnitStarts
from muxserve.cluster.supervision import STOP_SECONDS, PartDied, PartFailed

log = logging.getLogger(__name__)

# A model whose memory takes longer to move into a file is loaded again instead.
_HIBERNATION_SECONDS = 25.0


class ModelParents:
    """Model parents of one unit, whose `starts` have the link to what forks them."""

    def __init__(self, starts: UnitStarts) -> None:
        self._starts = starts
        self._awake: dict[str, Process] = {}
        self._hibernating: dict[str, Process] = {}
        # Models whose process has moved its memory before: next time only what has changed moves.
        self._in_files: set[str] = set()

    @property
    def pids(self) -> dict[str, int]:
        """By model, those of models that are awake."""
        return {model: process.pid for model, process in self._awake.items()}

    def add(self, model: str, process: Process) -> None:
        """A process has begun to load a model."""
        self._awake[model] = process
        self._in_files.discard(model)

    def wake(self, model: str) -> None:
        """A model is started again."""
        parent = self._hibernating.pop(model, None)
        if parent is not None and parent.running:
            self._awake[model] = parent

    def in_file(self, model: str) -> bool:
        """Whether the memory of a model is in a file, or has been there."""
        return model in self._in_files

    def prefetch(self, model: str) -> bool:
        """Have the memory of a model read that sleeps in a file; whether it does."""
        if model in self._hibernating and self._starts.warm is not None:
            self._starts.warm.tell("prefetch", model)
        return model in self._hibernating

    async def end(self, model: str, may_hibernate: bool) -> None:
        """The engines of a model have ended: its memory moves into a file if it `may_hibernate`, or is free. Until then
        it counts as the model's."""
        parent = self._awake.get(model)
        if may_hibernate and parent is not None and await self._hibernate(model):
            self._hibernating[model] = parent
            self._in_files.add(model)
        else:
            await self._end(model, parent)
        self._awake.pop(model, None)

    async def forget(self, model: str) -> None:
        """A model that sleeps is served no longer."""
        self._in_files.discard(model)
        parent = self._hibernating.pop(model, None)
        if parent is not None:
            await self._end(model, parent)

    async def _hibernate(self, model: str) -> bool:
        """Whether the memory of a model's parent has moved into a file."""
        if self._starts.warm is None:
            return False
        try:
            async with asyncio.timeout(_HIBERNATION_SECONDS):
                await self._starts.warm.hibernate(model)
        except (TimeoutError, PartDied, PartFailed) as error:
            log.warning("%s is loaded again when it is woken: %s", model, str(error) or "its memory moves too slowly")
            return False
        return True

    async def _end(self, model: str, parent: Process | None) -> None:
        if self._starts.warm is not None:
            self._starts.warm.tell("end", model)
        if parent is not None:
            # It ends by itself when it gets no more orders; the memory is free when it has.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await parent.wait()
            parent.send(signal.SIGKILL)
