"""The global scheduler on a virtual clock: where requests go, who is told what, and what a death changes."""

from __future__ import annotations

import msgspec
import pytest

from muxserve.gateway.routing.prefix_keys import prefix_keys
from muxserve.global_scheduler.outbox import ToUnit
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.prefixes import KEY_BYTES, KEY_TOKENS
from muxserve.replicas.priorities import Level, PriorityError
from muxserve.replicas.scaling import ScalingRules
from muxserve.spec import Suspect
from muxserve.wire import (
    DrainReplicas,
    Loads,
    NotPlaced,
    Paired,
    Placed,
    SchedulerHello,
    StartFailed,
    StartReplicas,
    StateReply,
    StateRequest,
    StopReplica,
    Terminating,
    Unpaired,
    Unplace,
)
from tests.global_scheduler.support import CAPACITY, CONTROLLER, G0, G1, World, fleet, load, place

TWO = {"u0": ["m"], "u1": ["m"]}
ZERO = ScalingRules(minimum=0, maximum=2, hold=10, idle_seconds=60, wake_limit=30)


def two(**changes: object) -> World:
    world = World(fleet(TWO, **changes))
    for unit in TWO:
        world.report(unit, load())
    return world


# ---------------------------------------------------------------- placing


def test_requests_go_to_the_freest_replica() -> None:
    world = two()
    world.report("u0", load(used=9_000, running=5))
    assert [world.placed(str(number)) for number in range(3)] == ["u1"] * 3


@pytest.mark.parametrize(("dispatch", "again"), [("prefix", "u1"), ("freest", "u0")])
def test_a_conversation_returns_to_its_replica(dispatch: str, again: str) -> None:
    world, keys = two(dispatch=dispatch), prefix_keys(list(range(8 * KEY_TOKENS)))
    world.report("u0", load(used=5_000, running=5))
    assert world.placed("0", demand=500, prefix=keys[: 6 * KEY_BYTES]) == "u1"
    world.report("u0", load())
    world.report("u1", load(used=1_000, running=1), came=["0"])
    # Another gateway's request may be of the same conversation.
    world.say(G1, place("1", demand=600, prefix=keys))
    assert world.heard(Placed, G1) == [Placed("1", again)]
    # A fleet that is changed elsewhere forgets nothing.
    world.change(fleet({**TWO, "u2": ["other"]}, dispatch=dispatch))
    world.report("u0", load())
    world.report("u1", load(used=1_000, running=1), came=["1"])
    assert world.placed("2", demand=600, prefix=keys) == again


def test_each_gateway_gets_its_own_answer_although_ids_are_equal() -> None:
    world = World(fleet(TWO))
    world.say(G0, place("r"))
    world.say(G1, place("r"))
    world.say(G0, Unplace(["r"]))
    assert world.heard(Placed) == []
    world.report("u0", load())
    assert [peer for peer, message in world.sent if isinstance(message, Placed)] == [G1]


def test_a_burst_is_spread_although_reports_that_do_not_know_of_it_come_in_between() -> None:
    world = two()
    for number in range(20):
        world.say(G0, place(str(number), demand=500))
        world.now += 0.0005
        # Both units still say that they have nothing to do.
        world.report("u0", load())
        world.report("u1", load())
    placed = [message.unit for message in world.heard(Placed)]
    assert placed.count("u0") == placed.count("u1") == 10
    # A report that names all of them is believed.
    everyone = [str(number) for number in range(20)]
    world.report("u0", load(), came=everyone)
    world.report("u1", load(used=9_000, running=1), came=everyone)
    assert [world.placed(f"x{number}", demand=10) for number in range(3)] == ["u0"] * 3


def test_what_is_long_on_its_way_to_a_unit_counts_until_the_unit_names_it() -> None:
    world = two()
    for number in range(8):
        world.say(G0, place(str(number), demand=500))
        world.wait(0.1)
        world.report("u0", load())
        world.report("u1", load())
    placed = [message.unit for message in world.heard(Placed)]
    assert placed.count("u0") == placed.count("u1") == 4


def test_what_a_unit_names_is_not_counted_twice() -> None:
    world = two()
    unit = world.placed("r", demand=4_000) or ""
    other = {"u0": "u1", "u1": "u0"}[unit]
    # Its prompt of 4,000 tokens is there at once; counted beside it again it would be the fuller one.
    world.report(unit, load(used=4_000, running=1), came=["r"])
    world.report(other, load(used=6_000, running=1))
    assert world.placed("s", demand=10) == unit


