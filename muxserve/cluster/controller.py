"""The fleet: starts its units and the processes that belong to none, keeps them alive, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from muxserve import wire
from muxserve.cluster import log_tail, memory_use
from muxserve.cluster.changes import Changes
from muxserve.cluster.events import Draining, Event, Expected, Failed, PartId, Progress, Ready, Stopping, Up
from muxserve.cluster.fleet_starts import SCHEDULER, VLLM, FleetLauncher, FleetStarts
from muxserve.cluster.launcher import WarmParents
from muxserve.cluster.log_tail import LogTail, Said
from muxserve.cluster.processes import Reaper
from muxserve.cluster.steps import UnitPlanner
from muxserve.cluster.succession import Succession
from muxserve.cluster.supervision import STOP_SECONDS, GaveUp, Part, Supervisor, drain, stop_parts
from muxserve.cluster.unit_set import UnitSet
from muxserve.cluster.units import PlannedUnit, UnitLauncher
from muxserve.cluster.warm_link import WarmLink
from muxserve.cluster.watch import Watch
from muxserve.config import Fleet
from muxserve.control.previous import PreviousFleet
from muxserve.control.server import ControlServer
from muxserve.control.tries import ApplyOutcome, FileTries
from muxserve.control.watch import FileWatch
from muxserve.net.exit_codes import ExitCode
from muxserve.net.logs import keep_bounded
from muxserve.net.peer import Address, AsyncPeer
from muxserve.net.process import adopt_orphans
from muxserve.spec import FleetSpec, FollowedFleet, ResidencySpec, save_fleet

log = logging.getLogger(__name__)

# What a fleet takes is measured so often, and seldom enough that it takes a small part of a core.
_WEIGH_SECONDS, _WEIGH_PART, _WEIGH_MOST = 2.0, 20.0, 5.0
# How often a fleet file is looked at that is followed.
_LOOK_SECONDS = 1.0
# Kinds of the processes that belong to no unit.
_OWN = ("vllm", "gateway", "scheduler")

_Result = TypeVar("_Result")

EXIT_OK, EXIT_START, EXIT_FORCED = ExitCode.DONE, ExitCode.NOT_DONE, ExitCode.INTERRUPTED


class Controller:
    """One fleet, from start to end. Its parts ask it for what `FleetEffects` says.

    `run` does everything; `stop` may be called (from a signal handler of the loop) to end it: once to drain, twice to
    kill. Exit codes: 0 stopped as asked, 3 could not start, 130 killed at the second `stop`. A fleet that has served
    ends when it is told to: whatever keeps dying is tried again, ever more rarely.

    Args:
        fleet: the fleet; the units in it are those of `units`.
        units: what to start at first, in that order.
        launcher: starts the processes that belong to no unit.
        unit_launcher: makes what starts units, of what their warm parents can be forked from and who collects the
            reaper of this machine.
        emit: called with each event.
        planner: makes units that come later; None: there are none.
        control: makes what takes users' commands, to be started when the fleet serves and closed before it ends.
        declared: the fleet file, which may be another one later; None: that cannot be followed.
    """

    def __init__(
        self,
        fleet: FleetSpec,
        units: Sequence[PlannedUnit],
        launcher: FleetLauncher,
        unit_launcher: Callable[[WarmParents, Reaper], UnitLauncher],
        emit: Callable[[Event], None],
        planner: UnitPlanner | None = None,
        control: Callable[[Changes], ControlServer] | None = None,
        declared: Fleet | None = None,
    ) -> None:
        self.ready = asyncio.Event()
        self.reaper = Reaper()
        self._planned = units
        self._tell_user = emit
        self._log_tail = LogTail(fleet.log_dir)
        self._stops = 0
        self._cause = ""
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._watch = Watch(fleet.watchdog, fleet.run_dir)
        self._starts = FleetStarts(launcher, self, self.reaper.exits, fleet.gateway.count, self._watch)
        self.units = UnitSet(fleet, unit_launcher(self._starts, self.reaper), self)
        self._supervisor = Supervisor(self, self._watch)
        # What users and the global scheduler want different.
        self.changes = Changes(self.units, planner, self, declared)
        self._control = control(self.changes) if control is not None else None
        self._scheduler: AsyncPeer | None = None
        self._tasks: dict[PartId, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] | None = None
        # A new global scheduler wants to know at once what is taken.
        self._weigh_now = asyncio.Event()

    @property
    def parts(self) -> list[PartId]:
        """Everything that runs, or is to, once `run` has begun."""
        return [self._starts.vllm.id, *self.units.parts(), *(part.id for part in self._own_parts()[1:])]

    def _own_parts(self) -> list[Part]:
        scheduler = [self._starts.scheduler] if SCHEDULER in self._tasks or self._needs_scheduler() else []
        return [self._starts.vllm, *scheduler, *self._starts.gateways]

    def stop(self, cause: str = "") -> None:
        """Drain and end, because of `cause`; at once when called again."""
        self._stops += 1
        self._cause = self._cause or cause
        self._stopping.set()
        if self._stops > 1:
            self._forced.set()
            for part in self._own_parts():
                part.kill()
            self.units.kill()

    async def follow(self, file: Path, watch: FileWatch, told: Callable[[str], None]) -> None:
        """Become what `file` says whenever `watch` sees that it has changed, until the fleet ends; again and again
        while something beside the file is in the way."""
        tries, now = FileTries(), asyncio.get_running_loop().time
        await self.ready.wait()
        while not self._stopping.is_set():
            await asyncio.sleep(_LOOK_SECONDS)
            if await asyncio.to_thread(watch.changed):
                tries.changed(now())
            elif not self.fleet.unfollowed:  # a user's command has seen to it
                tries.forget()
            if tries.begin(now()) and (reload := self.reload(file, told)) is not None:
                await asyncio.wait((reload,))
                if reload.cancelled():
                    return
                pause = tries.ended(reload.result(), now())
                if pause is not None:
                    told(f"{file} is tried again in {pause:g} s")
                    at = datetime.now().astimezone() + timedelta(seconds=pause)
                    self.changes.unfollowed(f"{self.fleet.unfollowed}\n{file} is tried again at {at:%H:%M:%S %Z}")

    def reload(self, file: Path, told: Callable[[str], None]) -> asyncio.Task[ApplyOutcome] | None:
        """Become what `file` says now; `told` hears what is done for that. None: the fleet is not ready for it."""
        if self._control is not None and self.ready.is_set() and not self._stopping.is_set():
            return self._spawn(self._control.reload(file, told))
        told(f"{file} is not followed: the fleet is being started or stopped")
        return None

    # ------------------------------------------------------------ life

    async def run(self, previous: PreviousFleet | None = None) -> int:
        """Serve until `stop`, or until a part cannot be started at first; returns the exit code. Units are
        taken over from `previous`, one group after the other."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self.reaper.reap)
        self._failure = loop.create_future()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # What is said while it is being started again is for the next one.
        at = Address("the global scheduler", self.fleet.scheduler_address, "controller")
        self._scheduler = AsyncPeer(context, at, keeps=True, on_message=self._on_scheduler)
        began = time.monotonic()
        stopping: asyncio.Task[object] = asyncio.create_task(self._stopping.wait())
        code: int = EXIT_OK
        try:
            self._spawn(self._watch.keep())
            self._spawn(keep_bounded(Path(self.fleet.run_dir)))
            self._spawn(self._begin(began, previous))
            ends: set[asyncio.Future[Any]] = {self._failure, stopping}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            failure = self._failure.exception() if self._failure.done() else None
            if failure is None:
                await self._drain()
            else:
                code = self._fail(failure)
            if self._forced.is_set() and code == EXIT_OK:
                code = EXIT_FORCED
        finally:
            if self._control is not None:
                await self._control.close()
            others = [*self._others, *self._tasks.values(), stopping]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._stop_all()
            loop.remove_signal_handler(signal.SIGCHLD)
            self._scheduler.close()
            context.term()
            await self._starts.close()
        return code

    async def _begin(self, began: float, previous: PreviousFleet | None) -> None:
        succession = Succession(previous, self.units, self) if previous is not None else None
        if succession is not None:
            succession.begin()
        # Whoever is started reads it; units may have to wait for a place before they are as it says.
        save_fleet(self.fleet)
        self.emit(Expected((VLLM,)))
        self._keep(self._starts.vllm)
        if succession is None:
            await self._start_units(self._planned)
        self.emit(Expected(tuple(self.parts)))
        self.units.publish()
        for part in self._own_parts():
            if part.id not in self._tasks:
                self._keep(part)
        if succession is not None:
            await self._until_own_parts()
            await succession.run(self._planned, self._bring_up)
        await self._until_units()
        await self._until_own_parts()
        self.units.served = True
        self.units.change(takes_over=False)
        self.units.publish()
        if self._control is not None:
            self._control.start()
        self.ready.set()
        self._spawn(self._starts.keep_spare())
        if self.fleet.residency:
            self._spawn(self._weigh())
        for model, reason in self._starts.refused().items():
            self.emit(Progress(self._starts.gateways[0].id, f"note: {model} is not offered: {reason}"))
        self.emit(Ready(time.monotonic() - began))

    async def _start_units(self, units: Sequence[PlannedUnit]) -> None:
        """All at once: on other machines each may have to wait for a place."""
        starts = [asyncio.create_task(self.units.start(planned)) for planned in units]
        try:
            for unit in await asyncio.gather(*starts):
                self.units.keep(unit)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _bring_up(self, units: Sequence[PlannedUnit]) -> None:
        """Start some of the units, and wait until they are up."""
        await self._start_units(units)
        self.emit(Expected(tuple(self.parts)))
        self.units.publish()
        await self.until_sized()
        await self._until_units()

    async def _until_units(self) -> None:
        for unit in list(self.units.units.values()):
            await self.units.until_ready(unit)

    async def _until_own_parts(self) -> None:
        for part in self._own_parts():
            await part.up.wait()

    def _keep(self, part: Part) -> None:
        task = self._tasks[part.id] = asyncio.create_task(self._supervisor.keep(part))
        task.add_done_callback(self._kept)

    def _kept(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            self.failed(task.exception() or RuntimeError("a part is not kept alive any more"))

    def _spawn(self, work: Coroutine[object, object, _Result]) -> asyncio.Task[_Result]:
        """Do something beside; its failure is the fleet's."""
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        task.add_done_callback(lambda ended: None if ended.cancelled() or not ended.exception() else self._kept(ended))
        return task

    # ------------------------------------------------------------ changes

    def _needs_scheduler(self) -> bool:
        return self.fleet.needs_scheduler

    def _on_scheduler(self, message: wire.Message) -> None:
        self._spawn(self._carry_out(message))

    async def _carry_out(self, message: wire.Message) -> None:
        await self.ready.wait()  # what is still being started is not stopped in the middle
        try:
            await self.changes.handle(message)
        except Exception:
            log.exception("cannot do what the global scheduler wants")  # the fleet serves on as it is

    async def _greet(self) -> None:
        self.tell_scheduler(wire.ControllerHello())
        self.changes.resend()
        self._weigh_now.set()

    async def _weigh(self) -> None:
        """Tell the global scheduler, again and again, what is taken of the memory that models share."""
        while True:
            self._weigh_now.clear()
            began = time.monotonic()
            reports = [await self._weighed(*each) for each in self.fleet.residency.items()]
            if self._scheduler is not None and self._scheduler.up:
                seconds = time.monotonic() - began
                starting = list(self.changes.starting)
                for report in reports:
                    self._scheduler.send(msgspec.structs.replace(report, starting=starting, seconds=seconds))
            took = time.monotonic() - began
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(_WEIGH_SECONDS, _WEIGH_PART * took), _WEIGH_MOST)):
                    await self._weigh_now.wait()

    async def _weighed(self, name: str, residency: ResidencySpec) -> wire.MemoryReport:
        handle = self.units.units[name].handle
        if residency.on_gpus:
            there = {part.model for part in handle.parts}
            return memory_use.of_gpus(name, handle.gpu_memory(), residency, there)
        # The only unit has all of the fleet's memory.
        parents = handle.memory_parents()
        models = {model: pid for model, pid in parents.models.items() if model in residency.models}
        warm = [] if parents.warm is None else [parents.warm]
        return await asyncio.to_thread(memory_use.measure, name, os.getpid(), models, warm)

    # ------------------------------------------------------------ what its parts ask for (`FleetEffects`)

    @property
    def fleet(self) -> FleetSpec:
        """See `FleetEffects.fleet`."""
        return self.units.fleet

    def emit(self, event: Event) -> None:
        """See `PartEffects.emit`."""
        self._log_tail.note(event)
        part = getattr(event, "part", None)
        if part is not None and part.kind in _OWN:
            self.units.note(event)
        if isinstance(event, Up) and event.part == SCHEDULER:
            self.changes.scheduler_up()
            self._spawn(self._greet())
        self._tell_user(event)

    def fleet_changed(self) -> None:
        """See `FleetEffects.fleet_changed`."""
        if self.units.served and self._needs_scheduler() and SCHEDULER not in self._tasks:
            self._keep(self._starts.scheduler)
        self._starts.changed()

    def failed(self, error: BaseException) -> None:
        """See `FleetEffects.failed`."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def tell_scheduler(self, message: wire.Message) -> None:
        """See `FleetEffects.tell_scheduler`."""
        if self._scheduler is not None:
            self._scheduler.send(message)

    def warm_links(self) -> list[WarmLink]:
        """See `FleetEffects.warm_links`."""
        parents = [unit.handle.memory_parents() for unit in self.units.units.values()]
        return [each.link for each in parents if each.link is not None]

    async def until_sized(self) -> None:
        """See `FleetEffects.until_sized`."""
        await self.units.until_sized()

    async def until_followed(self, enough: Callable[[FollowedFleet], bool]) -> list[FollowedFleet]:
        """See `FleetEffects.until_followed`."""
        return await self._starts.until_followed(enough)

    def exit_status(self, pid: int) -> int | None:
        """See `PartEffects.exit_status`."""
        return self.reaper.exits.get(pid)

    def serving(self, part: Part) -> bool:
        """See `PartEffects.serving`."""
        return self.ready.is_set()

    def hopeless(self, part: Part) -> bool:
        """See `PartEffects.hopeless`: whatever keeps dying is tried again, ever more rarely."""
        return False

    def spared(self, part: Part) -> bool:
        """See `PartEffects.spared`: a fleet starts with all of these or not at all."""
        return False

    async def on_down(self, part: Part, reason: str) -> str:
        """See `PartEffects.on_down`."""
        if part.id.kind == "gateway":
            await self.units.tell(wire.GatewayDown(part.id.index, part.pid))
        elif part.id == VLLM:
            # What it forked serves on, and is ours from now on.
            await self._starts.drop_vllm()
            for group in self._starts.groups:
                self.reaper.add(group)
        return ""

    async def explain(self, part: Part, reason: str) -> str:
        """See `PartEffects.explain`."""
        return await log_tail.explain(None, part.id, reason, self._log_tail.of(part.id)[1])

    # ------------------------------------------------------------ stopping

    def _fail(self, failure: BaseException) -> int:
        if not isinstance(failure, GaveUp):
            raise failure
        path, tail = self._said(failure.part)
        self.emit(Failed(failure.part, f"{failure.part} cannot start: {failure}", str(path or ""), tail))
        return EXIT_START

    def _said(self, part: PartId) -> Said:
        return self._log_tail.of(part) if part.kind in _OWN else self.units.log_tail_of(part)

    async def _drain(self) -> None:
        """Let the gateways finish what they have; what else dies meanwhile is still restarted."""
        gateways = [part for part in self._starts.gateways if part.process is not None and part.process.running]
        seconds = self.fleet.gateway.drain_seconds
        if not gateways or self._forced.is_set():
            return
        if any(part.up.is_set() for part in gateways):
            self.emit(Draining(seconds, self._cause))
        for part in gateways:
            self._tasks[part.id].cancel()
        await drain(gateways, seconds, self._forced)

    async def _stop_all(self) -> None:
        """Everything that still runs: who brings requests, who sends them around, who serves them, what they were
        forked from."""
        self.emit(Stopping(self._cause))
        for group in (self._starts.gateways, [self._starts.scheduler]):
            await stop_parts(group)
        await self.units.stop()
        await self._starts.drop_spare()
        await stop_parts([self._starts.vllm])
        await self.reaper.end(self._starts.groups, STOP_SECONDS)
