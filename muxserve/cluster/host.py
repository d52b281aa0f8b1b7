"""Everything of one unit: starts its processes in order, keeps them alive, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muxserve import wire
from muxserve.cluster import log_tail
from muxserve.cluster.deaths import Deaths
from muxserve.cluster.events import HOST, Down, Event, PartId, Ready, Recovered, Suspected, Up
from muxserve.cluster.gpu_starts import GpuStarts
from muxserve.cluster.launcher import Launcher
from muxserve.cluster.log_tail import LogTail, Said
from muxserve.cluster.processes import Process, Reaper
from muxserve.cluster.restarts import MAX_DEATHS
from muxserve.cluster.standing import UnitStanding
from muxserve.cluster.starts import MEMORY, MIGRATOR, MPS, UNIT, WARM, CpuStarts, UnitStarts
from muxserve.cluster.supervision import STOP_SECONDS, GaveUp, Part, Supervisor
from muxserve.cluster.warm_link import WarmLink
from muxserve.cluster.watch import Watch
from muxserve.gpu.budget import Needs
from muxserve.gpu.unit import GpuMemory, PoolSizer
from muxserve.spec import UNIT_FILE, UnitEntry, UnitSpec, save

log = logging.getLogger(__name__)

# A unit scheduler that takes longer to answer is being started anew, and knows no engine.
_HEARD_SECONDS = 2.0
_MPS_STOP_SECONDS = 15.0  # it gives its clients some time, too
_STOPPED = "its model is not served here any more"


@dataclass(frozen=True)
class MemoryParents:
    """The parents of one unit's processes: by model the process that loaded it, and what those were forked from, with
    our end of its socket if it takes orders."""

    models: Mapping[str, int] = field(default_factory=dict)
    warm: int | None = None
    link: WarmLink | None = None


class UnitHost:
    """One unit, from start to end, on the machine of this process, which must collect orphans into `reaper`: a
    `UnitHandle`. Its parts ask it for what `UnitEffects` says.

    Args:
        serves: the models of the unit that have engines from the beginning. On GPUs all have them until they are
            up, but those that sleep until memory wakes them: they are measured before the pools take what is left.
            Those that are not wanted leave then.
        emit: told what happens; a `Ready` when everything is up for the first time.
        sizer: on GPUs, what makes pools of what was measured.
        migrates: whether there is a migrator from the beginning.
        movable: whether the unit could be started elsewhere: it is given up when none of its models can be started.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        serves: Collection[str],
        launcher: Launcher,
        emit: Callable[[Event], None],
        reaper: Reaper,
        sizer: PoolSizer | None = None,
        migrates: bool = False,
        movable: bool = False,
    ) -> None:
        # What was there when a part started last is of its predecessors.
        self._log_tail = LogTail(unit_spec.log_dir)
        self._tell_user = emit
        self._reaper = reaper
        self._wanted = set(serves)
        self._starts: UnitStarts
        if unit_spec.gpu is None:
            self._starts = CpuStarts(unit_spec, serves, launcher, self, reaper.exits)
        elif sizer is not None:
            self._starts = GpuStarts(unit_spec, serves, launcher, self, reaper.exits, sizer)
        else:
            raise ValueError("on GPUs the pools are sized by what is measured")
        self._hangs = Watch(unit_spec.watchdog, unit_spec.run_dir)
        self._supervisor = Supervisor(self, self._hangs)
        self._deaths = Deaths(self._starts, reaper, self)
        if migrates:
            self.parts[MIGRATOR] = self._starts.migrator()
        # What the unit starts with.
        self._first = list(self.parts.values())
        # Declared here, but served elsewhere or not at all: the unit scheduler lends their pages to the others.
        self._standing = UnitStanding(
            {m.name for m in unit_spec.models} - {part.model for part in self._starts.engines}
        )
        self._tasks: dict[PartId, asyncio.Task[None]] = {}
        # Messages on their way, and eyes on processes that are no parts.
        self._others: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] | None = None
        # The models that have been up here: from then on their engines are started again with more patience.
        self._served: set[str] = set()
        self._movable = movable
        self.sized = self._starts.sized
        self.ready = asyncio.Event()
        # Whoever waits for something to be started here waits in vain from then on.
        self._stopped = asyncio.Event()

    @property
    def unit_spec(self) -> UnitSpec:
        """As it is now: on GPUs the pools have their size only when the models have been measured."""
        return self._starts.unit_spec

    @property
    def parts(self) -> dict[PartId, Part]:
        """What runs, or is to."""
        return self._starts.parts

    @property
    def entry(self) -> UnitEntry:
        """See `UnitHandle.entry`."""
        serves = [model.name for model in self.unit_spec.models if model.name in self._wanted]
        return UnitEntry(self.unit_spec, self.unit_spec.unit_address, self.unit_spec.migrator_address, serves)

    @property
    def degraded(self) -> dict[str, str]:
        """Models that fail at each start, and why."""
        return self._standing.degraded

    def up(self, model: str) -> bool:
        """See `UnitHandle.up`."""
        engines = [part for part in self._starts.engines if part.model == model]
        return bool(engines) and all(
            self.parts[part].up.is_set() and self._starts.runs(part) for part in (UNIT, *engines)
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to start everything."""
        self._starts.open()
        for part in self._first:
            self._keep(part)
        self._watcher = asyncio.create_task(self._watch_ready(time.monotonic()))
        self._spawn(self._hangs.keep())

    async def wait(self) -> None:
        """See `UnitHandle.wait`."""
        await asyncio.shield(self._failed)

    def gpu_memory(self) -> GpuMemory | None:
        """See `UnitHandle.gpu_memory`."""
        return self._starts.gpu_memory() if self.sized.is_set() else None

    def memory_parents(self) -> MemoryParents:
        """See `UnitHandle.memory_parents`."""
        process = self.parts[WARM].process
        # One that has touched a GPU forks nothing for others.
        takes_orders = self.unit_spec.gpu is None and self.parts[WARM].up.is_set() and self._starts.runs(WARM)
        pid = None if process is None else process.pid
        models = {model: parent.pid for model, parent in self._starts.model_parents.items()}
        return MemoryParents(models, pid, self._starts.warm if takes_orders else None)

    async def state(self) -> dict[str, object]:
        """See `UnitHandle.state`."""
        assert self._starts.unit is not None, "the host has been started"
        return await self._starts.unit.state()

    def kill(self) -> None:
        """See `UnitHandle.kill`."""
        for part in self.parts.values():
            # These get a SIGTERM instead: they have shared memory to remove, and processes of their own to end.
            if part.id not in (MEMORY, MPS):
                part.kill()

    async def stop(self) -> None:
        """End everything that still runs, in this order: what decides, what computes, what that was forked from, what
        owns its memory."""
        self._stopped.set()
        tasks = [*self._tasks.values(), *self._others, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._failed.done():
            self._failed.cancel()
        await self._starts.end_resting()
        groups = [UNIT], [MIGRATOR], self._starts.engines, self._starts.holders, [WARM], [MEMORY], [MPS]
        for group in groups:
            await self._stop_parts(group, _MPS_STOP_SECONDS if group == [MPS] else STOP_SECONDS)
        warm = self.parts[WARM].process
        await self._reaper.end({*self._deaths.groups, *([warm.pid] if warm else [])}, STOP_SECONDS)
        await self._starts.close()
        if self.unit_spec.gpu is None:
            # Needs the native module. Only if the memory manager had to be killed is there something left to remove.
            from muxserve.memory import server

            server.remove_segments(self.unit_spec)

    async def _stop_parts(self, parts: Iterable[PartId], grace: float) -> None:
        await asyncio.gather(*(self.parts[part].stop(grace) for part in parts if part in self.parts))

    def log_tail_of(self, part: PartId) -> Said:
        """See `UnitHandle.log_tail_of`."""
        return self._log_tail.of(part)

    async def _watch_ready(self, began: float) -> None:
        while not all(part.up.is_set() or part.id.model in self._starts.left_out for part in self._first):
            for part in list(self._first):
                await self._starts.until_up(part)
        self._served |= {part.id.model for part in self._first if part.id.model}
        self.ready.set()
        self.emit(Ready(time.monotonic() - began))
        for model in {part.model for part in self._starts.engines} - self._wanted:
            await self._end_model(model)

    # ------------------------------------------------------------ models that come and go

    async def start_model(self, model: str) -> None:
        """See `UnitHandle.start_model`."""
        self._check_not_stopped()
        self._wanted.add(model)
        if any(engine.model == model for engine in self._starts.engines):
            return
        try:
            await self._starts.admit(model)
        except GaveUp:
            self._wanted.discard(model)
            raise
        self._served.discard(model)
        await self.tell(self._standing.revive(model))
        new = {part.id: part for part in self._starts.parts_of(model)}
        self.parts.update(new)
        self._starts.awaited |= new.keys()
        tasks = {part.id: asyncio.create_task(self._supervisor.keep(part)) for part in new.values()}
        up, ended = asyncio.create_task(_until_up(new.values())), asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({up, ended, *tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks.values():
                if task.done():
                    task.result()
            self._check_not_stopped()
        except BaseException:
            up.cancel()
            self._tasks.update(tasks)
            self._wanted.discard(model)
            await self._end_model(model)
            raise
        finally:
            ended.cancel()
        self._served.add(model)
        for who, task in tasks.items():
            self._watch(who, task)

    def _check_not_stopped(self) -> None:
        if self._stopped.is_set():
            raise GaveUp(HOST, "its unit has been stopped")

    async def stop_model(self, model: str) -> None:
        """See `UnitHandle.stop_model`."""
        self._wanted.discard(model)
        await self._end_model(model, may_rest=True)

    async def _end_model(self, model: str, may_rest: bool = False) -> None:
        gone = [part for part in self.parts if part.model == model]
        await self.tell(self._standing.retire(model))
        tasks = [self._tasks.pop(part) for part in gone if part in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engines = [part for part in gone if part.kind == "engine"]
        rest = may_rest and await self._starts.rest(model)
        if not rest:
            await self._stop_parts(engines, STOP_SECONDS)
        await self._stop_parts(set(gone).difference(engines), STOP_SECONDS)
        await self._starts.forget_weights(model)
        for part in gone:
            self._starts.awaited.discard(part)
            stopped = self.parts.pop(part)
            # A unit that starts may have to put a model to sleep before all of its parts were up.
            if stopped in self._first and not self.ready.is_set():
                self._first.remove(stopped)
                self._starts.stopped(stopped)
            if part.kind == "engine":
                await self.tell(wire.EngineDown(part.model, part.phase, _STOPPED, pid=stopped.pid))
        if rest:
            # They will greet as the same processes, which must not be heard before this.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARD_SECONDS):
                    await self.state()

    async def forget(self, model: str) -> None:
        """See `UnitHandle.forget`."""
        await self._starts.forget(model)

    async def join(self, unit_spec: UnitSpec, model: str, needs: Sequence[Needs] = (), asleep: bool = False) -> None:
        """See `UnitHandle.join`. The memory manager takes the model in first, then the unit scheduler; both find it in
        the unit's file when they are started again. Engines that get other numbers of threads are forked again."""
        if not (path := Path(unit_spec.model(model).path)).is_dir():
            raise GaveUp(HOST, f"{path} is no directory on {socket.gethostname()}")
        self._starts.expect(needs, asleep)
        if not asleep:
            await self._starts.check_room(model)
        if all(each.name != model for each in self.unit_spec.models):
            # Needs the native module, which a host of models that are there from the beginning can do without.
            from muxserve.memory import MemoryManagerError, server

            try:
                await asyncio.to_thread(server.add_model, unit_spec, model)
            except (OSError, MemoryManagerError) as error:
                raise GaveUp(MEMORY, str(error)) from None
            self._standing.retire(model)
        threads = {each.name: each.threads for each in self.unit_spec.models}
        self._starts.change(unit_spec)
        save(unit_spec, Path(unit_spec.run_dir) / UNIT_FILE)
        await self.tell(wire.Joined())
        if MIGRATOR in self.parts:
            # It read the unit's models when it started; what it moved is computed again.
            self.parts[MIGRATOR].kill("is started again with another model")
        for engine in self._starts.engines:
            now = unit_spec.model(engine.model).threads
            if now != threads[engine.model]:  # they are for an engine's life
                self.parts[engine].kill(f"is started again with {now} threads instead of {threads[engine.model]}")

    def start_migrator(self) -> None:
        """See `UnitHandle.start_migrator`."""
        if MIGRATOR not in self.parts:
            part = self.parts[MIGRATOR] = self._starts.migrator()
            self._keep(part)

    # ------------------------------------------------------------ what its parts ask for (`UnitEffects`)

    def emit(self, event: Event) -> None:
        """See `PartEffects.emit`."""
        self._log_tail.note(event)
        match event:
            case Up(part) if part == UNIT:
                for message in self._standing.all(time.monotonic()):
                    self._spawn(self.tell(message))
            case Up(part) if part.model:
                if all(each.up.is_set() for each in self.parts.values() if each.id.model == part.model):
                    self._standing.up(part.model)
                    self._starts.left_out.discard(part.model)
            case Down(part) | Suspected(part) | Recovered(part):
                pid = self.parts[part].pid if part in self.parts else 0
                if news := self._standing.note(event, pid, self._starts.left_out, time.monotonic()):
                    self._spawn(self.tell(news))
        self._tell_user(event)

    def exit_status(self, pid: int) -> int | None:
        """See `PartEffects.exit_status`."""
        return self._reaper.exits.get(pid)

    def serving(self, part: Part) -> bool:
        """See `PartEffects.serving`. A migrator that comes later may come and go: nothing is lost while it is away."""
        if part in self._first:
            return self.ready.is_set()
        return not part.id.model or part.id.model in self._served

    def spared(self, part: Part) -> bool:
        """See `PartEffects.spared`: the unit starts without a model that cannot be started, as another one may be
        served, also one that sleeps."""
        if part not in self._first:
            return False
        model = part.id.model
        others = {each.name for each in self.unit_spec.models} - self._starts.left_out - {model}
        if not model or not others:
            return False
        self._starts.leave_out(model)
        return True

    def hopeless(self, part: Part) -> bool:
        """See `PartEffects.hopeless`: a unit none of whose models can be started may do better elsewhere."""
        if not (self._movable and part.id.model and part.policy.failed_starts >= MAX_DEATHS):
            return False
        return not any(self.up(engine.model) for engine in self._starts.engines)

    async def on_down(self, part: Part, reason: str) -> str:
        """See `PartEffects.on_down`."""
        return await self._deaths.on_down(part, reason)

    async def explain(self, part: Part, reason: str) -> str:
        """See `PartEffects.explain`."""
        return await log_tail.explain(self.unit_spec.gpu, part.id, reason, self.log_tail_of(part.id)[1])

    def on_model_parent(self, model: str, process: Process) -> None:
        """See `UnitEffects.on_model_parent`. What forks a model's engines is no part: it is forked when they are. Its
        end is theirs."""
        part = Part(PartId("model", model), self._starts, 0.0)
        part.process = process
        self._spawn(self._supervisor.watch_only(part))

    async def tell(self, message: wire.Message) -> None:
        """See `UnitEffects.tell`."""
        unit = self._starts.unit
        if unit is not None and self.parts[UNIT].up.is_set() and self._starts.runs(UNIT):
            unit.send(message)

    # ------------------------------------------------------------ details

    def _keep(self, part: Part) -> None:
        self._watch(part.id, asyncio.create_task(self._supervisor.keep(part)))

    def _watch(self, part: PartId, task: asyncio.Task[None]) -> None:
        self._tasks[part] = task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._failed.done():
            error = task.exception()
            self._failed.set_exception(error or RuntimeError("a part is not kept alive any more"))
            self._failed.exception()  # nobody may be waiting


async def _until_up(parts: Iterable[Part]) -> None:
    for part in parts:
        await part.up.wait()