def test_what_never_comes_to_a_unit_is_forgotten() -> None:
    world = two()
    unit = world.placed("r", demand=9_000) or ""
    other = {"u0": "u1", "u1": "u0"}[unit]
    world.wait(1.1)
    world.report(unit, load())
    world.report(other, load(used=5_000, running=1))
    assert world.placed("s", demand=10) == unit


def test_requests_wait_for_the_first_replica_by_priority() -> None:
    world = World(fleet(TWO))
    world.say(G0, place("slow", arrival=1))
    world.say(G0, place("fast", arrival=2, scheduling="high"))
    world.say(G0, place("gone", arrival=0))
    world.say(G0, Unplace(["gone"]))
    assert world.heard(Placed) == []
    world.report("u1", load())
    assert world.heard(Placed) == [Placed("fast", "u1"), Placed("slow", "u1")]


def test_what_no_replica_can_hold_is_refused_for_good() -> None:
    world = two()
    world.say(G0, place("r", demand=CAPACITY + 1))
    (refused,) = world.heard(NotPlaced)
    assert not refused.late
    assert refused.request_id == "r"
    assert "shorten the prompt" in refused.message


def test_while_a_replica_is_awaited_nothing_is_refused_for_its_size() -> None:
    world = World(fleet(TWO))
    world.report("u0", load())
    world.say(G0, place("r", demand=CAPACITY + 1))
    assert world.heard(NotPlaced) == []
    world.report("u1", load(capacity=2 * CAPACITY))
    assert world.heard(Placed) == [Placed("r", "u1")]


def test_an_unknown_priority_and_an_unknown_model_are_refused_in_words() -> None:
    world = two()
    world.say(G0, place("r", scheduling="hihg"))
    assert [m.message for m in world.heard(NotPlaced)] == ["there is no priority level 'hihg'; did you mean 'high'?"]
    world.say(G0, place("s", execution="hihg"))
    assert [(m.request_id, m.late) for m in world.heard(NotPlaced)] == [("s", False)]
    world.say(G0, place("t", "nobody"))
    assert world.heard(NotPlaced) == []
    world.wait(1.5)
    assert [m.message for m in world.heard(NotPlaced)] == ["there is no model 'nobody' in the fleet"]
    # None of them is still waiting somewhere.
    world.report("u0", load(), epoch="e2")
    assert world.heard(Placed) == []


def test_a_model_that_the_gateway_has_read_of_first_is_waited_for() -> None:
    world = two()
    world.say(G0, place("r", "new"))
    world.say(G0, place("cancelled", "new"))
    world.say(G0, Unplace(["cancelled"]))
    world.wait(0.5)
    world.change(fleet({**TWO, "u2": ["new"]}))
    world.report("u2", load("new"))
    assert world.heard(Placed) == [Placed("r", "u2")]
    world.wait(2)
    assert world.heard(NotPlaced) == []


def test_the_requests_of_a_gateway_that_is_gone_are_forgotten() -> None:
    world = World(fleet(TWO))
    world.say(G0, place("a"))
    world.say(G0, place("b"))
    world.say(G1, place("c"))
    world.core.returned(G0, Placed("a", "u0"))
    world.report("u0", load())
    assert world.heard(Placed) == [Placed("c", "u0")]


# ---------------------------------------------------------------- units


def test_a_unit_that_disconnects_gets_nothing_until_it_reports_again() -> None:
    world = two()
    world.core.unit_gone("u0", world.now)
    assert [world.placed(str(number)) for number in range(3)] == ["u1"] * 3
    world.report("u1", load(used=9_000, running=9))
    world.report("u0", load(), epoch="e2")
    assert world.placed("x") == "u0"


def test_a_unit_that_is_silent_is_down_and_greeted_again() -> None:
    world = two()
    for _ in range(5):
        world.wait(0.9)
        world.report("u1", load(used=9_900, running=1))
    assert world.heard(SchedulerHello, ToUnit("u0")) == [SchedulerHello("s1")]
    assert not world.state()["units"]["u0"]["up"]
    assert world.placed("r") == "u1"
    world.report("u0", load())
    assert world.placed("s") == "u0"


