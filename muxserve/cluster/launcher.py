"""Starts the processes that a controller supervises. The local one starts them on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from muxserve.cluster.processes import Process, spawn
from muxserve.deployment import Deployment, load
from muxserve.gpu.sm import client_environment


class Launcher(Protocol):
    """What the controller needs of a machine. Each method starts one process and returns at once."""

    def mps(self) -> tuple[Process, Awaitable[None]]:
        """The process that owns the MPS server, and what is done once that takes clients."""

    def memory_manager(self, store_fd: int | None = None) -> tuple[Process, Awaitable[None]]:
        """The process, and what is done once it serves. `store_fd`: its end of a store of file descriptors, which stay
        when it dies; open in it under the same number."""

    def unit_scheduler(self) -> Process:
        """The process; it answers on the unit's address once it serves."""

    def warm_parent(self, control_fd: int, lifeline_fd: int) -> Process:
        """The process, with both descriptors open in it under the same numbers."""


@dataclass(frozen=True)
class Commands:
    """Command lines, made when a process is started. `memory_manager` is told the number of its descriptor, if it has
    one, `warm_parent` those of its two. `environment` is added to everyone's."""

    memory_manager: Callable[[int | None], list[str]]
    unit_scheduler: list[str]
    warm_parent: Callable[[int, int], list[str]]
    mps: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)


def commands_for(deployment: Deployment, deployment_file: Path) -> Commands:
    """The real ones."""
    from muxserve.memory import server

    def python(module: str, *args: str) -> list[str]:
        return [sys.executable, "-m", module, "--deployment", str(deployment_file), *args]

    def memory_manager(store_fd: int | None) -> list[str]:
        # The sizes of the pools may have been written since.
        command = server.command(load(deployment_file))
        return command if store_fd is None else [*command, "--fd-store", str(store_fd)]

    return Commands(
        memory_manager=memory_manager,
        unit_scheduler=python("muxserve.unit.scheduler", "--die-with-parent"),
        warm_parent=lambda control, lifeline: python(
            "muxserve.engine.warm_parent", "--control-fd", str(control), "--lifeline-fd", str(lifeline)
        ),
        mps=python("muxserve.gpu.mps"),
        environment=client_environment(deployment),
    )


class LocalLauncher:
    """Plain processes of this machine, each with its log file under `log_dir`."""

    def __init__(self, commands: Commands, log_dir: Path) -> None:
        self._commands = commands
        self._log_dir = log_dir
        self._readers: set[asyncio.Task[None]] = set()

    def mps(self) -> tuple[Process, Awaitable[None]]:
        """See `Launcher.mps`."""
        return self._until_ready(self._commands.mps, "mps.log")

    def memory_manager(self, store_fd: int | None = None) -> tuple[Process, Awaitable[None]]:
        """See `Launcher.memory_manager`."""
        pass_fds = () if store_fd is None else (store_fd,)
        return self._until_ready(self._commands.memory_manager(store_fd), "memory.log", pass_fds)

    def _until_ready(
        self, command: list[str], log_name: str, pass_fds: tuple[int, ...] = ()
    ) -> tuple[Process, Awaitable[None]]:
        """A process that says `READY` on its standard output."""
        log = self._log_dir / log_name
        process = spawn(command, log, pass_fds, pipe_stdout=True, environment=self._commands.environment)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_read_output(process, log, ready))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return process, ready

    def unit_scheduler(self) -> Process:
        """See `Launcher.unit_scheduler`."""
        return spawn(self._commands.unit_scheduler, self._log_dir / "unit.log", environment=self._commands.environment)

    def warm_parent(self, control_fd: int, lifeline_fd: int) -> Process:
        """See `Launcher.warm_parent`."""
        command = self._commands.warm_parent(control_fd, lifeline_fd)
        pass_fds = (control_fd, lifeline_fd)
        return spawn(command, self._log_dir / "warm_parent.log", pass_fds, environment=self._commands.environment)


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
