"""The units of a fleet: started, kept, written down for all who read the fleet's file."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

import msgspec

from muxserve import wire
from muxserve.cluster.effects import FleetEffects
from muxserve.cluster.events import Down, Event, PartId, Progress, Ready, Up, of_unit
from muxserve.cluster.health import Health
from muxserve.cluster.log_tail import Said
from muxserve.cluster.restarts import RestartPolicy
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit, UnitHandle, UnitLauncher, served
from muxserve.spec import FleetSpec, UnitEntry, offered, save_fleet

# A unit that could not be kept alive: its processes have been started again several times already.
_RESTARTS = (1.0, 5.0, 15.0, 60.0)
# Between two tries to write the fleet's file.
_PUBLISH_SECONDS = 0.5

log = logging.getLogger(__name__)


@dataclass
class RunningUnit:
    """One of the units. `serves`: the models that have engines in it, as far as anybody is told. A unit that is not yet
    (or no longer) `announced` is not in the fleet's file."""

    planned: PlannedUnit
    handle: UnitHandle
    serves: set[str]
    announced: bool = True
    keeper: asyncio.Task[None] | None = None
    # Set when the fleet goes on without it, which could not be started with the others.
    left_out: asyncio.Event = field(default_factory=asyncio.Event)
    policy: RestartPolicy = field(
        default_factory=lambda: RestartPolicy(max_deaths=None, delays=_RESTARTS, start_delays=_RESTARTS)
    )

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.planned.name

    @property
    def entry(self) -> UnitEntry:
        """The unit as the fleet's file has it."""
        return served(self.handle.entry, self.serves)