def test_a_replica_that_gives_no_sign_of_life_gets_nothing_until_it_gives_some_again() -> None:
    world = World(fleet({"u0": ["a", "b"], "u1": ["a", "b"]}))
    for unit in ("u0", "u1"):
        world.report(unit, load("a"), load("b"))
    known = world.core.fleet
    world.change(msgspec.structs.replace(known, suspects=(Suspect("engine a/decode", "u0", ("a",)),)))
    world.report("u0", load("a"), load("b"))  # it goes on to report
    world.report("u1", load("a", used=9_000, running=9), load("b", used=9_000, running=9))
    world.say(G0, place("r", "a"))
    world.say(G0, place("s", "b"))
    assert world.heard(Placed) == [Placed("r", "u1"), Placed("s", "u0")]
    world.change(known)
    # What it said meanwhile is asked for again.
    assert world.heard(SchedulerHello, ToUnit("u0")) == [SchedulerHello("s1")]
    world.report("u0", load("a"), load("b"))
    assert world.placed("t", "a") == "u0"


def test_a_model_that_a_unit_does_not_report_is_down_there() -> None:
    world = World(fleet({"u0": ["a", "b"], "u1": ["a", "b"]}))
    world.report("u0", load("a"), load("b"))
    world.report("u1", load("a"))
    assert world.placed("r", "b") == "u0"
    world.report("u0", load("a"))
    world.say(G0, place("s", "b"))
    assert world.heard(Placed) == []
    world.report("u1", load("a"), load("b"))
    assert world.heard(Placed) == [Placed("s", "u1")]


def test_what_another_unit_says_at_an_address_is_not_believed() -> None:
    world = World(fleet(TWO))
    world.say(G0, place("r"))
    world.say(ToUnit("u0"), Loads("u7", "e1", [load()]))
    world.say(ToUnit("u9"), Loads("u9", "e1", [load()]))
    assert world.heard(Placed) == []


def test_only_replicas_that_the_fleet_file_names_count() -> None:
    """Engines that are being stopped still report for a moment."""
    world = two()
    world.change(fleet({"u0": ["m"], "u1": []}))
    world.report("u1", load())
    world.report("u0", load(used=9_999, running=9))
    assert world.placed("r") == "u0"


def test_a_unit_that_begins_to_serve_a_model_is_asked_at_once_how_it_stands() -> None:
    world = World(fleet({"u0": ["m"], "u1": []}))
    world.report("u0", load())
    world.report("u1")
    world.heard(SchedulerHello)
    world.change(fleet(TWO))
    assert world.heard(SchedulerHello) == [SchedulerHello("s1")]


# ---------------------------------------------------------------- pairs


def pair(world: World) -> None:
    world.report("u0", load(used=CAPACITY, running=4, layout="x"))
    world.report("u1", load(used=1_000, running=1, layout="x"))


def test_every_round_tells_the_source_of_its_pair_with_the_newest_load() -> None:
    world = two(migration=MigrationRules())
    pair(world)
    world.wait(0.25)
    told = world.heard(Paired, ToUnit("u0"))
    assert len(told) in (2, 3)
    newest = load(used=1_000, running=1, layout="x")
    newest.name, newest.freeness = "u1", told[0].load.freeness
    assert told[0] == Paired("m", "u1", "ipc:///nowhere/u1/migrator.sock", newest)
    world.report("u1", load(used=2_000, running=2, layout="x"))
    world.wait(0.1)
    assert [each.load.used for each in world.heard(Paired)] == [2_000]


def test_what_was_sent_there_counts_in_the_load_that_the_source_is_told() -> None:
    world = two(migration=MigrationRules())
    pair(world)
    world.say(G0, place("r", demand=300))
    world.wait(0.1)
    (told, *_) = world.heard(Paired)
    assert (told.load.waiting, told.load.queued_demand, told.load.head_demand) == (1, 300, 300)


def test_a_pair_that_is_no_longer_one_is_taken_back() -> None:
    world = two(migration=MigrationRules())
    pair(world)
    world.wait(0.2)
    assert world.heard(Paired)
    world.report("u0", load(used=100, running=1, layout="x"))
    world.wait(0.2)
    assert [m for p, m in world.sent if p == ToUnit("u0") and isinstance(m, Unpaired)] == [Unpaired("m")]
    assert world.heard(Paired) == []


def test_a_destination_that_dies_is_no_destination() -> None:
    world = two(migration=MigrationRules())
    pair(world)
    world.wait(0.2)
    world.heard(Paired)
    world.core.unit_gone("u1", world.now)
    world.wait(0.3)
    assert [type(m) for _, m in world.sent] == [Unpaired]


