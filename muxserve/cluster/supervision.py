"""One part of a unit's spec, kept alive: start, wait, start again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from muxserve.cluster.events import Down, Event, PartId, Recovered, Suspected, Up
from muxserve.cluster.processes import Process, exit_words
from muxserve.cluster.restarts import RestartPolicy
from muxserve.cluster.watch import Watch
from muxserve.cluster.watchdog import Finding, Liveness

T = TypeVar("T")
WITH_PARENT = "ended with the process that it was forked from"
# Whoever is the parent of a process that has ended tells how within a millisecond, unless it has died as well.
_STATUS_SECONDS = 0.1


class PartDied(Exception):  # noqa: N818 -- an end, not necessarily an error of the part's
    """A part ended. `blameless`: with its parent, so that it does not count against it."""

    def __init__(self, reason: str, blameless: bool = False) -> None:
        super().__init__(reason)
        self.blameless = blameless


class PartFailed(Exception):  # noqa: N818
    """A part said that it cannot start, and why."""


class GaveUp(Exception):  # noqa: N818
    """A part kept dying or cannot start."""

    def __init__(self, part: PartId, reason: str) -> None:
        super().__init__(reason)
        self.part = part


class Starter(Protocol):
    """Brings parts up."""

    async def before_start(self, part: Part) -> None:
        """Awaited before every start of a part, however long it takes."""

    async def start(self, part: Part) -> None:
        """Bring a part up: set its `process` as soon as there is one, and return when it serves.

        Raises:
            PartDied, PartFailed, OSError: it does not come up.
        """

    async def release(self, pid: int) -> None:
        """Take a process off its GPUs, before it is killed."""


class Part:
    """State of one part, which `starter` brings up.

    `timeout` seconds count from the end of `Starter.before_start`, without the time between `pause` and `resume`.
    `releases`: the starter takes its process off the GPUs before it is killed.
    """

    def __init__(self, part: PartId, starter: Starter, timeout: float, releases: bool = False) -> None:
        self.limit: asyncio.Timeout | None = None
        self._killing: set[asyncio.Task[None]] = set()
        self.id = part
        self.starter = starter
        self.timeout = timeout
        self.releases = releases
        self.process: Process | None = None
        # What its process has left behind and need not stay for: resolves with the reason when that is lost.
        self.left: asyncio.Future[str] | None = None
        # Its process is not its own: it serves others, too, and is not ended with it.
        self.lent = False
        self.began = 0.0
        self.up = asyncio.Event()
        self.policy = RestartPolicy()
        self.early_policy = RestartPolicy(max_deaths=2)

        # Why it was killed, if that was because of another part's end.
        self.killed_for = ""
        # Why it was killed, if that was because it gave no sign of life.
        self.hung = ""
        self.suspect = False
        # Parts that its process calls: it is not to blame for its silence while one of them is silent.
        self.waits_for: tuple[PartId, ...] = ()

    @property
    def pid(self) -> int:
        """The pid of its process, also when that has ended; 0: it has had none since it was started last."""
        return self.process.pid if self.process is not None else 0

    def kill(self, because: str = "") -> None:
        """SIGKILL, if it runs. `because`: another part's end, in words; its own end does not count then."""
        if self.process is not None and self.process.running:
            self.killed_for = because
            self._kill(self.process)

    def kill_hung(self, seconds: float) -> None:
        """SIGKILL after so long without a sign of life; that counts against it like any death."""
        if self.process is not None and self.process.running:
            self.hung = f"hung: no sign of life for {seconds:.0f} s"
            self._kill(self.process)

    async def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds; returns when it has ended. Nothing if it does not run, or its
        process is lent."""
        if not self.lent and self.process is not None and self.process.running:
            await self.process.stop(grace, self._kill)

    def _kill(self, process: Process) -> None:
        if not self.releases:
            process.send(signal.SIGKILL)
        else:
            task = asyncio.create_task(self._release_and_kill(process))
            self._killing.add(task)
            task.add_done_callback(self._killing.discard)

    async def _release_and_kill(self, process: Process) -> None:
        try:
            await self.starter.release(process.pid)
        finally:
            process.send(signal.SIGKILL)

    def pause(self) -> None:
        """It waits for others: the time limit of its start does not count."""
        if self.limit is not None:
            self.limit.reschedule(None)

    def resume(self) -> None:
        """It goes on, with the whole limit before it."""
        if self.limit is not None:
            self.limit.reschedule(asyncio.get_running_loop().time() + self.timeout)


async def while_running(process: Process, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`.

    Raises:
        PartDied: the process ended first.
    """
    work = asyncio.ensure_future(awaitable)
    end = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise PartDied(exit_words(process.returncode))
    finally:
        for task in (work, end):
            if not task.done():
                task.cancel()


