"""What becomes of the fleet's file and of units that cannot be kept, without any process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from muxserve.cluster import unit_set
from muxserve.cluster.events import HOST, Down, Event, PartId, Progress, Ready, Up
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.unit_set import UnitSet
from muxserve.cluster.units import PlannedUnit
from muxserve.replicas.migration import MigrationRules
from muxserve.spec import UnitEntry, load_fleet
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import fake_fleet, fake_unit_spec
from tests.cluster.effects import FakeFleetEffects
from tests.support.patience import PATIENCE


class Handle:
    """A unit that does nothing but end."""

    def __init__(self, planned: PlannedUnit, address: str, migrates: bool, emit: Callable[[Event], None]) -> None:
        self.planned, self.address, self.migrates, self.emit = planned, address, migrates, emit
        self.sized, self.ready = asyncio.Event(), asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parts = [PartId("unit")]
        self.stops = 0

    @property
    def entry(self) -> UnitEntry:
        return UnitEntry(self.planned.unit_spec, self.address, "", list(self.planned.serves))

    async def wait(self) -> None:
        await asyncio.shield(self.failed)

    def fail(self, reason: str) -> None:
        self.failed.set_exception(GaveUp(PartId("unit"), reason))

    def start_migrator(self) -> None:
        self.migrates = True

    async def stop(self) -> None:
        self.stops += 1


class Launcher:
    """Has a new address for each unit that it starts, and at times no place."""

    def __init__(self) -> None:
        self.started: list[Handle] = []
        self.refusals = 0

    async def start(self, unit: PlannedUnit, migrates: bool, emit: Callable[[Event], None]) -> Handle:
        if self.refusals:
            self.refusals -= 1
            raise GaveUp(HOST, "no node has room")
        handle = Handle(unit, f"tcp://10.0.0.1:{len(self.started)}", migrates, emit)
        self.started.append(handle)
        return handle

    async def close(self) -> None:
        pass


class World:
    def __init__(self, run_dir: RunDir, count: int) -> None:
        unit_specs = [fake_unit_spec(run_dir.path, unit=f"u{k}") for k in range(count)]
        self.planned = [PlannedUnit(each, ("one", "two")) for each in unit_specs]
        self.launcher = Launcher()
        fleet = fake_fleet(unit_specs, run_dir.path, migration=MigrationRules())
        self.effects = FakeFleetEffects(fleet)
        self.units = UnitSet(fleet, self.launcher, self.effects)  # type: ignore[arg-type]

    async def serve(self) -> None:
        for planned in self.planned:
            self.units.keep(await self.units.start(planned))
        self.units.publish()
        for handle in self.launcher.started:
            handle.ready.set()
        self.units.served = True

    @property
    def addresses(self) -> dict[str, str]:
        return {unit.name: unit.unit_address for unit in load_fleet(self.units.fleet.file).units}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.001)


@pytest.fixture
def pair(run_dir: RunDir) -> World:
    return World(run_dir, 2)


async def test_the_file_is_written_when_something_is_different(pair: World) -> None:
    await pair.serve()
    assert pair.effects.changes == 1
    assert pair.addresses == {"u0": "tcp://10.0.0.1:0", "u1": "tcp://10.0.0.1:1"}
    pair.units.publish()
    assert pair.effects.changes == 1
    pair.units.units["u1"].serves.discard("one")
    pair.units.publish()
    assert pair.effects.changes == 2
    read = load_fleet(pair.units.fleet.file)
    assert read == pair.units.fleet
    assert [unit.serves for unit in read.units] == [["one", "two"], ["two"]]
    assert read.generation == 2
    await pair.units.stop()


async def test_a_file_that_cannot_be_written_is_written_when_it_can(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_set, "_PUBLISH_SECONDS", 0.001)
    await pair.serve()
    instead = pair.units.fleet.file.with_suffix(".new")
    instead.mkdir()  # as good as a full disk
    for model in ("one", "two"):
        pair.units.units["u1"].serves.discard(model)
        pair.units.publish()
    await asyncio.sleep(0.01)
    assert (pair.effects.changes, pair.addresses) == (1, {"u0": "tcp://10.0.0.1:0", "u1": "tcp://10.0.0.1:1"})
    assert load_fleet(pair.units.fleet.file).generation == 1
    instead.rmdir()
    await pair.until(lambda: pair.effects.changes == 2)
    assert [unit.serves for unit in load_fleet(pair.units.fleet.file).units] == [["one", "two"], []]
    # Nobody tries any more; the next change is written at once.
    await asyncio.sleep(0.01)
    assert pair.effects.changes == 2
    pair.units.units["u1"].serves.add("one")
    pair.units.publish()
    assert pair.effects.changes == 3
    await pair.units.stop()


async def test_a_unit_that_moved_is_found_again(pair: World) -> None:
    await pair.serve()
    moved = pair.launcher.started[1]
    moved.address = "tcp://10.0.0.2:7"
    moved.emit(Up(HOST, 0, 0.0))
    assert pair.addresses["u1"] == "tcp://10.0.0.2:7"
    await pair.units.stop()


async def test_a_unit_that_fails_is_started_again_elsewhere_when_there_is_room(pair: World) -> None:
    await pair.serve()
    first = pair.launcher.started[1]
    pair.units.units["u1"].serves.discard("one")
    pair.launcher.refusals = 3
    first.fail("it has had enough")
    await pair.until(lambda: len(pair.launcher.started) == 3)
    downs = [event.reason for event in pair.effects.events if isinstance(event, Down)]
    assert downs == ["unit scheduler: it has had enough", *["no node has room"] * 3]
    assert first.stops == 1
    assert pair.launcher.started[2].planned.serves == ("two",)
    await pair.until(lambda: pair.addresses["u1"] == "tcp://10.0.0.1:2")
    assert not pair.effects.failures
    await pair.units.stop()


async def test_a_unit_that_fails_before_the_fleet_has_served_ends_it(pair: World) -> None:
    await pair.serve()
    pair.units.served = False
    pair.launcher.started[1].fail("it has had enough")
    await pair.until(lambda: bool(pair.effects.failures))
    (failure,) = pair.effects.failures
    assert isinstance(failure, GaveUp)
    assert failure.part == PartId("unit", unit="u1")
    await pair.units.stop()


async def test_the_last_one_that_serves_is_started_again_like_any(pair: World) -> None:
    await pair.serve()
    pair.launcher.started[0].ready.clear()
    pair.launcher.started[1].fail("it has had enough")
    await pair.until(lambda: len(pair.launcher.started) == 3)
    assert not pair.effects.failures
    await pair.units.stop()


async def test_an_only_unit_has_no_name_and_no_migrator(run_dir: RunDir) -> None:
    world = World(run_dir, 1)
    await world.serve()
    (handle,) = world.launcher.started
    handle.emit(Progress(PartId("unit"), "x"))
    handle.emit(Ready(1.0))
    assert world.effects.events == [Progress(PartId("unit"), "x")]
    assert not handle.migrates
    assert world.units.next_name() == "u1"
    # Until there is another one.
    unit_spec = msgspec.structs.replace(world.planned[0].unit_spec, unit="u1")
    await world.units.start(PlannedUnit(unit_spec, ("one",)), announced=False)
    assert handle.migrates
    assert world.launcher.started[1].migrates
    handle.emit(Ready(1.0))
    assert world.effects.events[-1] == Progress(PartId("host", unit="u0"), "up after 1.0 s")
    assert world.addresses == {"u0": "tcp://10.0.0.1:0"}
    assert world.units.next_name() == "u2"
    await world.units.stop()


async def test_no_place_at_the_start_names_the_unit(pair: World) -> None:
    pair.launcher.refusals = 1
    with pytest.raises(GaveUp, match="no node has room") as caught:
        await pair.units.start(pair.planned[1])
    assert str(caught.value.part) == "unit u1"