def test_without_migration_or_with_different_layouts_nothing_is_paired() -> None:
    for world in (two(), two(migration=MigrationRules())):
        world.report("u0", load(used=CAPACITY, running=4, layout="x"))
        world.report("u1", load(layout="y"))
        world.wait(0.5)
        assert world.heard(Paired) == []


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        ({}, "ipc:///nowhere/u1/migrator.sock"),
        ({"u1": "10.0.0.2"}, "tcp://10.0.0.2:7002"),
        ({"u0": "10.0.0.1", "u1": "10.0.0.2"}, "tcp://10.0.0.2:7002"),
        # A Unix socket of this machine is no address for a unit of another one.
        ({"u0": "10.0.0.1"}, None),
    ],
)
def test_the_migrator_is_named_by_an_address_that_the_source_can_reach(
    hosts: dict[str, str], address: str | None
) -> None:
    world = two(migration=MigrationRules(), hosts=hosts)
    pair(world)
    world.wait(0.1)
    assert {each.address for each in world.heard(Paired)} == ({address} if address else set())


# ---------------------------------------------------------------- draining


def test_a_drained_replica_gets_nothing_more_and_is_stopped_when_it_is_empty() -> None:
    world = two(migration=MigrationRules())
    world.controller()
    world.report("u0", load(used=500, running=2))
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    assert world.heard(Terminating, ToUnit("u0")) == [Terminating("m", True)]
    world.wait(0.2)
    # Its requests go to the other one.
    assert {each.destination for each in world.heard(Paired, ToUnit("u0"))} == {"u1"}
    assert world.placed("r") == "u1"
    world.report("u0", load(terminating=True, moving_out=1))
    world.wait(0.3)
    assert world.heard(StopReplica) == []
    world.report("u0", load(terminating=True))
    world.wait(1)
    assert world.heard(StopReplica, CONTROLLER) == [StopReplica("m", "u0")]
    # While its engines are being stopped nobody waits for it to come back, and then it is gone.
    world.report("u0")
    assert world.state()["models"]["m"]["starting"] == 0
    world.change(fleet({"u0": [], "u1": ["m"]}, migration=MigrationRules()))
    # It may serve again one day.
    world.change(fleet(TWO, migration=MigrationRules()))
    world.report("u0", load())
    world.report("u1", load(used=9_000, running=9))
    assert world.placed("s") == "u0"


def test_a_replica_is_not_stopped_before_it_says_that_it_is_terminating() -> None:
    """It may be about to begin a request that was sent before."""
    world = two()
    world.controller()
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    world.wait(0.4)
    assert world.heard(StopReplica) == []
    world.report("u0", load(terminating=True))
    world.wait(0.1)
    assert world.heard(StopReplica) == [StopReplica("m", "u0")]


def test_a_unit_that_has_not_heard_that_it_is_drained_is_told_again() -> None:
    world = two()
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    world.heard(Terminating)
    world.report("u0", load())
    assert world.heard(Terminating) == []
    world.wait(0.6)
    world.report("u0", load())
    assert world.heard(Terminating) == [Terminating("m", True)]
    # Its scheduler dies and forgets it.
    world.report("u0", load(), epoch="e2")
    assert world.heard(Terminating) == [Terminating("m", True)]
    assert world.placed("r") == "u1"


def test_what_is_not_up_is_drained_already() -> None:
    world = World(fleet({"u0": ["m", "n"], "u1": ["m"]}))
    world.report("u0", load("n"))
    world.report("u1", load())
    world.controller()
    world.say(CONTROLLER, DrainReplicas("u0", ["m", "n", "nobody"]))
    assert world.heard(StopReplica) == [StopReplica("m", "u0"), StopReplica("nobody", "u0")]
    world.report("u0", load("n", terminating=True))
    world.wait(0.2)
    assert world.heard(StopReplica) == [StopReplica("n", "u0")]
    # Asked once more, it says so once more.
    world.say(CONTROLLER, DrainReplicas("u0", ["n"]))
    assert world.heard(StopReplica) == [StopReplica("n", "u0")]


def test_requests_do_not_wait_for_replicas_that_are_all_drained() -> None:
    world = two()
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    world.say(CONTROLLER, DrainReplicas("u1", ["m"]))
    world.say(G0, place("r"))
    world.wait(0.2)
    (refused,) = world.heard(NotPlaced)
    assert refused.late
    assert "no replica left" in refused.message


