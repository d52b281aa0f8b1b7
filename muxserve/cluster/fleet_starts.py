"""How the processes that belong to no unit come up: the machine's vLLM, gateways, the global scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from muxserve.cluster.effects import FleetEffects
from muxserve.cluster.events import PartId, Progress, Starting
from muxserve.cluster.processes import Process, spawn
from muxserve.cluster.restarts import PATIENT_DELAYS, RestartPolicy
from muxserve.cluster.supervision import Part, PartDied, PartFailed, while_running
from muxserve.cluster.warm_link import ParentEvents, WarmLink
from muxserve.cluster.watch import Watch
from muxserve.cluster.watchdog import Finding, Liveness
from muxserve.net.sockets import until_reachable
from muxserve.spec import UNIT_FILE, FleetSpec, FollowedFleet, UnitSpec, followed_file, load_followed

VLLM, SCHEDULER, SPARE = PartId("vllm"), PartId("scheduler"), PartId("spare")
_START_SECONDS = {"vllm": 300.0, "gateway": 300.0, "scheduler": 30.0}
_LOOK_SECONDS = 0.02
# Between two spares, of which the first did not live.
_SPARE_SECONDS = 1.0
# One that does not serve by then is given up: it has nothing to do but to begin.
_SPARE_READY_SECONDS = 10.0


@dataclass(frozen=True)
class FleetCommands:
    """Command lines; that of `vllm` gets the numbers of its descriptors in addition."""

    vllm: list[str]
    scheduler: list[str]


def fleet_commands_for(fleet: FleetSpec) -> FleetCommands:
    """The real ones."""

    def python(module: str, *args: str) -> list[str]:
        return [sys.executable, "-m", module, "--fleet", str(fleet.file), *args]

    return FleetCommands(
        vllm=python("muxserve.forks.machine_parent"),
        scheduler=python("muxserve.global_scheduler.process", "--die-with-parent"),
    )


class FleetLauncher:
    """Plain processes of this machine, each with its log file in the fleet's directory for them."""

    def __init__(self, commands: FleetCommands, log_dir: Path) -> None:
        self._commands = commands
        self._log_dir = log_dir

    def vllm(self, control_fd: int, lifeline_fd: int) -> Process:
        """The process that imports vLLM, with both descriptors open in it under the same numbers."""
        command = [*self._commands.vllm, "--control-fd", str(control_fd), "--lifeline-fd", str(lifeline_fd)]
        return spawn(command, self._log_dir / "vllm.log", (control_fd, lifeline_fd))

    def scheduler(self) -> Process:
        """The global scheduler; it listens on the fleet's socket for it once it serves."""
        # It may be told to read the fleet's file again at any time, and would not survive that before it expects it.
        return spawn(self._commands.scheduler, self._log_dir / "scheduler.log", held=[signal.SIGHUP])


