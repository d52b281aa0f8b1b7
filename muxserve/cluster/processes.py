"""Processes of this machine, watched through pidfds: no signal handler, no thread, no pid used twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from muxserve.net.process import PARENT_VARIABLE


class Process:
    """A running process, a child of ours or not. Made inside a running event loop.

    `returncode` is as in `subprocess`: negative for a signal; None while it runs, and for good if nobody told us.
    """

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        """Watch `pid`.

        Raises:
            ProcessLookupError: it has gone already.
        """
        self.pid = pid
        self.returncode: int | None = None
        self._popen = popen
        self._exited = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_exit)

    @property
    def stdout(self) -> IO[bytes] | None:
        """The read end of its output, if it was started with a pipe."""
        return self._popen.stdout if self._popen else None

    @property
    def running(self) -> bool:
        """Whether it runs, by the kernel's word, which may be ahead of `wait`."""
        if self._exited.is_set():
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)

    async def wait(self) -> None:
        """Until it has ended."""
        await self._exited.wait()

    def send(self, number: int) -> None:
        """Send a signal; nothing if it has ended."""
        if not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    async def stop(self, grace: float, kill: Callable[[Process], None] | None = None) -> None:
        """SIGTERM, and SIGKILL (or `kill`) after `grace` seconds; returns when it has ended."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace):
                await self.wait()
        except TimeoutError:
            if kill is None:
                self.send(signal.SIGKILL)
            else:
                kill(self)
            await self.wait()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._popen is not None:
            self.returncode = self._popen.wait()
        else:
            # Its parent died, and it came to us (see `adopt_orphans`); otherwise its parent collects the status.
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
                if ended is not None:
                    killed = ended.si_code != os.CLD_EXITED
                    self.returncode = -ended.si_status if killed else ended.si_status
        os.close(self._fd)
        self._exited.set()


def spawn(
    argv: Sequence[str],
    log: Path,
    pass_fds: Sequence[int] = (),
    pipe_stdout: bool = False,
    environment: Mapping[str, str] | None = None,
    held: Collection[signal.Signals] = (),
) -> Process:
    """Start a process in a process group of its own, so that Ctrl-C in the terminal reaches only us.

    Its output is appended to `log`; with `pipe_stdout` only stderr is. `environment` adds to ours. Signals that are
    `held` reach it only when it lets them (`muxserve.net.process.Signals`): else they might end it.
    To be called from the main thread: a process that wants to die with its parent dies with the thread that started it.

    Raises:
        OSError: it cannot be started.
    """
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        # It begins with the mask of this thread.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
        try:
            popen = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe_stdout else output,
                stderr=output,
                pass_fds=tuple(pass_fds),
                process_group=0,
                env={**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Process(popen.pid, popen)


def children(pid: int) -> list[int]:
    """The processes that the main thread of `pid` has started and that are not collected; none if it is gone."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def reap_group(group: int) -> dict[int, int]:
    """Collect the ended children of ours in process group `group`: pid -> return code as in `subprocess`."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-group, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def has_children(group: int) -> bool:
    """Whether a child of ours is in process group `group`, running or not yet collected."""
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_group(group: int) -> None:
    """SIGKILL whatever is left of process group `group`, if a child of ours is in it.

    Without one the number may long be somebody else's.
    """
    if has_children(group):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


# How the words begin for a process that ended by itself.
EXITED = "exited with status"


def exit_words(returncode: int | None) -> str:
    """How a process ended, for people."""
    if returncode is None:
        return "ended"
    if returncode >= 0:
        return f"{EXITED} {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"killed by {name}" + (
        " (by someone, or by the kernel for want of memory)" if returncode == -signal.SIGKILL else ""
    )


_PAUSE_SECONDS = 0.01


class Reaper:
    """Process groups whose parent has died, and how processes ended that were not our children.

    One per controlling process, which calls `reap` at every SIGCHLD (see `adopt_orphans`).
    """

    def __init__(self) -> None:
        # pid -> return code as in `subprocess`; whoever watches such a process asks here.
        self.exits: dict[int, int] = {}
        self._groups: set[int] = set()

    def add(self, group: int) -> None:
        """The parent of process group `group`, which has its pid, has ended."""
        self._groups.add(group)
        self.reap()

    def reap(self) -> None:
        """Collect what has ended; processes that load models are watched by nobody else."""
        for group in self._groups:
            self.exits.update(reap_group(group))

    async def end(self, groups: Iterable[int], seconds: float) -> None:
        """Kill and collect all that is left of `groups`, for at most `seconds`: what dies with its parent comes to us a
        moment later."""
        groups = set(groups)
        deadline = time.monotonic() + seconds
        while any(map(has_children, groups)) and time.monotonic() < deadline:
            for group in groups:
                kill_group(group)
                self.exits.update(reap_group(group))
            await asyncio.sleep(_PAUSE_SECONDS)
        self._groups -= groups