def test_requests_of_a_model_that_is_removed_are_refused() -> None:
    world = World(fleet({**TWO, "u2": ["n"]}))
    world.say(G0, place("r"))
    world.change(fleet({"u2": ["n"]}))
    assert [(m.request_id, m.late) for m in world.heard(NotPlaced)] == [("r", False)]


# ---------------------------------------------------------------- scaling


def asleep(**changes: object) -> World:
    """A model that may sleep, and does, in a fleet with another one."""
    return World(fleet({"u0": ["n"]}, models=["m"], scaling={"m": ZERO}, **changes))


def test_a_request_wakes_a_sleeping_model_and_waits() -> None:
    world = asleep()
    world.controller()
    world.say(G0, place("r"))
    world.say(G0, place("s"))
    assert world.heard(StartReplicas, CONTROLLER) == [StartReplicas("m", 1)]
    world.wait(5)
    # The controller has begun; the unit is not up yet.
    world.change(fleet({"u0": ["n"], "u1": ["m"]}, scaling={"m": ZERO}))
    assert world.state()["models"]["m"]["starting"] == 1
    world.wait(5)
    assert world.heard(StartReplicas) == []
    world.report("u1", load())
    assert world.heard(Placed) == [Placed("r", "u1"), Placed("s", "u1")]
    assert world.state()["models"]["m"]["starting"] == 0


def test_who_waits_for_longer_than_the_wake_limit_is_told() -> None:
    world = asleep()
    world.controller()
    world.say(G0, place("r"))
    world.wait(31)
    (late,) = world.heard(NotPlaced)
    assert late.late
    assert "wake_limit" in late.message


def test_a_start_that_failed_is_tried_again_while_somebody_waits() -> None:
    world = asleep()
    world.controller()
    world.say(G0, place("r"))
    world.heard(StartReplicas)
    world.say(CONTROLLER, StartFailed("m", "no room"))
    # Not at once, and each time later: the controller may say so within a moment.
    world.wait(1.5)
    assert world.heard(StartReplicas) == []
    world.wait(1)
    assert world.heard(StartReplicas) == [StartReplicas("m", 1)]
    world.say(CONTROLLER, StartFailed("m", "no room"))
    world.wait(3.5)
    assert world.heard(StartReplicas) == []
    world.wait(1)
    assert world.heard(StartReplicas) == [StartReplicas("m", 1)]
    world.wait(30)
    assert ["(the last start failed: no room)" in m.message for m in world.heard(NotPlaced)] == [True]
    world.say(CONTROLLER, StartFailed("m", "no room"))
    world.say(CONTROLLER, StartFailed("nobody", "no room"))
    world.wait(40)
    assert world.heard(StartReplicas) == []


def test_what_is_for_the_controller_waits_for_it() -> None:
    world = asleep()
    world.say(G0, place("r"))
    assert world.heard(StartReplicas) == []
    world.controller()
    (start,) = world.heard(StartReplicas, CONTROLLER)
    # It went away before it got the message.
    world.core.returned(CONTROLLER, start)
    world.turn()
    assert world.heard(StartReplicas) == []
    world.controller()
    assert world.heard(StartReplicas, CONTROLLER) == [start]


def test_the_last_replica_sleeps_after_a_while_without_requests() -> None:
    world = World(fleet({"u0": ["m"]}, scaling={"m": ZERO}))
    world.controller()
    for second in range(62):
        world.report("u0", load(terminating=second > 60))
        world.wait(1)
    assert world.heard(StopReplica) == [StopReplica("m", "u0")]


def test_a_restarted_global_scheduler_starts_nothing_before_the_units_have_reported() -> None:
    world = World(fleet(TWO, scaling={"m": ScalingRules(minimum=2, maximum=4)}))
    world.controller()
    world.say(G0, place("r"))
    world.wait(1)
    assert world.heard(StartReplicas) == []
    world.report("u1", load())
    assert world.heard(Placed) == [Placed("r", "u1")]


def test_a_replica_that_died_is_counted_on_until_it_has_been_away_for_long() -> None:
    world = two(scaling={"m": ScalingRules(minimum=2, maximum=4, low=-1e9, high=1e9)})
    world.controller()
    world.core.unit_gone("u0", world.now)
    for _ in range(50):
        world.wait(1)
        world.report("u1", load())
    assert world.heard(StartReplicas) == []
    for _ in range(12):
        world.wait(1)
        world.report("u1", load())
    assert world.heard(StartReplicas) == [StartReplicas("m", 1)]