class UnitSet:
    """Units by name, and the fleet that they make.

    Args:
        fleet: as it is to be at first; its units are started by `start`.
        effects: hears what happens in units, with their names where there are several.
    """

    def __init__(self, fleet: FleetSpec, launcher: UnitLauncher, effects: FleetEffects) -> None:
        self.fleet = fleet
        self.units: dict[str, RunningUnit] = {}
        # Whether everything has been up once: from then on a unit may be missing for a while.
        self.served = False
        self._launcher = launcher
        self._effects = effects
        self._several = len(fleet.units) > 1
        # Units that are to be started: gateways know of them, and requests wait for them.
        self._to_come = {unit.name: unit for unit in fleet.units}
        self._written: FleetSpec | None = None
        # The file could not be written, and somebody tries it again.
        self._unwritten = False
        self._later: asyncio.Task[None] | None = None
        self._health = Health()
        self._named = 1 + max((_number(unit.name) for unit in fleet.units), default=-1)

    # ------------------------------------------------------------ what there is

    def parts(self) -> list[PartId]:
        """The processes of all units."""
        return [part.within(self._label(name)) for name, unit in self.units.items() for part in unit.handle.parts]

    def log_tail_of(self, part: PartId) -> Said:
        """What a part of a unit wrote last."""
        unit = self.units.get(part.unit) if part.unit else next(iter(self.units.values()), None)
        return unit.handle.log_tail_of(part.within("")) if unit is not None else (None, ())

    @property
    def ready(self) -> bool:
        """Whether all have been up."""
        return all(unit.handle.ready.is_set() for unit in self.units.values())

    async def until_sized(self) -> None:
        """Until the file has the pools of all units that are there at first as large as they will be."""
        if not self.served:
            for unit in list(self.units.values()):
                await _first_of(unit.handle.sized, unit.left_out)
            # Pools that were measured may hold shorter sequences than those that were planned.
            entries = [*(unit.handle.entry for unit in self.units.values()), *self._to_come.values()]
            sized = (entry.unit_spec.models for entry in entries)
            self.change(models=offered(sized, [model.name for model in self.fleet.models]))
        self.publish()

    async def until_ready(self, unit: RunningUnit) -> None:
        """Until the unit has been up, or is left out."""
        await _first_of(unit.handle.ready, unit.left_out)

    async def tell(self, message: wire.AnyMessage) -> None:
        """Tell the unit schedulers that are up."""
        for unit in list(self.units.values()):
            await unit.handle.tell(message)

    # ------------------------------------------------------------ coming and going

    def next_name(self) -> str:
        """A name that no unit of this fleet has had."""
        self._named += 1
        return f"u{self._named - 1}"

    async def start(self, planned: PlannedUnit, announced: bool = True) -> RunningUnit:
        """Begin to start a unit; if `announced`, it is in the file when `publish` is called next.

        Raises:
            GaveUp: there is no place for it.
        """
        name = planned.name
        self._several |= bool(self.units)
        try:
            handle = await self._start(planned)
        except GaveUp as failure:
            raise GaveUp(failure.part.within(self._label(name)), str(failure)) from None
        unit = self.units[name] = RunningUnit(planned, handle, set(planned.serves), announced)
        self._to_come.pop(name, None)
        self._ensure_migrators()
        return unit

    def announce(self, unit: RunningUnit) -> None:
        """Have it in the file when `publish` is called next."""
        unit.announced = True

    def keep(self, unit: RunningUnit) -> None:
        """Start it again when it cannot be kept alive, once the fleet has served."""
        unit.keeper = asyncio.create_task(self._keep(unit))
        unit.keeper.add_done_callback(self._kept)

    async def end(self, name: str) -> None:
        """Stop a unit and forget it."""
        unit = self.units[name]
        await self._release(unit)
        await unit.handle.stop()
        del self.units[name]
        self._health.forget(name)

    async def stop(self) -> None:
        """Stop all units."""
        if self._later is not None:
            self._later.cancel()
        units = list(self.units.values())
        await asyncio.gather(*(self._release(unit) for unit in units))
        await asyncio.gather(*(unit.handle.stop() for unit in units))
        await self._launcher.close()

    def kill(self) -> None:
        """End all units at once; `stop` is still called."""
        for unit in self.units.values():
            unit.handle.kill()

    def change(self, **changes: object) -> None:
        """Change what the fleet's file says besides the units; written when `publish` is called next."""
        self.fleet = msgspec.structs.replace(self.fleet, **changes)
        self._ensure_migrators()

    def publish(self) -> None:
        """Write the fleet's file if anything is not as it says, and have it read. While it cannot be written, as on a
        full disk, what happens goes on, and writing it is tried again and again."""
        entries = [unit.entry for unit in self.units.values() if unit.announced] + [*self._to_come.values()]
        health = {"suspects": self._health.suspects, "hangs": self._health.hangs}
        changed = msgspec.structs.replace(self.fleet, units=entries, **health)
        if self._written is None or msgspec.json.encode(changed) != msgspec.json.encode(self._written):
            self.fleet = msgspec.structs.replace(changed, generation=self.fleet.generation + 1)
            try:
                save_fleet(self.fleet)
            except OSError as error:
                self._publish_later(error)
                return
            self._written, self._unwritten = self.fleet, False
            self._effects.fleet_changed()

    def _publish_later(self, error: OSError) -> None:
        self._unwritten = True
        if self._later is None or self._later.done():
            log.warning("cannot write %s, which is tried until it can: %s", self.fleet.file, error.strerror)
            self._later = asyncio.create_task(self._until_published())

    async def _until_published(self) -> None:
        while self._unwritten:
            await asyncio.sleep(_PUBLISH_SECONDS)
            self.publish()

    def note(self, event: Event, unit: str = "") -> None:
        """Have the file say who is suspected, and who hung. `unit`: whose event it is, empty for the fleet's own
        processes."""
        serves = self.units[unit].serves if unit in self.units else ()
        if self._health.note(event, unit, serves) and self.served:
            self.publish()

    # ------------------------------------------------------------ keeping

    async def _keep(self, unit: RunningUnit) -> None:
        name = unit.planned.name
        while True:
            try:
                await unit.handle.wait()
            except GaveUp as gave_up:
                failure = gave_up
            reason = GaveUp(failure.part.within(self._label(name)), str(failure))
            if not self.served and not self._spared(unit, failure):
                raise reason
            await self._start_again(unit, f"{reason.part.within('')}: {reason}")

    def _spared(self, unit: RunningUnit, failure: GaveUp) -> bool:
        """Whether the fleet starts without a unit whose models cannot be started: others may be served, unless another
        fleet still serves them all."""
        if self.fleet.takes_over:
            return False
        others = any(not other.left_out.is_set() for other in self.units.values() if other is not unit)
        if not failure.part.model or not others:
            return False
        unit.left_out.set()
        return True

    async def _start_again(self, unit: RunningUnit, reason: str) -> None:
        """Stop what is left, and start it as it was, for as long as it takes to find a place."""
        stopped, came_up = False, unit.handle.ready.is_set()
        # Nothing is started in it before it is there again.
        unit.handle.ready.clear()
        while True:
            delay = unit.policy.died(time.monotonic(), came_up)
            assert delay is not None, "the policy never gives up"
            self._effects.emit(Down(PartId("host", unit=unit.name), reason, delay))
            if not stopped:
                await unit.handle.stop()
                self._health.forget(unit.name)
                stopped = True
            await asyncio.sleep(delay)
            try:
                unit.handle = await self._start(replace(unit.planned, serves=tuple(unit.serves)))
            except GaveUp as failure:
                reason, came_up = str(failure), False
                continue
            self.publish()
            return

    def _kept(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._effects.failed(task.exception() or RuntimeError("a unit is not kept alive any more"))

    async def _release(self, unit: RunningUnit) -> None:
        if unit.keeper is not None:
            unit.keeper.cancel()
            await asyncio.gather(unit.keeper, return_exceptions=True)

    # ------------------------------------------------------------ details

    async def _start(self, planned: PlannedUnit) -> UnitHandle:
        name = planned.name
        return await self._launcher.start(planned, self._migrates(planned), lambda event: self._of_unit(name, event))

    def _migrates(self, planned: PlannedUnit) -> bool:
        others = any(name != planned.name for name in self.units)
        return self.fleet.migration is not None and (others or self._several or bool(self.fleet.scaling))

    def _ensure_migrators(self) -> None:
        for unit in self.units.values():
            if self._migrates(unit.planned):
                unit.handle.start_migrator()

    def _label(self, name: str) -> str:
        return name if self._several else ""

    def _of_unit(self, name: str, event: Event) -> None:
        if isinstance(event, Up) and event.part.kind == "host" and name in self.units:
            self.publish()  # it may be somewhere else now
        self.note(event, name)
        if not isinstance(event, Ready):
            self._effects.emit(of_unit(event, self._label(name)))
        elif self._label(name):
            self._effects.emit(Progress(PartId("host", unit=name), f"up after {event.seconds:.1f} s"))


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _number(name: str) -> int:
    digits = name.removeprefix("u")
    return int(digits) if digits.isdecimal() else -1
