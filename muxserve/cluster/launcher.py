"""Starts the processes of a unit on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from muxserve.cluster.processes import Process, spawn
from muxserve.gpu.environment import client_environment, keeper_environment
from muxserve.spec import UnitSpec, load


class WarmParents(Protocol):
    """Where warm parents come from, if they need not import vLLM themselves."""

    async def until_up(self) -> None:
        """Until one can be forked."""

    async def fork(self, unit_spec: UnitSpec, control_fd: int) -> Process:
        """The warm parent of a unit, leader of a process group of its own; it outlives what it was forked from.

        Raises:
            muxserve.cluster.supervision.PartDied: what forks is gone.
        """


@dataclass(frozen=True)
class Commands:
    """Command lines. `memory_manager` is called when that is started, with the number of its descriptor, if it has one;
    `warm_parent` gets that of its own in addition. `environment` is added to everyone's, and then `memory_environment`
    to the memory manager's."""

    memory_manager: Callable[[int | None], list[str]]
    unit_scheduler: list[str]
    migrator: list[str]
    warm_parent: list[str]
    mps: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_environment: Mapping[str, str] = field(default_factory=dict)


def commands_for(unit_spec: UnitSpec, spec_file: Path) -> Commands:
    """The real ones."""
    from muxserve.memory import server

    def python(module: str, *args: str) -> list[str]:
        return [sys.executable, "-m", module, "--unit-spec", str(spec_file), *args]

    def memory_manager(store_fd: int | None) -> list[str]:
        # The sizes of the pools may have been written since.
        command = server.command(load(spec_file))
        return command if store_fd is None else [*command, "--fd-store", str(store_fd)]

    return Commands(
        memory_manager=memory_manager,
        unit_scheduler=python("muxserve.unit.scheduler", "--die-with-parent"),
        migrator=python("muxserve.migration.process", "--die-with-parent"),
        warm_parent=python("muxserve.forks.warm_parent"),
        mps=python("muxserve.gpu.mps"),
        environment=client_environment(unit_spec),
        memory_environment=keeper_environment(unit_spec),
    )


class Launcher:
    """Plain processes, each with its log file in the unit's directory for them. Each method but `until_warm` starts one
    and returns at once.

    Args:
        warm_parents: what forks the warm parent; None: it is started as a process that imports vLLM.
    """

    def __init__(self, unit_spec: UnitSpec, commands: Commands, warm_parents: WarmParents | None = None) -> None:
        self._unit_spec = unit_spec
        self._commands = commands
        self._warm_parents = warm_parents
        self._log_dir = unit_spec.log_dir
        self._readers: set[asyncio.Task[None]] = set()

    def mps(self) -> tuple[Process, Awaitable[None]]:
        """The process that owns the MPS server, and what is done once that takes clients."""
        return self._until_ready(self._commands.mps, "mps.log")

    def memory_manager(self, store_fd: int | None = None) -> tuple[Process, Awaitable[None]]:
        """The process, and what is done once it serves. `store_fd`: its end of a store of file descriptors, which stay
        when it dies; open in it under the same number."""
        pass_fds = () if store_fd is None else (store_fd,)
        commands = self._commands
        return self._until_ready(commands.memory_manager(store_fd), "memory.log", pass_fds, commands.memory_environment)

    def _until_ready(
        self,
        command: list[str],
        log_name: str,
        pass_fds: tuple[int, ...] = (),
        more: Mapping[str, str] | None = None,
    ) -> tuple[Process, Awaitable[None]]:
        """A process that says `READY` on its standard output."""
        log = self._log_dir / log_name
        environment = {**self._commands.environment, **(more or {})}
        process = spawn(command, log, pass_fds, pipe_stdout=True, environment=environment)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_read_output(process, log, ready))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return process, ready

    def unit_scheduler(self) -> Process:
        """The process; it answers on the unit's address once it serves."""
        return spawn(self._commands.unit_scheduler, self._log_dir / "unit.log", environment=self._commands.environment)

    def migrator(self) -> Process:
        """The process; it listens on the unit's migrator socket once it serves."""
        return spawn(self._commands.migrator, self._log_dir / "migrator.log", environment=self._commands.environment)

    async def until_warm(self) -> None:
        """Until `warm_parent` can do its work, however long that takes."""
        if self._warm_parents is not None:
            await self._warm_parents.until_up()

    async def warm_parent(self, control_fd: int) -> Process:
        """The process, with the descriptor open in it; it says on that when it can be asked to fork."""
        if self._warm_parents is not None:
            return await self._warm_parents.fork(self._unit_spec, control_fd)
        command = [*self._commands.warm_parent, "--control-fd", str(control_fd)]
        log = self._log_dir / "warm_parent.log"
        return spawn(command, log, (control_fd,), environment=self._commands.environment)


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