def test_scale_out_and_in_by_freeness() -> None:
    rules = ScalingRules(minimum=1, maximum=2, hold=10)
    world = World(fleet({"u0": ["m"]}, scaling={"m": rules}))
    world.controller()
    for _ in range(12):
        world.report("u0", load(used=CAPACITY, running=8))
        world.wait(1)
    assert world.heard(StartReplicas) == [StartReplicas("m", 1)]
    world.change(fleet(TWO, scaling={"m": rules}))
    for _ in range(12):
        world.report("u0", load(used=100, running=2))
        world.report("u1", load(used=100, running=1))
        world.wait(1)
    assert {p for p, m in world.sent if m == Terminating("m", True)} == {ToUnit("u1")}


def test_a_draining_replica_stays_when_the_load_comes_back() -> None:
    rules = ScalingRules(minimum=1, maximum=2, hold=5)
    world = two(scaling={"m": rules})
    for _ in range(7):
        world.report("u0", load(used=100, running=2))
        world.report("u1", load(used=100, running=1))
        world.wait(1)
    assert Terminating("m", True) in world.heard(Terminating, ToUnit("u1"))
    for _ in range(7):
        world.report("u0", load(used=CAPACITY, running=20))
        world.report("u1", load(used=100, running=1, terminating=True))
        world.wait(1)
    assert world.heard(Terminating, ToUnit("u1"))[0] == Terminating("m", False)


# ---------------------------------------------------------------- the fleet file


def test_other_rules_are_taken_over_with_everything_that_is_known() -> None:
    world = two(migration=MigrationRules())
    pair(world)
    world.say(CONTROLLER, DrainReplicas("u1", ["m"]))
    world.core.unit_gone("u0", world.now)
    world.say(G0, place("r"))
    world.say(G0, place("s", scheduling="high"))
    world.heard(Paired)
    levels = (Level("normal", 0), Level("low", -1))
    world.change(fleet(TWO, levels=levels))
    (refused,) = world.heard(NotPlaced)
    assert refused.request_id == "s"
    assert "'high'" in refused.message
    world.report("u1", load(terminating=True))
    world.report("u0", load(), epoch="e2")
    assert world.heard(Placed) == [Placed("r", "u0")]
    world.report("u0", load(used=CAPACITY, running=4))
    world.wait(0.5)
    assert world.heard(Paired) == []


def test_a_change_elsewhere_disturbs_nothing() -> None:
    world = two(scaling={"m": ZERO})
    scheduler = world.core._model_schedulers["m"]._scheduler
    world.change(fleet({**TWO, "u2": ["n"]}, scaling={"m": ZERO}, generation=2))
    assert world.core._model_schedulers["m"]._scheduler is scheduler
    assert world.placed("r")


def test_a_unit_that_leaves_the_fleet_is_forgotten() -> None:
    world = two()
    world.change(fleet({"u1": ["m"]}))
    world.report("u0", load())
    world.report("u1", load(used=9_999, running=9))
    assert world.placed("r") == "u1"
    assert list(world.state()["units"]) == ["u1"]


def test_the_state_is_json() -> None:
    world = two(migration=MigrationRules())
    pair(world)
    world.say(CONTROLLER, DrainReplicas("u1", ["m"]))
    world.say(CONTROLLER, StateRequest())
    (state,) = world.heard(StateReply, CONTROLLER)
    shown = msgspec.json.decode(msgspec.json.encode(state.state))
    assert shown["models"]["m"]["replicas"]["u1"]["freeness"] is None
    assert shown["models"]["m"]["replicas"]["u0"]["running"] == 4
    assert shown["units"]["u0"] == {"up": True, "epoch": "e1"}


def test_levels_that_contradict_each_other_change_nothing() -> None:
    world = two()
    with pytest.raises(PriorityError, match="is not declared"):
        world.change(fleet({"u1": ["m"], "u2": ["n"]}, levels=(Level("low", 0),), generation=9))
    assert world.state()["generation"] == 0
    assert list(world.state()["units"]) == ["u0", "u1"]
    assert world.placed("r")
    world.say(G0, place("s", "n"))
    world.wait(1.5)
    assert len(world.heard(NotPlaced)) == 1
