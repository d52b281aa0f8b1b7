"""Starts a memory manager and the engines of a unit's spec, without unit scheduler and gateway, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from muxserve.cluster.events import PartId
from muxserve.cluster.launcher import Launcher, commands_for
from muxserve.cluster.processes import Process, exit_words, has_children, kill_group, reap_group
from muxserve.cluster.supervision import PartDied, PartFailed, while_running
from muxserve.cluster.warm_link import ParentEvents, WarmLink
from muxserve.net.process import adopt_orphans
from muxserve.spec import UnitSpec, save

_START_SECONDS = 600.0
_STOP_SECONDS = 5.0
_TAIL_LINES = 10


class StartError(Exception):
    """Something did not start, or ended; the message says what, and shows the end of its log."""


class Family(ParentEvents):
    """The processes. An async context manager: they run inside it.

    Args:
        progress: called with what they say while they start.
    """

    def __init__(self, unit_spec: UnitSpec, progress: Callable[[str], None]) -> None:
        self.unit_spec = unit_spec
        self._progress = progress
        self._memory: Process | None = None
        self._warm: Process | None = None
        self._link: WarmLink | None = None
        self._launcher: Launcher | None = None
        self._exits: dict[int, int] = {}
        self._engines: dict[PartId, int] = {}

    async def __aenter__(self) -> Family:
        """Start everything.

        Raises:
            StartError: something did not start.
        """
        adopt_orphans()
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._start()
        except TimeoutError:
            await self.close()
            raise StartError(f"the engines were not up after {_START_SECONDS:.0f} s") from None
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def died(self) -> None:
        """Until one of the processes ends.

        Raises:
            StartError: always, when it returns at all.
        """
        assert self._memory is not None
        assert self._warm is not None
        ends = [asyncio.ensure_future(process.wait()) for process in (self._memory, self._warm)]
        ends.append(asyncio.ensure_future(self._engine_died()))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        for part, process in ((PartId("memory"), self._memory), (PartId("warm_parent"), self._warm)):
            if not process.running:
                raise self._failure(part, exit_words(process.returncode))
        for part, pid in self._engines.items():
            if pid in self._exits or not _alive(pid):
                raise self._failure(part, exit_words(self._exits.get(pid)))
        raise StartError("an engine ended")

    async def close(self) -> None:
        """Stop everything that runs; may be called twice."""
        if self._warm is not None:
            group = self._warm.pid
            await self._warm.stop(_STOP_SECONDS)
            deadline = time.monotonic() + _STOP_SECONDS
            # Model parents and engines die with their parents, and come to us to be collected.
            while has_children(group) and time.monotonic() < deadline:
                kill_group(group)
                reap_group(group)
                await asyncio.sleep(0.01)
        if self._link is not None:
            await self._link.close()
        if self._memory is not None:
            await self._memory.stop(_STOP_SECONDS)
        self._warm = self._memory = self._link = None

    async def _start(self) -> None:
        file = Path(self.unit_spec.run_dir) / "unit.json"
        save(self.unit_spec, file)
        # Kept, because it copies the memory manager's output to its log as long as it lives.
        self._launcher = launcher = Launcher(self.unit_spec, commands_for(self.unit_spec, file))
        self._memory, ready = launcher.memory_manager()
        try:
            await while_running(self._memory, ready)
        except PartDied as death:
            raise self._failure(PartId("memory"), str(death)) from None
        warm = PartId("warm_parent")
        self._link = WarmLink(warm, self)
        try:
            self._warm = await launcher.warm_parent(self._link.theirs.fileno())
        finally:
            self._link.theirs.close()
        self._progress("importing vLLM")
        try:
            await while_running(self._warm, self._link.ready)
        except (PartDied, PartFailed) as death:
            raise self._failure(PartId("warm_parent"), str(death)) from None
        births = {}
        for model in self.unit_spec.models:
            for phase in ("prefill", "decode"):
                part = PartId("engine", model.name, phase)
                births[part] = self._link.order(part)
        for part, birth in births.items():
            try:
                self._engines[part] = await while_running(self._warm, birth.forked)
                await while_running(self._warm, birth.up)
            except (PartDied, PartFailed) as death:
                raise self._failure(part, str(death)) from None

    def on_progress(self, part: PartId, detail: str) -> None:
        """See `ParentEvents.on_progress`."""
        self._progress(f"{part}: {detail}")

    def on_exited(self, pid: int, status: int) -> None:
        """See `ParentEvents.on_exited`."""
        self._exits[pid] = status

    async def _engine_died(self) -> None:
        while all(pid not in self._exits and _alive(pid) for pid in self._engines.values()):
            await asyncio.sleep(0.5)

    def _failure(self, part: PartId, reason: str) -> StartError:
        for name in part.log_names:
            with contextlib.suppress(OSError):
                lines = (self.unit_spec.log_dir / name).read_text(errors="replace").splitlines()
                if lines:
                    tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
                    return StartError(f"{part}: {reason}\nlast lines of {self.unit_spec.log_dir / name}:\n{tail}")
        return StartError(f"{part}: {reason}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
