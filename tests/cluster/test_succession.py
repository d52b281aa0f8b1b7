"""A fleet takes over from another one, one group of units after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.cluster.controller import EXIT_START
from muxserve.cluster.events import Failed, PartId, Up
from muxserve.cluster.steps import UnitPlanner
from muxserve.cluster.succession import groups
from muxserve.cluster.units import PlannedUnit
from muxserve.config import parse_fleet
from muxserve.control.changes import ChangeError, Tell
from muxserve.control.previous import PreviousFleet
from muxserve.spec import FleetSpec, OtherFleet, load_fleet
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import Fleet, fake_fleet, fake_unit_spec, running
from tests.cluster.test_several_units import FakePlanner

HERE = Path("here")
NAMES = ["a", "b", "c", "d"]


def planned(units: Sequence[Sequence[str]], run_dir: Path = HERE) -> list[PlannedUnit]:
    return [
        PlannedUnit(fake_unit_spec(run_dir, unit=f"u{n}", names=[*names]), tuple(names))
        for n, names in enumerate(units)
    ]


def before(units: Sequence[Sequence[str]], run_dir: Path = HERE) -> FleetSpec:
    return fake_fleet([each.unit_spec for each in planned(units, run_dir)], run_dir)


def order(new: Sequence[Sequence[str]], old: Sequence[Sequence[str]]) -> list[tuple[list[str], list[str]]]:
    """The units of each group, and the models that it waits for."""
    return [([unit.name for unit in each.start], sorted(each.names)) for each in groups(planned(new), before(old))]


def test_units_that_are_alike_change_one_after_the_other() -> None:
    assert order([["a"], ["b"]], [["b"], ["a"]]) == [(["u0"], ["a"]), (["u1"], ["b"])]


def test_a_unit_with_several_models_is_waited_for_as_a_whole() -> None:
    assert order([["a"], ["b"], ["c"]], [["a", "b"], ["c"]]) == [(["u0", "u1"], ["a", "b"]), (["u2"], ["c"])]
    assert order([["a", "b"], ["c"]], [["a"], ["b"], ["c"]]) == [(["u0"], ["a", "b"]), (["u1"], ["c"])]


def test_models_that_are_new_come_with_the_last_group_and_models_that_go_are_waited_for_by_nobody() -> None:
    assert order([["d"], ["a"], ["b"]], [["a"], ["b"], ["c"]]) == [(["u1"], ["a"]), (["u2", "u0"], ["b"])]
    assert order([["d"]], [["a"]]) == [(["u0"], [])]


divisions = st.permutations(NAMES).flatmap(
    lambda names: st.lists(st.integers(0, 2), min_size=len(names), max_size=len(names)).map(
        lambda places: [part for n in range(3) if (part := [m for m, at in zip(names, places, strict=True) if at == n])]
    )
)


@given(divisions, divisions, st.sets(st.sampled_from(NAMES), max_size=3))
def test_every_unit_starts_once_and_never_before_its_models_have_left(
    new: list[list[str]], old: list[list[str]], gone: set[str]
) -> None:
    old = [kept for each in old if (kept := [name for name in each if name not in gone])]
    steps = groups(planned(new), before(old))
    assert sorted(unit.name for step in steps for unit in step.start) == [f"u{n}" for n in range(len(new))]
    left = {name for each in old for name in each}
    for step in steps:
        assert step.start
        assert step.names <= left
        left -= step.names
        for unit in step.start:
            assert not left & {model.name for model in unit.unit_spec.models}
    assert not left


class FakePrevious:
    """A fleet with models `one` and `two` in units of their own, which notes what it is asked for."""

    def __init__(self, directory: Path, fleet: Fleet) -> None:
        self.spec = before([["one"], ["two"]], directory)
        self.asked: list[tuple[str, list[str], list[str]]] = []
        self.refusal = ""
        self._fleet = fleet

    def lend(self, models: Sequence[str], sockets: Sequence[str], tell: Tell) -> None:
        if self.refusal:
            raise ChangeError(self.refusal)
        self._note("lend", models)
        assert sockets == load_fleet(self._fleet.controller.fleet.file).gateway_sockets

    def end(self, tell: Tell) -> None:
        self._note("end", [])

    def _note(self, what: str, models: Sequence[str]) -> None:
        """With what gateways pass on at that moment, and which units are up."""
        other = load_fleet(self._fleet.controller.fleet.file).other_fleet
        up = sorted(name for name, unit in self._fleet.controller.units.units.items() if unit.handle.ready.is_set())
        self.asked.append((what, [*models], [*(other.names or () if other else ()), *up]))


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Fleet]:
    run_dir = RunDir(tmp_path)
    units = [fake_unit_spec(run_dir.path, unit=f"u{n}", names=[name]) for n, name in enumerate(("one", "two"))]
    async for fleet in running(Fleet(run_dir, units)):
        yield fleet


async def test_one_unit_starts_after_the_other_and_gateways_pass_on_what_is_not_here_yet(
    pair: Fleet, tmp_path: Path
) -> None:
    previous = FakePrevious(tmp_path / "old", pair)
    pair.task = asyncio.create_task(pair.controller.run(cast(PreviousFleet, previous)))
    await pair.until(pair.controller.ready.is_set)
    assert previous.asked == [("lend", ["one"], ["two"]), ("end", [], ["u0"])]
    assert load_fleet(pair.controller.fleet.file).other_fleet is None
    ups = [event.part for event in pair.events if isinstance(event, Up)]
    assert (
        ups.index(PartId("gateway")) < ups.index(PartId("memory", unit="u0")) < ups.index(PartId("memory", unit="u1"))
    )
    await pair.stops()


async def test_a_fleet_before_that_does_not_make_room_ends_the_start(pair: Fleet, tmp_path: Path) -> None:
    previous = FakePrevious(tmp_path / "old", pair)
    previous.refusal = "somebody drains a unit"
    assert await pair.controller.run(cast(PreviousFleet, previous)) == EXIT_START
    assert pair.failed == Failed(
        PartId("host", unit="u0"), "unit u0 cannot start: somebody drains a unit", pair.failed.log, pair.failed.tail
    )


async def test_what_is_lent_is_asked_for_elsewhere_and_may_come_back(tmp_path: Path) -> None:
    """The unit that has nothing left ends, and is a new one afterwards."""
    run_dir = RunDir(tmp_path)
    units = [fake_unit_spec(run_dir.path, unit=f"u{n}", names=[name]) for n, name in enumerate(("one", "two"))]
    fleet = Fleet(run_dir, units, cast(UnitPlanner, FakePlanner(run_dir)))
    async for each in running(fleet):
        await each.serving()
        declared = "models: [{name: one, hub: org/one}, {name: two, hub: org/two}]"
        each.changes._models.follow(parse_fleet(declared, "fleet.yaml", Path("/")))
        await each.changes.lend(["one"], ["/there.sock"], print)
        spec = load_fleet(each.controller.fleet.file)
        assert spec.other_fleet == OtherFleet(("/there.sock",))
        assert spec.served_names == ["two"]
        assert each.serves == {"u1": ["two"]}
        await each.changes.take_back(print)
        spec = load_fleet(each.controller.fleet.file)
        assert spec.other_fleet is None
        assert sorted(spec.served_names) == ["one", "two"]
        assert each.serves == {"u1": ["two"], "u2": ["one"]}
