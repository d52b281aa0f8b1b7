"""Starts the processes of a deployment in order, keeps them alive, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from muxserve import wire
from muxserve.cluster.events import Draining, Event, Failed, PartId, Ready, Starting, Stopping
from muxserve.cluster.launcher import Launcher
from muxserve.cluster.processes import adopt_orphans, has_children, kill_group, reap_group
from muxserve.cluster.sizing import PoolSizer
from muxserve.cluster.starts import GATEWAY, MEMORY, MPS, UNIT, WARM, Starts
from muxserve.cluster.supervision import WITH_PARENT, GaveUp, Part, Supervisor
from muxserve.deployment import Deployment
from muxserve.gpu import nvml

log = logging.getLogger(__name__)

EXIT_OK, EXIT_BAD_INPUT, EXIT_START, EXIT_KEPT_DYING, EXIT_FORCED = 0, 2, 3, 4, 130

_STOP_SECONDS = 5.0
_MPS_STOP_SECONDS = 15.0  # it gives its clients some time, too
_DRAIN_MARGIN = 5.0  # on top of what the gateway itself allows its requests
_TAIL_LINES = 15
_NVML_SECONDS = 5.0  # a lost GPU may keep the driver busy


class Controller:
    """One deployment, from start to end.

    `run` does everything; `stop` may be called (from a signal handler of the loop) to end it: once to drain, twice to
    kill. Exit codes: 0 stopped as asked, 3 could not start, 4 a part kept dying, 130 killed at the second `stop`.
    """

    def __init__(
        self,
        deployment: Deployment,
        launcher: Launcher,
        emit: Callable[[Event], None],
        sizer: PoolSizer | None = None,
    ) -> None:
        self.ready = asyncio.Event()
        self._tell_user = emit
        # How long a part's logs were when it was started last: what stands before is of its predecessors.
        self._log_began: dict[tuple[PartId, str], int] = {}
        self._stops = 0
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._served = False
        self._exits: dict[int, int] = {}
        # Process groups of warm parents that died: what they leave behind becomes our child and is ours to collect.
        self._orphaned: set[int] = set()
        self._starts = Starts(deployment, launcher, self._emit, self._exits, sizer)
        self.parts = self._starts.parts

    @property
    def deployment(self) -> Deployment:
        """As it is now: on GPUs the pools have their size only when the models have been measured."""
        return self._starts.deployment

    def _emit(self, event: Event) -> None:
        if isinstance(event, Starting):
            for name in event.part.log_names:
                with contextlib.suppress(OSError):
                    self._log_began[event.part, name] = (self.deployment.log_dir / name).stat().st_size
        self._tell_user(event)

    def stop(self) -> None:
        """Drain and end; at once when called again."""
        self._stops += 1
        self._stopping.set()
        if self._stops > 1:
            self._forced.set()
            for part in self.parts.values():
                # These get a SIGTERM instead: they have shared memory to remove, and processes of their own to end.
                if part.id not in (MEMORY, MPS):
                    part.kill()

    async def run(self) -> int:
        """Serve until `stop` or until a part cannot be kept alive; returns the exit code."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        began = time.monotonic()
        self._starts.open()
        supervisor = Supervisor(self._emit, self._on_down, self._exits.get, lambda: self._served, self._explain)
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
            await self._starts.close()
        return code

    async def _watch_ready(self, began: float) -> None:
        parts = self.parts.values()
        while not all(part.up.is_set() for part in parts):
            for part in parts:
                await part.up.wait()
        self._served = True
        self.ready.set()
        self._emit(Ready(time.monotonic() - began))

    # ------------------------------------------------------------ deaths

    async def _on_down(self, part: Part, reason: str) -> str:
        if part.id.kind == "engine":
            await self._tell(wire.EngineDown(part.id.model, part.id.phase, reason))
            return self._ended_with_parent(part.id)
        if part.id == GATEWAY:
            await self._tell(wire.GatewayDown())
        elif part.id == WARM:
            # What it forked dies with it; what did not would hold its model twice. The gateway serves on.
            self._kill([*self._starts.engines, *self._starts.holders], WITH_PARENT)
            await self._starts.drop_warm()
            if part.process is not None:
                self._orphaned.add(part.process.pid)
                self._reap()
        elif part.id == MPS:
            # All that has a context on the GPUs has lost it, whether it has noticed or not.
            self._kill([*self._starts.engines, *self._starts.holders, MEMORY], "ended with the MPS server")
            self._starts.forget_memory()
            if part.process is not None:
                # Its daemon and server, should it have been killed before it could end them.
                self._orphaned.add(part.process.pid)
                kill_group(part.process.pid)
        elif part.id.kind == "weights":
            # Its engines compute on memory that was its, and would not fit beside a second copy.
            engines = [engine for engine in self._starts.engines if engine.model == part.id.model]
            self._kill(engines, "ended with the process that held its weights")
            return self._ended_with_parent(part.id)
        return ""

    def _kill(self, parts: Iterable[PartId], because: str) -> None:
        for part in parts:
            self.parts[part].kill(because)

    def _ended_with_parent(self, part: PartId) -> str:
        """Words for a forked part that died with the warm parent; empty if that lives."""
        same = self._runs(WARM) and self._starts.parent_of.get(part) is self._starts.warm
        return "" if same else WITH_PARENT

    async def _explain(self, part: Part) -> str:
        """What a GPU has to do with the end of a part: what it said last, and what the driver says."""
        gpu = self.deployment.gpu
        if gpu is None or part.id.kind not in ("weights", "engine", "memory", "mps"):
            return ""
        try:
            found = await asyncio.wait_for(asyncio.to_thread(nvml.machine), _NVML_SECONDS)
        except TimeoutError:
            return "the GPU driver does not answer"
        for uuid in gpu.uuids:
            state = found.by_uuid(uuid)
            if found.gpus and (state is None or state.fault):
                number = uuid if state is None else str(state.index)
                return f"GPU {number}: {state.fault if state else 'it is no longer there'}"
        return nvml.explain(self._last_words(part.id)[1])

    def _runs(self, part: PartId) -> bool:
        process = self.parts[part].process
        return process is not None and process.running

    async def _tell(self, message: wire.Message) -> None:
        """Tell the unit scheduler; one that is being started knows of nobody, and must not hear it late."""
        unit = self._starts.unit
        if unit is not None and self.parts[UNIT].up.is_set() and self._runs(UNIT):
            await unit.send(message)

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
                with path.open("rb") as log_file:
                    log_file.seek(self._log_began.get((part, name), 0))
                    lines = log_file.read().decode(errors="replace").splitlines()
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
        """Everything that still runs, in this order: what computes, what it was forked from, what owns its memory."""
        self._emit(Stopping())
        groups = [GATEWAY, UNIT], self._starts.engines, self._starts.holders, [WARM], [MEMORY], [MPS]
        for group in groups:
            processes = [self.parts[part].process for part in group if part in self.parts]
            grace = _MPS_STOP_SECONDS if group == [MPS] else _STOP_SECONDS
            await asyncio.gather(*(p.stop(grace) for p in processes if p is not None and p.running))
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