class PartEffects(Protocol):
    """What a supervisor asks of those whose parts it keeps: a fleet (`FleetEffects`) or a unit (`UnitEffects`)."""

    def emit(self, event: Event) -> None:
        """Something has happened."""

    def exit_status(self, pid: int) -> int | None:
        """The return code of a process that was not our child, if someone has reported it."""

    def serving(self, part: Part) -> bool:
        """Whether everything that came up with a part has been up once; until then there is less patience."""

    def hopeless(self, part: Part) -> bool:
        """Whether to give up a part whose policy would go on, after a start that failed."""

    def spared(self, part: Part) -> bool:
        """Whether everything else goes on without a part that cannot be started at first, so that it is tried again
        with patience instead of given up."""

    async def on_down(self, part: Part, reason: str) -> str:
        """A part has ended and is not started again yet; answers why its end does not count against it, in words, or
        nothing if it does."""

    async def explain(self, part: Part, reason: str) -> str:
        """What more is known of why a part has ended than the reason says."""


async def exit_status(process: Process, effects: PartEffects) -> int | None:
    """The return code of a process that has just ended; None if nobody tells."""
    code = process.returncode
    if code is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_SECONDS):
                while (code := effects.exit_status(process.pid)) is None:
                    await asyncio.sleep(_STATUS_SECONDS / 20)
    return code


