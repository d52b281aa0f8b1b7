"""Starts the processes of a deployment in order, keeps them alive, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from muxserve import wire
from muxserve.cluster.events import Draining, Event, Failed, PartId, Progress, Ready, Starting, Stopping
from muxserve.cluster.launcher import Launcher
from muxserve.cluster.processes import Process, adopt_orphans, exit_words, has_children, kill_group, reap_group
from muxserve.cluster.supervision import GaveUp, Part, PartDied, Supervisor, while_running
from muxserve.cluster.unit_link import UnitLink
from muxserve.cluster.warm_link import WarmLink
from muxserve.deployment import Deployment

log = logging.getLogger(__name__)

EXIT_OK, EXIT_BAD_INPUT, EXIT_START, EXIT_KEPT_DYING, EXIT_FORCED = 0, 2, 3, 4, 130

MEMORY, WARM, UNIT, GATEWAY = PartId("memory"), PartId("warm_parent"), PartId("unit"), PartId("gateway")
_START_SECONDS = {"memory": 60.0, "unit": 30.0, "warm_parent": 300.0, "gateway": 300.0, "engine": 1800.0}
_STOP_SECONDS = 5.0
_DRAIN_MARGIN = 5.0  # on top of what the gateway itself allows its requests
_TAIL_LINES = 15
_LAST_WORDS_SECONDS = 0.1


class Controller:
    """One deployment, from start to end.

    `run` does everything; `stop` may be called (from a signal handler of the loop) to end it: once to drain, twice to
    kill. Exit codes: 0 stopped as asked, 3 could not start, 4 a part kept dying, 130 killed at the second `stop`.
    """

    def __init__(self, deployment: Deployment, launcher: Launcher, emit: Callable[[Event], None]) -> None:
        self.deployment = deployment
        self.ready = asyncio.Event()
        self._launcher = launcher
        self._emit = emit
        self._stops = 0
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._served = False
        self._exits: dict[int, int] = {}
        # Process groups of warm parents that died: what they leave behind becomes our child and is ours to collect.
        self._orphaned: set[int] = set()
        self._warm: WarmLink | None = None
        self._parent_of: dict[PartId, WarmLink] = {}
        self._unit: UnitLink | None = None
        self._lifeline_read, self._lifeline_write = os.pipe()
        # Model loading is mostly computing; more at once than this only makes each of them later.
        self._starts = asyncio.Semaphore(2 * max(2, deployment.cores))
        starters = {MEMORY: self._start_memory, WARM: self._start_warm, UNIT: self._start_unit}
        starters[GATEWAY] = self._start_forked
        for model in deployment.models:
            for phase in ("prefill", "decode"):
                starters[PartId("engine", model.name, phase)] = self._start_forked
        self.parts = {part: Part(part, start, _START_SECONDS[part.kind]) for part, start in starters.items()}

    def stop(self) -> None:
        """Drain and end; at once when called again."""
        self._stops += 1
        self._stopping.set()
        if self._stops > 1:
            self._forced.set()
            for part in self.parts.values():
                # The memory manager always gets a SIGTERM instead: it removes the shared memory.
                if part.id != MEMORY:
                    part.kill()

    async def run(self) -> int:
        """Serve until `stop` or until a part cannot be kept alive; returns the exit code."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        began = time.monotonic()
        self._unit = UnitLink(self.deployment.unit_address)
        supervisor = Supervisor(self._emit, self._on_down, self._exits.get, lambda: self._served)
        tasks = {part.id: asyncio.create_task(supervisor.keep(part)) for part in self.parts.values()}
        watcher = asyncio.create_task(self._watch_ready(began))
        stopping = asyncio.create_task(self._stopping.wait())
        code = EXIT_OK
        try:
            done, _ = await asyncio.wait([*tasks.values(), stopping], return_when=asyncio.FIRST_COMPLETED)
            failure = next((task.exception() for task in done if task is not stopping), None)
            if failure is None:
                await self._drain(tasks)
            else:
                code = await self._fail(failure, tasks)
            if self._forced.is_set() and code == EXIT_OK:
                code = EXIT_FORCED
        finally:
            others = [*tasks.values(), watcher, stopping]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._stop_all()
            loop.remove_signal_handler(signal.SIGCHLD)
            await self._close()
        return code

    # ------------------------------------------------------------ starting

    async def _start_memory(self, part: Part) -> None:
        self._emit(Starting(part.id))
        part.process, ready = self._launcher.memory_manager()
        await while_running(part.process, ready)

    async def _start_unit(self, part: Part) -> None:
        self._emit(Starting(part.id))
        assert self._unit is not None
        part.process = self._launcher.unit_scheduler()
        await while_running(part.process, self._unit.state())

    async def _start_warm(self, part: Part) -> None:
        self._emit(Starting(part.id))
        if self._warm is not None:
            await self._warm.close()
        self._warm = WarmLink(lambda of, detail: self._emit(Progress(of, detail)), self._exits.__setitem__)
        try:
            part.process = self._launcher.warm_parent(self._warm.theirs.fileno(), self._lifeline_read)
        finally:
            self._warm.theirs.close()
        self._emit(Progress(part.id, "importing vLLM"))
        await while_running(part.process, self._warm.ready)

    async def _start_forked(self, part: Part) -> None:
        warm = self.parts[WARM]
        await warm.up.wait()
        if part.id.kind == "engine":
            await self.parts[MEMORY].up.wait()
            async with self._starts:
                await self._fork(part)
        else:
            await self._fork(part)

    async def _fork(self, part: Part) -> None:
        await self.parts[WARM].up.wait()
        link = self._warm
        assert link is not None
        part.began = time.monotonic()
        self._emit(Starting(part.id))
        birth = link.order(part.id)
        self._parent_of[part.id] = link
        pid = await birth.forked
        try:
            try:
                part.process = Process(pid)
            except ProcessLookupError:
                raise PartDied(exit_words(self._exits.get(pid))) from None
            self._exits.pop(pid, None)  # of an earlier process with that pid
            await while_running(part.process, asyncio.shield(birth.up))
        except PartDied:
            # It may have said why just before it ended.
            await asyncio.wait([birth.up], timeout=_LAST_WORDS_SECONDS)
            if birth.up.done():
                birth.up.result()
            raise

    async def _watch_ready(self, began: float) -> None:
        parts = self.parts.values()
        while not all(part.up.is_set() for part in parts):
            for part in parts:
                await part.up.wait()
        self._served = True
        self.ready.set()
        self._emit(Ready(time.monotonic() - began))

    # ------------------------------------------------------------ deaths

    async def _on_down(self, part: Part, reason: str) -> bool:
        counts = True
        if part.id.kind == "engine":
            counts = self._runs(WARM) and self._parent_of.get(part.id) is self._warm  # or it died with its parent
            await self._tell(wire.EngineDown(part.id.model, part.id.phase, reason))
        elif part.id == GATEWAY:
            await self._tell(wire.GatewayDown())
        elif part.id == WARM:
            # Engines die with it; one that did not would hold its model twice. The gateway serves on.
            for other in self.parts.values():
                if other.id.kind == "engine":
                    other.kill()
            if self._warm is not None:
                await self._warm.close()
                self._warm = None
            if part.process is not None:
                self._orphaned.add(part.process.pid)
                self._reap()
        return counts

    def _runs(self, part: PartId) -> bool:
        process = self.parts[part].process
        return process is not None and process.running

    async def _tell(self, message: wire.Message) -> None:
        """Tell the unit scheduler; one that is being started knows of nobody, and must not hear it late."""
        if self._unit is not None and self.parts[UNIT].up.is_set() and self._runs(UNIT):
            await self._unit.send(message)

    def _reap(self) -> None:
        """Collect what dead warm parents have left; the processes that load models are watched by nobody else."""
        for group in self._orphaned:
            self._exits.update(reap_group(group))

    async def _fail(self, failure: BaseException, tasks: dict[PartId, asyncio.Task[None]]) -> int:
        if not isinstance(failure, GaveUp):
            raise failure
        path, tail = self._last_words(failure.part)
        words = f"{failure.part} keeps dying: {failure}" if self._served else f"{failure.part} cannot start: {failure}"
        self._emit(Failed(failure.part, words, path, tail))
        if self._served and failure.part.kind == "engine":
            await self._drain(tasks)  # the other models' requests may still finish
        return EXIT_KEPT_DYING if self._served else EXIT_START

    def _last_words(self, part: PartId) -> tuple[Path | None, tuple[str, ...]]:
        for name in part.log_names:
            path = self.deployment.log_dir / name
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").splitlines()
                if lines:
                    return path, tuple(lines[-_TAIL_LINES:])
        return None, ()

    # ------------------------------------------------------------ stopping

    async def _drain(self, tasks: dict[PartId, asyncio.Task[None]]) -> None:
        """Let the gateway finish what it has; what else dies meanwhile is still restarted."""
        gateway = self.parts[GATEWAY]
        if gateway.process is None or not gateway.process.running or self._forced.is_set():
            return
        seconds = self.deployment.gateway.drain_seconds
        if gateway.up.is_set():
            self._emit(Draining(seconds))
        tasks[GATEWAY].cancel()
        forced = asyncio.create_task(self._forced.wait())
        ended = asyncio.create_task(gateway.process.stop(seconds + _DRAIN_MARGIN))
        await asyncio.wait({forced, ended}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        ended.cancel()

    async def _stop_all(self) -> None:
        """Everything that still runs: unit scheduler, engines, warm parent, memory manager, in this order."""
        self._emit(Stopping())
        engines = [part for part in self.parts if part.kind == "engine"]
        for group in ([GATEWAY, UNIT], engines, [WARM], [MEMORY]):
            processes = [p for p in (self.parts[part].process for part in group) if p is not None and p.running]
            await asyncio.gather(*(process.stop(_STOP_SECONDS) for process in processes))
        warm = self.parts[WARM].process
        if warm is not None:
            self._orphaned.add(warm.pid)
        # What dies with its parent comes to us a moment later.
        deadline = time.monotonic() + _STOP_SECONDS
        while any(map(has_children, self._orphaned)) and time.monotonic() < deadline:
            for orphans in self._orphaned:
                kill_group(orphans)
            self._reap()
            await asyncio.sleep(0.01)

    async def _close(self) -> None:
        for fd in (self._lifeline_read, self._lifeline_write):
            os.close(fd)
        if self._warm is not None:
            await self._warm.close()
        if self._unit is not None:
            await self._unit.close()
