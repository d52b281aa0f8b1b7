"""A proxy that swaps stock servers, one process per model, as llama-swap does: load, serve, unload.

A request for a model that runs goes there. Otherwise it waits, first come first served, until a server that is in its
way has finished what it has; that is stopped, the model's is started, and all that wait for it go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

from servers import Server

# What ends a server, and the server.
Running = tuple[AbstractContextManager[Server], Server]


class SwappingProxy:
    """At most `slots` servers at a time.

    Args:
        start: a context manager that starts the server of a model and stops it at the end.
    """

    def __init__(self, start: Callable[[str], AbstractContextManager[Server]], slots: int) -> None:
        self._start = start
        self._slots = slots
        self._running: dict[str, Running] = {}
        self._inside: dict[str, int] = {}
        self._waiting: list[str] = []
        self._changed = asyncio.Condition()
        self._loading: asyncio.Task[None] | None = None
        self.loads: list[float] = []

    @contextlib.asynccontextmanager
    async def turn(self, model: str) -> AsyncIterator[str]:
        """The URL of the model's server, for as long as a request needs it."""
        self._inside.setdefault(model, 0)
        async with self._changed:
            if model not in self._running:
                self._waiting.append(model)
                try:
                    await self._until_loaded(model)
                finally:
                    self._waiting.remove(model)
            self._inside[model] += 1
        try:
            yield self._running[model][1].url
        finally:
            async with self._changed:
                self._inside[model] -= 1
                self._changed.notify_all()

    async def _until_loaded(self, model: str) -> None:
        while model not in self._running:
            full = len(self._running) >= self._slots
            idle = [name for name in self._running if not self._inside[name]]
            if self._loading is None and self._waiting[0] == model and (idle or not full):
                old = self._running.pop(idle[0]) if full else None
                # Who asked may go away; what was begun is finished.
                self._loading = asyncio.create_task(self._load(old, model))
            await self._changed.wait()

    async def _load(self, old: Running | None, model: str) -> None:
        try:
            running = await asyncio.to_thread(self._swap, old, model)
            self._running[model] = running
            self.loads.append(running[1].start_seconds)
        finally:
            self._loading = None
            async with self._changed:
                self._changed.notify_all()

    def _swap(self, old: Running | None, model: str) -> Running:
        if old is not None:
            old[0].__exit__(None, None, None)
        context = self._start(model)
        return context, context.__enter__()

    @property
    def servers(self) -> list[Server]:
        """Those that run."""
        return [server for _, server in self._running.values()]

    async def close(self) -> None:
        """Stop all."""
        if self._loading is not None:
            await asyncio.wait([self._loading])
        for context, _ in self._running.values():
            context.__exit__(None, None, None)
        self._running.clear()