class FleetStarts(ParentEvents):
    """The parts of a fleet that belong to no unit, with what starts them (a `Starter`); also where units get their warm
    parents.

    Args:
        exits: return codes of processes that are not our children, as they are reported.
        gateways: how many.
        watch: over the processes of this machine.
    """

    def __init__(
        self, launcher: FleetLauncher, effects: FleetEffects, exits: dict[int, int], gateways: int, watch: Watch
    ) -> None:
        self._launcher = launcher
        self._effects = effects
        self._exits = exits
        self._watch = watch
        # Process groups of those that have imported vLLM: in each, what was forked from it, but for units.
        self.groups: list[int] = []
        self._link: WarmLink | None = None
        self._lifeline_read, self._lifeline_write = os.pipe()
        self.vllm = Part(VLLM, self, _START_SECONDS["vllm"])
        # Somebody waits to be forked by it.
        self._needed = asyncio.Event()
        self._had_vllm = False
        # What takes its place when it dies.
        self._spare: tuple[WarmLink, Process] | None = None
        self._spare_taken = asyncio.Event()
        self.gateways = [
            Part(PartId("gateway", index=index), self, _START_SECONDS["gateway"]) for index in range(gateways)
        ]
        self.scheduler = Part(SCHEDULER, self, _START_SECONDS["scheduler"])
        # What these have once started serves on without them, and nothing else can stand in for them.
        for part in (self.vllm, *self.gateways):
            part.policy = RestartPolicy(max_deaths=None)
        # Without it gateways decide by themselves.
        self.scheduler.policy = RestartPolicy(max_deaths=None, delays=PATIENT_DELAYS)

    # ------------------------------------------------------------ a starter of parts

    async def before_start(self, part: Part) -> None:
        """See `Starter.before_start`."""
        if part.id == VLLM:
            await self._until_needed()
        elif part.id.kind == "gateway":
            await self._effects.until_sized()

    async def start(self, part: Part) -> None:
        """See `Starter.start`."""
        if part.id == VLLM:
            await self._start_vllm(part)
        elif part.id == SCHEDULER:
            await self._start_scheduler(part)
        else:
            await self._start_gateway(part)

    async def release(self, pid: int) -> None:
        """See `Starter.release`: none of these has a GPU."""

    def on_progress(self, part: PartId, detail: str) -> None:
        """See `ParentEvents.on_progress`."""
        self._effects.emit(Progress(part, detail))

    def on_exited(self, pid: int, status: int) -> None:
        """See `ParentEvents.on_exited`."""
        self._exits[pid] = status

    # ------------------------------------------------------------ life

    async def close(self) -> None:
        """Close all that is open to the parts; they end for it at the latest."""
        for fd in (self._lifeline_read, self._lifeline_write):
            os.close(fd)
        await self.drop_vllm()

    async def keep_spare(self) -> None:
        """Have a spare of what has imported vLLM, and another one when it was taken or has ended; never returns. It
        shares its memory with what it was forked from."""
        while True:
            # Others are forked first.
            for part in (self.vllm, *self.gateways):
                await part.up.wait()
            try:
                spare = self._spare = await self._fork_spare()
            except (PartDied, TimeoutError, OSError):
                await asyncio.sleep(_SPARE_SECONDS)
                continue
            self._spare_taken.clear()
            process = spare[1]
            ends = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._spare_taken.wait())]

            def found(finding: Finding[PartId], process: Process = process) -> None:
                if finding.state is Liveness.HUNG:
                    process.send(signal.SIGKILL)

            try:
                with self._watch.over(SPARE, process.pid, found):
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
            if self._spare is spare:
                await self.drop_spare()
                await asyncio.sleep(_SPARE_SECONDS)

    async def _fork_spare(self) -> tuple[WarmLink, Process]:
        parent = self._link
        if parent is None or not self.vllm.up.is_set():
            raise PartDied("it has died meanwhile")
        return await self._spare_of(parent, [])

    async def _spare_of(self, parent: WarmLink, fds: Sequence[int]) -> tuple[WarmLink, Process]:
        """A spare that `parent` forks."""
        link = WarmLink(VLLM, self)
        try:
            birth = parent.order(
                SPARE,
                [link.theirs.fileno(), *fds],
                fleet=str(self._effects.fleet.file),
                log=str(self._effects.fleet.log_dir / "vllm.log"),
            )
            async with asyncio.timeout(_SPARE_READY_SECONDS):
                process = await birth.process(self._exits)
        except BaseException:
            await link.close()
            raise
        finally:
            link.theirs.close()
        return link, process

    async def _spare_of_a_unit(self) -> None:
        """Have a unit's warm parent fork a spare, if one can: it has imported vLLM, too, and shares what it imported
        with gateways and engines."""
        for parent in self._effects.warm_links():
            with contextlib.suppress(PartDied, PartFailed, TimeoutError, OSError):
                self._spare = await self._spare_of(parent, [self._lifeline_read])
                self.groups.append(self._spare[1].pid)
                return

    async def drop_spare(self) -> None:
        """Have the spare end, if there is one."""
        if self._spare is not None:
            (link, process), self._spare = self._spare, None
            process.send(signal.SIGKILL)
            await link.close()

    async def drop_vllm(self) -> None:
        """Forget the process that imported vLLM: whoever still waits to be forked by it is told that it died."""
        if self._link is not None:
            await self._link.close()
            self._link = None

    def changed(self) -> None:
        """Have those that are up read the fleet's file again; who comes up later is told then."""
        for part in (*self.gateways, self.scheduler):
            if part.process is not None and part.up.is_set():
                part.process.send(signal.SIGHUP)

    async def until_followed(self, enough: Callable[[FollowedFleet], bool]) -> list[FollowedFleet]:
        """Wait until `enough` holds for every gateway that runs; returns what they have taken in. One that ends is not
        waited for: it reads the fleet's file when it comes up again. To be waited for with a time limit."""
        while True:
            found: list[FollowedFleet] = []
            late = False
            for part in self.gateways:
                if part.process is None or not part.process.running:
                    continue
                followed = load_followed(followed_file(self._effects.fleet.run_dir, part.id.index))
                if followed is None or followed.pid != part.process.pid or not enough(followed):
                    late = True
                else:
                    found.append(followed)
            if not late:
                return found
            await asyncio.sleep(_LOOK_SECONDS)

    def refused(self) -> dict[str, str]:
        """The models that a gateway cannot offer, and why."""
        run_dir = self._effects.fleet.run_dir
        followed = (load_followed(followed_file(run_dir, part.id.index)) for part in self.gateways)
        return {model: reason for each in followed if each is not None for model, reason in each.refused.items()}

    async def until_up(self) -> None:
        """See `launcher.WarmParents.until_up`."""
        if not self.vllm.up.is_set():
            self._needed.set()
            await self.vllm.up.wait()

    async def fork(self, unit_spec: UnitSpec, control_fd: int) -> Process:
        """See `launcher.WarmParents.fork`."""
        link = await self._linked()
        birth = link.order(
            PartId("warm_parent", unit=unit_spec.unit),
            [control_fd],
            unit_spec=os.path.join(unit_spec.run_dir, UNIT_FILE),
            log=str(unit_spec.log_dir / "warm_parent.log"),
        )
        return await birth.process(self._exits)

    async def _linked(self) -> WarmLink:
        await self.until_up()
        assert self._link is not None
        return self._link

    async def _until_needed(self) -> None:
        """Until what imported vLLM is to be started. What it has imported is shared by all that it forks; a second one
        would have all of that once more, which is memory for a model. So a spare one takes its place, or one that a
        unit forks; and where there is neither, and memory decides which models are awake, it waits for somebody to be
        forked."""
        if not self._had_vllm:
            return
        if self._spare is None or not self._spare[1].running:
            await self.drop_spare()
            await self._spare_of_a_unit()
        if self._effects.fleet.residency and self._spare is None and not self._needed.is_set():
            self._effects.emit(
                Progress(VLLM, "is started again when a process is to be forked: what it imports takes memory")
            )
            await self._needed.wait()

    async def _start_vllm(self, part: Part) -> None:
        self._effects.emit(Starting(part.id))
        await self.drop_vllm()
        if not await self._take_spare(part):
            self._link = WarmLink(VLLM, self)
            try:
                part.process = self._launcher.vllm(self._link.theirs.fileno(), self._lifeline_read)
            finally:
                self._link.theirs.close()
            self.groups.append(part.process.pid)
            self._effects.emit(Progress(part.id, "importing vLLM"))
            await while_running(part.process, self._link.ready)
        self._had_vllm = True
        self._needed.clear()

    async def _take_spare(self, part: Part) -> bool:
        """Have the spare, if there is one that lives, be what imported vLLM."""
        spare, self._spare = self._spare, None
        self._spare_taken.set()
        if spare is None:
            return False
        link, process = spare
        serves = False
        try:
            link.serve()
            async with asyncio.timeout(_SPARE_READY_SECONDS):
                await while_running(process, link.ready)
            serves = True
        except (PartDied, TimeoutError):
            return False
        finally:
            if not serves:
                process.send(signal.SIGKILL)
                await link.close()
        self._link, part.process = link, process
        return True

    async def _start_gateway(self, part: Part) -> None:
        link = await self._linked()
        part.began = time.monotonic()
        self._effects.emit(Starting(part.id))
        generation = self._effects.fleet.generation
        birth = link.order(part.id)
        part.process = await birth.process(self._exits)
        await birth.until_up(part.process)
        self._tell_if_changed(part, generation)

    async def _start_scheduler(self, part: Part) -> None:
        self._effects.emit(Starting(part.id))
        generation = self._effects.fleet.generation
        part.process = self._launcher.scheduler()
        await while_running(part.process, until_reachable(self._effects.fleet.scheduler_address))
        self._tell_if_changed(part, generation)

    def _tell_if_changed(self, part: Part, generation: int) -> None:
        """What changed while it came up it may have read or not."""
        if self._effects.fleet.generation != generation and part.process is not None:
            part.process.send(signal.SIGHUP)
