"""Starts the processes that a controller supervises. The local one starts them on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muxserve.cluster.processes import Process, spawn
from muxserve.deployment import Deployment


class Launcher(Protocol):
    """What the controller needs of a machine. Each method starts one process and returns at once."""

    def memory_manager(self) -> tuple[Process, Awaitable[None]]:
        """The process, and what is done once it serves."""

    def unit_scheduler(self) -> Process:
        """The process; it answers on the unit's address once it serves."""

    def warm_parent(self, control_fd: int, lifeline_fd: int) -> Process:
        """The process, with both descriptors open in it under the same numbers."""


@dataclass(frozen=True)
class Commands:
    """Command lines. `warm_parent` is told the numbers of its two descriptors."""

    memory_manager: list[str]
    unit_scheduler: list[str]
    warm_parent: Callable[[int, int], list[str]]


def commands_for(deployment: Deployment, deployment_file: Path) -> Commands:
    """The real ones."""
    from muxserve.memory import server

    def python(module: str, *args: str) -> list[str]:
        return [sys.executable, "-m", module, "--deployment", str(deployment_file), *args]

    return Commands(
        memory_manager=server.command(deployment),
        unit_scheduler=python("muxserve.unit.scheduler", "--die-with-parent"),
        warm_parent=lambda control, lifeline: python(
            "muxserve.engine.warm_parent", "--control-fd", str(control), "--lifeline-fd", str(lifeline)
        ),
    )


class LocalLauncher:
    """Plain processes of this machine, each with its log file under `log_dir`."""

    def __init__(self, commands: Commands, log_dir: Path) -> None:
        self._commands = commands
        self._log_dir = log_dir
        self._readers: set[asyncio.Task[None]] = set()

    def memory_manager(self) -> tuple[Process, Awaitable[None]]:
        """See `Launcher.memory_manager`. It says `READY` on its standard output."""
        log = self._log_dir / "memory.log"
        process = spawn(self._commands.memory_manager, log, pipe_stdout=True)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_read_output(process, log, ready))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return process, ready

    def unit_scheduler(self) -> Process:
        """See `Launcher.unit_scheduler`."""
        return spawn(self._commands.unit_scheduler, self._log_dir / "unit.log")

    def warm_parent(self, control_fd: int, lifeline_fd: int) -> Process:
        """See `Launcher.warm_parent`."""
        command = self._commands.warm_parent(control_fd, lifeline_fd)
        return spawn(command, self._log_dir / "warm_parent.log", pass_fds=(control_fd, lifeline_fd))


async def _read_output(process: Process, log: Path, ready: asyncio.Future[None]) -> None:
    """Copy a process's output to `log`, so that it never blocks on a full pipe; `ready` when it says READY."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
    try:
        with log.open("ab", buffering=0) as output:
            async for line in reader:
                output.write(line)
                if line.startswith(b"READY") and not ready.done():
                    ready.set_result(None)
    finally:
        transport.close()
