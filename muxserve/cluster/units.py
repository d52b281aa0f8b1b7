"""Units as the controller sees them, wherever they run, and the units of its own machine.

A `UnitLauncher` starts units and answers a `UnitHandle` for each. `LocalUnits` runs a `UnitHost` in the controller's
own event loop. Another launcher may start `python -m muxserve.cluster.unit_host` on another machine and speak to that;
what it has to do is what these protocols say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from muxserve import wire
from muxserve.cluster.events import HOST, Event, PartId
from muxserve.cluster.host import MemoryParents, UnitHost
from muxserve.cluster.launcher import Commands, Launcher, WarmParents
from muxserve.cluster.log_tail import Said
from muxserve.cluster.processes import Reaper
from muxserve.cluster.supervision import GaveUp
from muxserve.gpu.budget import Needs
from muxserve.gpu.unit import GpuMemory, GpuPlan, PoolSizer
from muxserve.rolling.rules import RollingRules
from muxserve.spec import UNIT_FILE, UnitEntry, UnitSpec, save
from muxserve.spec.run_dir import make_log_dir


@dataclass(frozen=True)
class PlannedUnit:
    """A unit that fits its machine. `serves`: the models of the unit that have engines from the beginning.
    `gpu`: on GPUs, what its host plans the pools from when the models have been measured. `rolling`: the rules of its
    only model, if prefill rolls over that one's replicas."""

    unit_spec: UnitSpec
    serves: tuple[str, ...]
    gpu: GpuPlan | None = None
    rolling: RollingRules | None = None

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.unit_spec.unit


class UnitHandle(Protocol):
    """A unit that has been started."""

    # Set when the sizes of the pools are known, and when everything has been up once.
    sized: asyncio.Event
    ready: asyncio.Event

    @property
    def entry(self) -> UnitEntry:
        """The unit as the fleet knows it, as it is now: on GPUs pools have their size only when `sized`; the addresses
        are those under which the other processes reach it; `serves` are the models that have engines."""

    @property
    def parts(self) -> Collection[PartId]:
        """Its processes, under names that other units have as well."""

    def up(self, model: str) -> bool:
        """Whether its unit scheduler and the engines of `model` are up now."""

    def memory_parents(self) -> MemoryParents:
        """The processes of this machine by which its memory is told apart; none of units elsewhere."""

    def gpu_memory(self) -> GpuMemory | None:
        """What is taken of its GPUs; None of units on a CPU, and of units elsewhere."""

    async def wait(self) -> None:
        """Until the unit has ended or cannot be kept alive; it is then stopped and perhaps started again.

        Raises:
            GaveUp: always, when it returns at all; the reason is in words.
        """

    async def tell(self, message: wire.AnyMessage) -> None:
        """Tell its unit scheduler, if that is up."""

    async def state(self) -> dict[str, object]:
        """What `StateReply` says; waits for a unit scheduler that answers."""

    async def start_model(self, model: str) -> None:
        """Start the engines of a model that it declares; returns when they are up.

        Raises:
            GaveUp: they cannot start. Nothing of it is left then.
        """

    async def join(self, unit_spec: UnitSpec, model: str, needs: Sequence[Needs] = (), asleep: bool = False) -> None:
        """The unit is as `unit_spec` has it from now on: of models with the same pools, among them `model`, which
        `start_model` starts. `needs`: what it is thought to take of each GPU of the unit. `asleep`: memory decides when
        it is started, so that it needs no room now.

        Raises:
            GaveUp: it takes no model more; nothing has changed.
        """

    async def stop_model(self, model: str) -> None:
        """Stop the engines of a model and let go of its weights; what they still compute is lost to this unit.

        Raises:
            GaveUp: nobody knows whether they have ended.
        """

    async def forget(self, model: str) -> None:
        """A model that sleeps is served no longer: let go of all that is kept for its next wake."""

    def start_migrator(self) -> None:
        """Have a migrator from now on, if there is none."""

    def log_tail_of(self, part: PartId) -> Said:
        """The log of a part that says something, and its last lines."""

    def kill(self) -> None:
        """End its processes at once; `stop` is still called."""

    async def stop(self) -> None:
        """End everything, in order."""


class UnitLauncher(Protocol):
    """Starts units."""

    async def start(self, unit: PlannedUnit, migrates: bool, emit: Callable[[Event], None]) -> UnitHandle:
        """Begin to start a unit; does not wait for it to be up. `migrates`: with a migrator.

        Raises:
            GaveUp: there is no place for it.
        """

    async def close(self) -> None:
        """All units have been stopped, and no more are started."""


class LocalUnits:
    """Units of this machine, in this process's event loop.

    Args:
        commands: command lines of a unit's processes, made of its spec and the file that has it.
        warm_parents: what forks their warm parents; None: each imports vLLM itself.
        reaper: collects what dead parents leave behind.
    """

    def __init__(
        self,
        commands: Callable[[UnitSpec, Path], Commands],
        warm_parents: WarmParents | None,
        reaper: Reaper,
    ) -> None:
        self._commands = commands
        self._warm_parents = warm_parents
        self._reaper = reaper

    async def start(self, unit: PlannedUnit, migrates: bool, emit: Callable[[Event], None]) -> UnitHost:
        """See `UnitLauncher.start`."""
        unit_spec = unit.unit_spec
        try:
            file = write_unit_spec(unit_spec)
        except OSError as error:
            raise GaveUp(HOST, f"cannot write to {unit_spec.run_dir}: {error.strerror}") from None
        launcher = Launcher(unit_spec, self._commands(unit_spec, file), self._warm_parents)
        sizer = None if unit.gpu is None else PoolSizer(unit.gpu, unit_spec, file)
        host = UnitHost(unit_spec, unit.serves, launcher, emit, self._reaper, sizer, migrates)
        host.start()
        return host

    async def close(self) -> None:
        """See `UnitLauncher.close`."""


def write_unit_spec(unit_spec: UnitSpec) -> Path:
    """Make the unit's directory and write the unit's spec where its processes read it; returns the file."""
    directory = Path(unit_spec.run_dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_log_dir(directory)
    file = directory / UNIT_FILE
    save(unit_spec, file)
    return file


def served(entry: UnitEntry, models: Collection[str]) -> UnitEntry:
    """The entry with other models served."""
    return msgspec.structs.replace(entry, serves=[m.name for m in entry.unit_spec.models if m.name in models])
