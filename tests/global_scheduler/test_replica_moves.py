"""Moves of replicas between units, on a virtual clock: what units report, and what the controller is asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.scaling import ScalingRules
from muxserve.scheduling.kv_pressure import MoveRules
from muxserve.spec import FleetSpec, PoolSpec
from muxserve.wire import DrainReplicas, MoveEnded, MoveReplica, Terminating
from tests.global_scheduler.support import CONTROLLER, World, fleet, load

UNITS = {"u0": ["a", "b"], "u1": ["c"]}
RULES = MoveRules(period=60, residence=0, retry=120)
PAGES = 1001  # of each pool


def changed(deployed: FleetSpec, unit: str, **changes: Any) -> FleetSpec:
    """The fleet with changes of one unit's spec."""
    entries = [
        msgspec.structs.replace(each, unit_spec=msgspec.structs.replace(each.unit_spec, **changes))
        if each.name == unit
        else each
        for each in deployed.units
    ]
    return msgspec.structs.replace(deployed, units=entries)


class Moving(World):
    """A fleet whose units report again and again that their models ask for so many pages."""

    def __init__(self, deployed: FleetSpec, pages: dict[str, int]) -> None:
        super().__init__(deployed)
        self.pages = pages
        self.controller()

    def serve(self, seconds: float) -> list[MoveReplica]:
        """The moves that are asked for meanwhile."""
        end = self.now + seconds
        while self.now < end:
            for unit in self.core.fleet.units:
                self.report(unit.name, *(load(name, pages=self.pages.get(name, 0)) for name in unit.serves))
            self.wait(0.5)
        return self.heard(MoveReplica, CONTROLLER)


def crowded(units: dict[str, list[str]] | None = None, **more: Any) -> Moving:
    changes = {"moves": RULES, "migration": MigrationRules(), **more}
    return Moving(fleet(units or UNITS, **changes), {"a": 500, "b": 400, "c": 50})


def test_a_replica_moves_from_the_unit_whose_pages_are_short() -> None:
    world = crowded()
    assert world.serve(59) == []
    (order,) = world.serve(3)
    assert (order.model, order.source, order.destination) == ("b", "u0", "u1")
    assert order.reason == "90% of the pages there are asked for, and then 45% in u1"
    state = world.state()["moves"]
    assert state["pressures"] == {
        "u0": {"main": pytest.approx(0.899, abs=0.01)},
        "u1": {"main": pytest.approx(0.05, abs=0.01)},
    }
    assert state["moving"]["model"] == "b"
    # Not asked for again, however long it takes.
    assert world.serve(300) == []
    world.change(msgspec.structs.replace(fleet({"u0": ["a"], "u1": ["b", "c"]}, moves=RULES), generation=1))
    world.say(CONTROLLER, MoveEnded("b", "u0", "u1"))
    assert world.serve(300) == []
    state = world.state()["moves"]
    assert (state["moved"], state["failed"], state["moving"]) == (1, 0, None)
    assert state["last"]["error"] is None
    assert state["last"]["reason"] == order.reason


def test_a_move_that_fails_is_asked_for_again_later() -> None:
    world = crowded()
    (order,) = world.serve(62)
    world.say(CONTROLLER, MoveEnded("b", "u0", "u1", "no room"))
    state = world.state()["moves"]
    assert (state["moved"], state["failed"], state["last"]["error"]) == (0, 1, "no room")
    # Until then another one is better than none.
    (other,) = world.serve(60)
    assert (other.model, other.destination) == ("a", "u1")
    world.say(CONTROLLER, MoveEnded("a", "u0", "u1", "no room"))
    assert world.serve(50) == []
    (again,) = world.serve(70)
    assert again == order


def test_a_short_burst_moves_nothing() -> None:
    world = crowded()
    world.pages = {"a": 200, "b": 100}
    assert world.serve(56) == []
    world.pages = {"a": 500, "b": 400}
    assert world.serve(6) == []
    world.pages = {"a": 200, "b": 100}
    assert world.serve(120) == []


@pytest.mark.parametrize(
    "deployed",
    [
        fleet(UNITS),
        fleet({"u0": ["a", "b", "c"]}, moves=RULES),
        fleet({"u0": ["a"], "u1": ["c"], "u2": ["b"]}, moves=RULES),
        fleet({"u0": ["a", "b"], "u1": ["a", "b", "c"]}, moves=RULES),
        fleet(UNITS, moves=RULES, scaling={"a": ScalingRules(1, 2), "b": ScalingRules(1, 2)}),
        changed(fleet(UNITS, moves=RULES), "u1", pools=[PoolSpec("main", 65536, PAGES)]),
        changed(fleet(UNITS, moves=RULES), "u1", ranks=2),
    ],
    ids=["switched off", "one unit", "alone in units", "served there", "scaled", "other pages", "other ranks"],
)
def test_nothing_moves(deployed: FleetSpec) -> None:
    world = Moving(deployed, {"a": 600, "b": 350, "c": 0})
    assert world.serve(200) == []


def test_what_is_being_drained_does_not_move_nor_does_anything_to_a_unit_that_is_not_heard() -> None:
    world = crowded()
    world.say(CONTROLLER, DrainReplicas("u0", ["b"]))
    assert world.serve(70) == []
    world = crowded()
    world.core.unit_gone("u1", world.now)
    for _ in range(140):
        world.report("u0", load("a", pages=500), load("b", pages=400))
        world.wait(0.5)
    assert world.heard(MoveReplica) == []


def test_a_new_global_scheduler_looks_after_a_period_and_takes_the_end_of_a_move_that_it_did_not_ask_for() -> None:
    world = crowded()
    world.say(CONTROLLER, MoveEnded("b", "u0", "u1"))
    assert world.serve(59) == []
    assert len(world.serve(3)) == 1
    assert world.state()["moves"]["moved"] == 1


def test_a_drain_waits_for_the_file_that_it_is_about() -> None:
    """The controller has written who takes over; a global scheduler that does not know yet would refuse who waits."""
    units = {"u0": ["m", "a"], "u1": ["a"]}
    world = World(fleet(units))
    world.report("u0", load(), load("a"))
    world.report("u1", load("a"))
    world.say(CONTROLLER, DrainReplicas("u0", ["m"], generation=1))
    assert world.heard(Terminating) == []
    world.change(msgspec.structs.replace(fleet({**units, "u1": ["a", "m"]}), generation=1))
    assert world.heard(Terminating) == [Terminating("m", True)]