class Supervisor:
    """Keeps parts alive.

    Args:
        watch: whether those that are up hang; who does is killed, and started again as after any death.
    """

    def __init__(self, effects: PartEffects, watch: Watch) -> None:
        self._effects = effects
        self._watch = watch

    async def keep(self, part: Part) -> None:
        """Start `part`, and again whenever it ends; never returns.

        Raises:
            GaveUp: it kept dying, or said at the first start of the unit that it cannot start.
        """
        while True:
            part.process = part.left = None
            part.lent = False
            part.killed_for = part.hung = ""
            blameless = failed = False
            await part.starter.before_start(part)
            part.began = time.monotonic()
            try:
                async with asyncio.timeout(part.timeout) as part.limit:
                    await part.starter.start(part)
            except PartDied as death:
                reason, blameless = str(death), death.blameless
            except PartFailed as failure:
                reason, failed = str(failure), True
            except TimeoutError:
                reason = f"not ready after {part.timeout:.0f} s"
            except OSError as error:
                reason = f"cannot be started: {error}"
            else:
                assert part.process is not None
                part.limit = None
                part.up.set()
                self._effects.emit(Up(part.id, part.process.pid, time.monotonic() - part.began))
                if part.left is not None:
                    reason = await part.left
                else:
                    await self._until_end(part, begun=True)
                    reason = part.hung or exit_words(part.process.returncode)
            part.limit = None
            came_up = part.up.is_set()
            part.up.clear()
            await self._end(part)
            cause = await self._effects.on_down(part, reason) or part.killed_for
            if blameless or cause:
                blameless, reason = True, cause or WITH_PARENT
            else:
                reason = await self._why(part, reason)
            delay = part.policy.delays[0]
            if not blameless:
                delay = self._next_start(part, reason, came_up, failed)
            self._effects.emit(Down(part.id, reason, delay, part.policy.failed_starts, hung=bool(part.hung)))
            await asyncio.sleep(delay)

    def _next_start(self, part: Part, reason: str, came_up: bool, failed: bool) -> float:
        """Seconds until a part that died is started again. One that `failed` has said that it cannot start: before
        anything is served it is not tried again.

        Raises:
            GaveUp: it is not.
        """
        serving, killed, now = self._effects.serving(part), self._was_killed(part), time.monotonic()
        hopeless = not came_up and self._effects.hopeless(part)
        delay = (part.policy if serving else part.early_policy).died(now, came_up, killed)
        if delay is not None and not hopeless and (serving or not failed):
            return delay
        if not serving and not hopeless and self._effects.spared(part):
            delay = part.policy.died(now, came_up, killed)
            if delay is not None:
                return delay
        raise GaveUp(part.id, reason)

    def _was_killed(self, part: Part) -> bool:
        """By somebody outside, as far as anybody has told."""
        if part.process is None or part.hung:
            return False
        code = part.process.returncode
        return (self._effects.exit_status(part.process.pid) if code is None else code) == -signal.SIGKILL

    async def watch_only(self, part: Part) -> None:
        """Watch a process that someone else starts again, until it ends; it beats only when it has loaded what it
        needs."""
        await self._until_end(part, begun=False)
        if part.hung:
            self._effects.emit(Down(part.id, part.hung, 0.0, hung=True))

    async def _until_end(self, part: Part, begun: bool) -> None:
        """Watch it until it ends. That it hung is said by its `Down`; else, or when nobody keeps it any more, that it
        is not suspected any more."""
        assert part.process is not None
        pid = part.process.pid
        ended = False
        try:
            with self._watch.over(part.id, pid, lambda finding: self._found(part, finding), begun, part.waits_for):
                await part.process.wait()
            ended = True
        finally:
            if ended and part.hung:
                part.suspect = False
            self._clear(part)

    def _found(self, part: Part, finding: Finding[PartId]) -> None:
        """Something is thought of a part that runs."""
        if finding.state is Liveness.WELL:
            self._clear(part)
            return
        if not part.suspect:
            part.suspect = True
            self._effects.emit(Suspected(part.id, finding.silence))
        if finding.state is Liveness.HUNG:
            part.kill_hung(finding.silence)

    def _clear(self, part: Part) -> None:
        if part.suspect:
            part.suspect = False
            self._effects.emit(Recovered(part.id))

    async def _end(self, part: Part) -> None:
        """A part that failed while its process still runs must not stay."""
        if part.process is not None and part.process.running:
            part.kill()
            await part.process.wait()

    async def _why(self, part: Part, reason: str) -> str:
        """The reason with the status of a process that someone else is the parent of, and with what is known more."""
        if part.process is not None and reason == exit_words(None):
            reason = exit_words(await exit_status(part.process, self._effects))
        more = await self._effects.explain(part, reason)
        return f"{reason}; {more}" if more and more not in reason else reason


STOP_SECONDS = 5.0
_DRAIN_MARGIN = 5.0  # on top of what the gateways themselves allow their requests


async def stop_parts(parts: Sequence[Part], grace: float = STOP_SECONDS) -> None:
    """SIGTERM for all that run, and SIGKILL after `grace` seconds; returns when they have ended."""
    await asyncio.gather(*(part.stop(grace) for part in parts))


async def drain(gateways: Sequence[Part], seconds: float, forced: asyncio.Event) -> None:
    """Have gateways that nobody starts again end when their requests have, within about so many seconds, or until
    `forced`."""
    hurry: asyncio.Task[object] = asyncio.create_task(forced.wait())
    ended: asyncio.Task[object] = asyncio.create_task(stop_parts(gateways, seconds + _DRAIN_MARGIN))
    await asyncio.wait([hurry, ended], return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    ended.cancel()
