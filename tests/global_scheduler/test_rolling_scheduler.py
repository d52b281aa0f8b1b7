"""Rolling prefill, live, on a virtual clock: who gets a request, what reports change, and what a death does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from muxserve.global_scheduler.outbox import ToClient, ToUnit
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import Level
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.rules import RollingRules
from muxserve.wire import (
    DrainReplicas,
    Loads,
    Message,
    NotPlaced,
    Paired,
    Placed,
    RollingReport,
    RollingRequest,
    SchedulerHello,
    StartReplicas,
    StateReply,
    StateRequest,
    StopReplica,
    Terminating,
    Unpaired,
    Unplace,
    Waits,
)
from tests.global_scheduler.support import CAPACITY, CONTROLLER, G0, G1, World, fleet, load, place

# A millisecond per token, and 100 of them fill a window.
RULES = RollingRules(ttft=0.1, tpot=0.01, prefill=((1, 0.001), (1000, 1.0)))
UNITS = ("u0", "u1", "u2")


def rolling(units: tuple[str, ...] = UNITS, rules: RollingRules = RULES, **changes: Any) -> World:
    return World(fleet({unit: ["m"] for unit in units}, rolling={"m": rules}, **changes))


def up(world: World, *units: str, epoch: str = "e1", **more: Any) -> None:
    for unit in units:
        world.say(ToUnit(unit), RollingReport(unit, epoch, "m", whole=True))
        world.report(unit, load(**more), epoch=epoch)


def tell(world: World, unit: str, *came: str, epoch: str = "e1", tokens: int = 40, **more: Any) -> None:
    requests = [RollingRequest(request_id, tokens, 10) for request_id in came]
    world.say(ToUnit(unit), RollingReport(unit, epoch, "m", requests=requests, **more))


def ask(world: World, *ids: str, tokens: int = 40, peer: ToClient = G0, max_tokens: int = 10, **more: Any) -> list[str]:
    """Where these go; "" for those that wait, and a word for those that are refused."""
    before, world.sent = world.sent, []
    for request_id in ids:
        world.say(peer, place(request_id, demand=tokens + 1, max_tokens=max_tokens, **{"arrival": world.now, **more}))
    answers: dict[str, Message] = {}
    for to, message in world.sent:
        if to == peer and isinstance(message, Placed | Waits | NotPlaced):
            answers[message.request_id] = message
    world.sent = before + [each for each in world.sent if not isinstance(each[1], Placed | Waits | NotPlaced)]
    shown = {Placed: lambda m: m.unit, Waits: lambda m: "", NotPlaced: lambda m: "refused"}
    return [shown[type(answers[request_id])](answers[request_id]) for request_id in ids]


def ask_plain(world: World, request_id: str) -> list[Placed | NotPlaced]:
    """What a model that does not roll answers at once: nothing while the request waits."""
    world.heard(Placed)
    world.say(G0, place(request_id, demand=41, arrival=world.now, max_tokens=10))
    return [message for _, message in world.sent if isinstance(message, Placed | NotPlaced)]


def member(world: World, unit: str) -> Any:
    found: Any = world.core._model_schedulers["m"]
    return found._member(unit)


# ---------------------------------------------------------------- who gets a request


def test_one_replica_prefills_until_its_window_is_full_then_the_next() -> None:
    world = rolling()
    up(world, *UNITS)
    assert ask(world, *"abcdefg") == ["u0", "u0", "u1", "u1", "u2", "u2", ""]
    # What was placed is there, and its window is over: the one who waits goes there.
    tell(world, "u0", "a", "b")
    assert world.heard(Placed) == []
    world.now += 0.01
    tell(world, "u0", prefilled=["a"])
    assert world.heard(Placed) == []
    tell(world, "u0", prefilled=["b"], prefill_tokens=80, prefill_seconds=0.05)
    assert world.heard(Placed) == [], "two decodes have nothing to spare yet"
    world.now += 0.005
    tell(world, "u0", steps=6)
    assert world.heard(Placed, G0) == [Placed("g", "u0")]


def test_decode_steps_are_counted_and_save_time() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "a") == ["u0"]
    tell(world, "u0", "a")
    tell(world, "u0", prefilled=["a"])
    begun = world.now
    world.now += 0.05
    tell(world, "u0", steps=8)
    assert member(world, "u0").saved(world.now) == pytest.approx(8 * 0.01 - (world.now - begun))
    assert member(world, "u0").decoding == 1
    # The engine begins to count anew.
    tell(world, "u0", steps=2)
    assert member(world, "u0").saved(world.now) == pytest.approx(0.03)


def test_predictions_are_corrected_by_what_prefills_took() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0")
    for number in range(60):
        assert ask(world, str(number)) == ["u0"]
        tell(world, "u0", str(number))
        # A prompt in two chunks: only with the second it is known what it took.
        tell(world, "u0", prefill_tokens=20, prefill_seconds=0.03)
        tell(world, "u0", prefilled=[str(number)], prefill_tokens=20, prefill_seconds=0.05, left=[str(number)])
    assert member(world, "u0").bias == pytest.approx(2.0, rel=0.01)
    up(world, "u1")
    assert member(world, "u1").bias == member(world, "u0").bias, "the best guess for one that is new"
    assert ask(world, "x", "y", "z") == ["u0", "u1", ""], "two of them are too long for a window now"


def test_an_overdue_request_goes_where_there_is_memory() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "a", "b", "c") == ["u0", "u0", ""]
    tell(world, "u0", "a", "b")
    world.wait(0.2)
    assert world.heard(Placed) == [Placed("c", "u0")]


def test_the_last_moment_is_met_between_two_rounds() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    world.wait(0.001)  # a round has just been
    assert ask(world, "a", "b", "c") == ["u0", "u0", ""]
    asked = world.now
    tell(world, "u0", "a", "b", prefilled=["a"])
    # 0.04 s are pending there, and its own prefill takes as long.
    assert world.core.wakeup() == pytest.approx(asked + 0.02)
    world.wait(0.019)
    assert world.heard(Placed) == []
    world.wait(0.0011)
    assert world.heard(Placed) == [Placed("c", "u0")]


def test_who_waits_for_memory_does_not_keep_the_scheduler_busy() -> None:
    world = rolling(("u0",))
    up(world, "u0", capacity=100)
    assert ask(world, "a", "b") == ["u0", "u0"]
    assert ask(world, "c", arrival=world.now - 1.0) == [""]
    assert world.core.wakeup() > world.now


def test_who_waits_goes_by_priority_then_by_arrival_even_when_asked_again() -> None:
    world = rolling(("u0",))
    assert ask(world, "late", arrival=world.now - 0.01) == [""]
    assert ask(world, "early", arrival=world.now - 0.02) == [""]
    assert ask(world, "high", scheduling="high") == [""]
    world.say(G0, Unplace(["early"]))
    assert ask(world, "early", arrival=world.now - 0.02) == [""]
    assert ask(world, "late", arrival=world.now - 0.01) == [""]
    up(world, "u0")
    assert [each.request_id for each in world.heard(Placed)] == ["high", "early"]


def test_memory_is_promised_for_the_answer_too() -> None:
    world = rolling(("u0",), msgspec.structs.replace(RULES, ttft=100.0))
    up(world, "u0", capacity=1000)
    assert ask(world, "a", tokens=400, max_tokens=100_000) == ["u0"]
    assert member(world, "u0").promised == 400 + RULES.answer
    assert ask(world, "b", tokens=400, max_tokens=100_000) == [""]
    assert ask(world, "c", tokens=300, max_tokens=20) == [""], "first come first served"
    tell(world, "u0", "a", tokens=400)
    tell(world, "u0", prefilled=["a"], left=["a"])
    assert [each.request_id for each in world.heard(Placed)] == ["b", "c"]


def test_as_much_memory_is_promised_as_answers_have_taken() -> None:
    world = rolling(("u0",), msgspec.structs.replace(RULES, ttft=100.0))
    up(world, "u0", capacity=1000)
    asked = [f"r{number}" for number in range(100)]
    for request_id in asked:
        ask(world, request_id, tokens=400, max_tokens=100_000)
        tell(world, "u0", request_id, tokens=400)
        tell(world, "u0", prefilled=[request_id], left=[request_id], over=1, decoded=19)
    assert 20 <= world.state()["models"]["m"]["expected_answer"] < 60
    assert ask(world, "a", "b", tokens=400, max_tokens=100_000) == ["u0", "u0"], "with 256 of answer one alone fits"
    assert ask(world, "c", tokens=400, max_tokens=100_000) == [""]


def test_what_no_replica_can_hold_is_refused() -> None:
    world = rolling()
    up(world, "u0", "u1")
    # One that is about to come may be larger; others do not wait behind.
    assert ask(world, "a", tokens=CAPACITY) == [""]
    assert ask(world, "b") == ["u0"]
    up(world, "u2")
    (refused,) = world.heard(NotPlaced)
    assert not refused.late
    assert "shorten the prompt" in refused.message
    assert ask(world, "c", tokens=CAPACITY) == ["refused"]
    # What just fits is promised no more than there is.
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "d", tokens=CAPACITY - 1, arrival=world.now - 100) == ["u0"]


def test_what_waits_for_the_largest_replica_is_refused_or_fits_when_it_is_gone() -> None:
    rules = msgspec.structs.replace(RULES, ttft=100.0)
    world = rolling(("u0", "u1"), rules)
    up(world, "u0", capacity=500)
    up(world, "u1", capacity=1000)
    assert ask(world, "w", tokens=800) == ["u1"]
    assert ask(world, "x", tokens=450, max_tokens=300) == [""]
    assert ask(world, "y", tokens=600) == [""]
    world.change(fleet({"u0": ["m"]}, rolling={"m": rules}))
    world.wait(0.2)
    heard = {type(m): m.request_id for _, m in world.sent if isinstance(m, Placed | NotPlaced)}
    assert heard == {Placed: "x", NotPlaced: "y"}


def test_an_unknown_priority_is_refused_in_words() -> None:
    world = rolling()
    world.say(
        G0,
        place("r", demand=41, arrival=world.now, scheduling="hihg", max_tokens=10),
    )
    assert [m.message for m in world.heard(NotPlaced)] == ["there is no priority level 'hihg'; did you mean 'high'?"]


# ---------------------------------------------------------------- placed, named, forgotten


def test_what_was_placed_and_never_came_is_forgotten() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "a", "b", "c") == ["u0", "u0", ""]
    tell(world, "u0", "a")
    for _ in range(3):
        world.wait(0.5)
        world.report("u0", load(running=1))
    assert set(member(world, "u0").requests) == {"a", "c"} or set(member(world, "u0").requests) == {"a"}
    assert "b" not in member(world, "u0").requests


def test_an_answer_that_was_lost_is_given_again() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0", "u1")
    assert ask(world, "a") == ["u0"]
    assert ask(world, "b", tokens=60) == ["u0"]
    assert ask(world, "a") == ["u0"]
    assert member(world, "u0").pending == 2


def test_who_was_placed_elsewhere_counts_where_it_is() -> None:
    """The gateway has chosen by itself."""
    world = rolling(("u0", "u1"))
    up(world, "u0", "u1")
    assert ask(world, "a") == ["u0"]
    tell(world, "u1", "a")
    assert member(world, "u0").idle
    assert set(member(world, "u1").requests) == {"a"}


def test_a_request_that_comes_back_has_no_former_life() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "a") == ["u0"]
    tell(world, "u0", "a")
    # Its engine dies; the gateway hears of it before we do.
    assert ask(world, "a") == ["u0"]
    tell(world, "u0", left=["a"])
    assert set(member(world, "u0").requests) == {"a"}, "that was the former one"
    tell(world, "u0", "a")
    tell(world, "u0", left=["a"])
    assert member(world, "u0").idle


def test_a_request_may_come_and_go_within_a_report_and_leave_and_come_in_two() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "a") == ["u0"]
    tell(world, "u0", "a", prefilled=["a"], left=["a"])
    assert member(world, "u0").idle
    assert ask(world, "b") == ["u0"]
    tell(world, "u0", "b", prefilled=["b"])
    # It is preempted, and is to be prefilled again.
    tell(world, "u0", left=["b"])
    tell(world, "u0", "b", tokens=50)
    assert (member(world, "u0").pending, member(world, "u0").decoding) == (1, 0)
    tell(world, "u0", prefilled=["b"])
    assert member(world, "u0").decoding == 1


def test_those_whose_gateway_is_gone_wait_no_more() -> None:
    world = rolling(("u0",))
    assert ask(world, "a") == [""]
    assert ask(world, "b", peer=G1) == [""]
    world.core.returned(G0, Waits("a"))
    up(world, "u0")
    assert [peer for peer, message in world.sent if isinstance(message, Placed)] == [G1]


# ---------------------------------------------------------------- reports


def test_a_member_needs_both_its_requests_and_its_load() -> None:
    for load_first in (True, False):
        world = rolling(("u0",))
        assert ask(world, "r") == [""]
        if load_first:
            world.report("u0", load())
            assert world.heard(SchedulerHello, ToUnit("u0")) == [SchedulerHello("s1")]
            tell(world, "u0", "x")
            assert world.heard(Placed) == [], "what came before is not known"
        world.say(ToUnit("u0"), RollingReport("u0", "e1", "m", whole=True))
        if not load_first:
            assert world.heard(Placed) == []
            world.report("u0", load())
        assert world.heard(Placed) == [Placed("r", "u0")]


def test_a_new_global_scheduler_knows_what_units_have() -> None:
    world = rolling(("u0", "u1"))
    requests = [
        RollingRequest("decodes", 100, 50, prefilled=True, decoding_seconds=3.0),
        RollingRequest("fresh", 100, 50, prefilled=True),
        RollingRequest("waits", 70, 50),
    ]
    world.say(ToUnit("u0"), RollingReport("u0", "e1", "m", whole=True, requests=requests, steps=1000))
    world.report("u0", load(running=2, waiting=1))
    up(world, "u1")
    known = member(world, "u0")
    assert (known.pending, known.decoding, known.fresh) == (1, 1, ["fresh"])
    assert known.pending_seconds == pytest.approx(0.07)
    assert known.promised == 150 + 150 + 120
    assert known.saved(world.now) == pytest.approx(0.0)
    # Nothing is spared there, so that the next one goes elsewhere.
    assert ask(world, "r") == ["u1"]
    tell(world, "u0", prefilled=["waits"], steps=1004)
    assert (known.pending, known.decoding) == (0, 3)


def test_told_everything_again_it_keeps_what_it_has_seen() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "a", "b") == ["u0", "u0"]
    tell(world, "u0", "a", prefilled=["a"])
    tell(world, "u0", "b", prefilled=["b"])
    world.now += 0.05
    tell(world, "u0", steps=30)
    assert ask(world, "c") == ["u0"]
    saved = member(world, "u0").saved(world.now)
    requests = [RollingRequest(r, 40, 10, prefilled=True, decoding_seconds=0.05) for r in "ab"]
    requests[1] = RollingRequest("d", 40, 10)
    world.say(ToUnit("u0"), RollingReport("u0", "e1", "m", whole=True, requests=requests, steps=30))
    known = member(world, "u0")
    assert set(known.requests) == {"a", "c", "d"}, "c is on its way"
    assert known.saved(world.now) == pytest.approx(saved)
    assert known.pending == 2
    tell(world, "u0", "c")
    tell(world, "u0", left=["a", "c", "d"])
    assert known.idle


def test_a_unit_that_has_other_requests_than_it_has_named_is_asked() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "a") == ["u0"]
    tell(world, "u0", "a")
    for _ in range(5):
        world.report("u0", load())  # the report that it has left was lost
        world.wait(0.9)
    assert world.heard(SchedulerHello) == [SchedulerHello("s1")]
    world.say(ToUnit("u0"), RollingReport("u0", "e1", "m", whole=True))
    assert member(world, "u0").idle
    for _ in range(5):
        world.report("u0", load())
        world.wait(0.9)
    assert world.heard(SchedulerHello) == []


def test_reports_of_other_models_units_or_lives_change_nothing() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    world.say(ToUnit("u0"), RollingReport("u7", "e1", "m", requests=[RollingRequest("x", 1, 1)]))
    world.say(ToUnit("u9"), RollingReport("u9", "e1", "m", requests=[RollingRequest("x", 1, 1)]))
    world.say(ToUnit("u0"), RollingReport("u0", "e1", "nobody", requests=[RollingRequest("x", 1, 1)]))
    tell(world, "u0", prefilled=["x"], left=["y"])
    assert member(world, "u0").idle


# ---------------------------------------------------------------- deaths


def test_a_dead_unit_is_no_member_until_it_has_told_everything() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0", "u1")
    assert ask(world, "a") == ["u0"]
    world.core.unit_gone("u0", world.now)
    assert ask(world, "a") == ["u1"], "what was on its way there goes elsewhere"
    assert ask(world, "b", "c") == ["u1", ""]
    tell(world, "u0", epoch="e2")
    world.report("u0", load(), epoch="e2")
    assert world.heard(Placed) == []
    up(world, "u0", epoch="e2")
    assert world.heard(Placed) == [Placed("c", "u0")]


def test_a_unit_scheduler_that_was_started_anew_has_nothing() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    assert ask(world, "a") == ["u0"]
    tell(world, "u0", "a")
    world.say(ToUnit("u0"), RollingReport("u0", "e2", "m", whole=True))
    world.report("u0", load(), epoch="e2")
    assert member(world, "u0").idle


def test_a_model_that_its_unit_does_not_report_is_down() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0", "u1")
    world.report("u0")
    assert ask(world, "a") == ["u1"]
    world.report("u0", load())
    assert world.heard(SchedulerHello, ToUnit("u0")) == [SchedulerHello("s1")]


def test_requests_wait_while_there_is_no_replica() -> None:
    world = rolling(("u0",))
    assert ask(world, "a") == [""]
    up(world, "u0")
    assert world.heard(Placed) == [Placed("a", "u0")]


# ---------------------------------------------------------------- drains and scaling


def test_a_drained_replica_gets_nothing_more_and_is_stopped_when_it_is_empty() -> None:
    world = rolling(("u0", "u1"))
    world.controller()
    up(world, "u0", "u1")
    assert ask(world, "a") == ["u0"]
    tell(world, "u0", "a")
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    assert world.heard(Terminating, ToUnit("u0")) == [Terminating("m", True)]
    assert ask(world, "b") == ["u1"]
    world.report("u0", load(running=1, terminating=True))
    world.wait(0.3)
    assert world.heard(StopReplica) == []
    tell(world, "u0", prefilled=["a"], left=["a"])
    world.report("u0", load(terminating=True))
    world.wait(0.2)
    assert world.heard(StopReplica, CONTROLLER) == [StopReplica("m", "u0")]
    world.report("u0")
    assert world.state()["models"]["m"]["macro_instances"] == {"m1": ["u1"]}
    world.change(fleet({"u0": [], "u1": ["m"]}, rolling={"m": RULES}))
    world.change(fleet({"u0": ["m"], "u1": ["m"]}, rolling={"m": RULES}))
    up(world, "u0")
    assert ask(world, "c", "d") == ["u1", "u0"]


def test_a_request_that_a_draining_replica_gives_back_goes_elsewhere() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0", "u1")
    assert ask(world, "a") == ["u0"]
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    assert ask(world, "a") == ["u1"]
    assert member(world, "u0").idle


def decodes(world: World, unit: str, *ids: str, steps: int = 8) -> None:
    """These have their first token there, and time to spare by now."""
    assert ask(world, *ids) == [unit] * len(ids)
    tell(world, unit, *ids)
    tell(world, unit, prefilled=[*ids])
    tell(world, unit, steps=steps)


def drained(moves: bool = True, **changes: Any) -> World:
    """u0 decodes "a" and "b", and is being drained; u1 and u2 have nothing to do."""
    world = rolling(migration=MigrationRules() if moves else None, **changes)
    world.controller()
    up(world, *UNITS)
    decodes(world, "u0", "a", "b")
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    return world


def moved(world: World, unit: str, request_id: str, steps: int = 0) -> None:
    """`unit` says that it has a request which has come with its KV."""
    request = RollingRequest(request_id, 48, 2, True, 0.0)
    world.say(ToUnit(unit), RollingReport(unit, "e1", "m", requests=[request], steps=steps))


def test_decodes_of_a_drained_replica_go_where_there_is_room() -> None:
    world = drained()
    assert ask(world, "c") == ["u1"]
    world.wait(0.1)
    pairs = world.heard(Paired, ToUnit("u0"))
    assert pairs
    assert {pair.destination for pair in pairs} == {"u2"}, "nothing is pending there"
    assert all(pair.address for pair in pairs)
    assert world.state()["models"]["m"]["pairs"] == {"u0": "u2"}
    moved(world, "u2", "a")
    moved(world, "u2", "b")
    tell(world, "u0", left=["a", "b"])
    world.wait(0.2)
    assert world.heard(Unpaired, ToUnit("u0")) == [Unpaired("m")], "it has nothing to give away"
    assert (member(world, "u0").requests, member(world, "u2").decoding) == ({}, 2)


def test_memory_that_is_promised_is_taken_where_decodes_go() -> None:
    world = drained()
    decodes(world, "u1", "c", steps=50)
    decodes(world, "u1", "d", steps=100)
    world.report("u2")
    world.wait(0.1)
    pair = world.heard(Paired, ToUnit("u0"))[-1]
    assert pair.destination == "u1"
    assert pair.load.used == member(world, "u1").promised == 100
    # One that is full takes none.
    world.report("u1", load(capacity=130, running=2))
    world.wait(0.2)
    assert world.heard(Unpaired, ToUnit("u0")) == [Unpaired("m")]
    assert world.state()["models"]["m"]["pairs"] == {}


@pytest.mark.parametrize("first", ["came", "left"])
def test_what_it_had_saved_goes_along_whoever_speaks_first(first: str) -> None:
    world = drained()
    world.now += 0.02
    had = member(world, "u0").saved(world.now)
    since = member(world, "u0").requests["a"].since
    assert had == pytest.approx(0.06)
    # The engine over there has counted steps of its own.
    tell(world, "u2", steps=1234)
    said = [lambda: tell(world, "u0", left=["a"]), lambda: moved(world, "u2", "a", steps=1234)]
    for say in said if first == "left" else reversed(said):
        say()
        world.now += 0.01
    assert member(world, "u2").saved(world.now) == pytest.approx(had - 0.02)
    assert member(world, "u2").requests["a"].since == since
    assert "a" not in member(world, "u0").requests
    tell(world, "u2", steps=1235)
    assert member(world, "u2").saved(world.now) == pytest.approx(had - 0.02 + RULES.tpot)


def test_what_is_computed_anew_elsewhere_has_saved_nothing() -> None:
    world = drained()
    tell(world, "u0", left=["a"])
    assert ask(world, "a") == ["u1"]
    tell(world, "u1", "a")
    tell(world, "u1", prefilled=["a"])
    moved(world, "u2", "b")
    moved(world, "u2", "x")  # of which nobody knows anything
    assert member(world, "u1").saved(world.now) == pytest.approx(0.0)
    assert sorted(member(world, "u2").requests) == ["b", "x"]
    assert member(world, "u2").saved(world.now, 0.0) == pytest.approx(0.0)


def test_decodes_stay_where_they_are_if_the_fleet_says_so_or_nobody_is_left() -> None:
    world = drained(moves=False)
    world.wait(0.2)
    assert world.heard(Paired) == []
    world = drained()
    for unit in ("u1", "u2"):
        world.say(CONTROLLER, DrainReplicas(unit, ["m"]))
    world.wait(0.2)
    assert world.heard(Paired) == []
    # KV that is laid out otherwise is of no use there.
    world = drained()
    for unit in ("u1", "u2"):
        world.report(unit, load(layout="other"))
    world.wait(0.2)
    assert world.heard(Paired) == []


def test_a_destination_that_dies_is_replaced() -> None:
    world = drained()
    world.wait(0.1)
    first = world.heard(Paired, ToUnit("u0"))[-1].destination
    world.core.unit_gone(first, world.now)
    world.wait(0.2)
    second = world.heard(Paired, ToUnit("u0"))[-1].destination
    assert {first, second} == {"u1", "u2"}
    world.change(fleet({unit: ["m"] for unit in UNITS}, rolling={"m": RULES}, generation=2))
    world.wait(0.1)
    assert world.heard(Unpaired, ToUnit("u0")) == [Unpaired("m")], "migration was switched off"


def test_a_move_is_no_end_for_the_objectives() -> None:
    scaling = ScalingRules(minimum=1, maximum=3, hold=1000.0)
    world = drained(scaling={"m": scaling})
    scaler: Any = world.core._model_schedulers["m"]._scaler  # type: ignore[attr-defined]
    tell(world, "u0", left=["a", "b"])
    moved(world, "u2", "a")
    assert len(scaler._attainment._seen) == 0
    # "b" has ended: nobody names it.
    world.wait(1.2)
    assert [met for _, met in scaler._attainment._seen] == [True]
    assert list(scaler._requests) == ["a"]
    tell(world, "u2", left=["a"])
    assert len(scaler._attainment._seen) == 2
    assert scaler._requests == {}


def test_a_new_global_scheduler_sends_nothing_to_a_replica_that_is_draining() -> None:
    world = rolling(("u0", "u1"))
    world.controller()
    up(world, "u0", terminating=True)
    assert ask(world, "a") == [""]
    up(world, "u1")
    assert world.heard(Placed) == [Placed("a", "u1")]
    world.report("u0", load(terminating=True))
    world.wait(0.2)
    assert world.heard(StopReplica) == [StopReplica("m", "u0")]


def test_requests_do_not_wait_for_replicas_that_are_all_drained() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    assert ask(world, "r") == [""]
    world.wait(0.2)
    (refused,) = world.heard(NotPlaced)
    assert refused.late


def test_macro_instances_divide_as_the_fleet_grows_with_all_that_goes_on() -> None:
    rules = msgspec.structs.replace(RULES, lower=2, upper=3)
    names = tuple(f"u{n}" for n in range(4))
    world = rolling(names[:3], rules)
    up(world, *names[:3])
    assert ask(world, "a", "b", "c") == ["u0", "u0", "u1"]
    tell(world, "u0", "a", "b")
    world.change(fleet({name: ["m"] for name in names}, rolling={"m": rules}))
    up(world, "u3")
    state = world.state()["models"]["m"]
    assert sorted(map(sorted, state["macro_instances"].values())) == [["u0", "u1"], ["u2", "u3"]]
    assert state["moved"] == 2
    # News finds them where they are now; what was on its way is not forgotten by the move.
    tell(world, "u0", prefilled=["a", "b"])
    tell(world, "u1", "c")
    assert (member(world, "u0").decoding, member(world, "u1").pending) == (2, 1)
    world.core.unit_gone("u3", world.now)
    assert world.state()["models"]["m"]["macro_instances"] == {"m2": ["u0", "u1", "u2"]}


def scaled(minimum: int, maximum: int, **more: Any) -> dict[str, ScalingRules]:
    return {"m": ScalingRules(minimum=minimum, maximum=maximum, **more)}


def test_a_sleeping_model_is_woken_and_put_to_sleep() -> None:
    scaling = scaled(0, 2, hold=5, idle_seconds=30, wake_limit=20)
    world = World(fleet({"u0": ["n"]}, models=["m"], rolling={"m": RULES}, scaling=scaling))
    world.controller()
    world.say(
        G0,
        place("r", demand=41, arrival=world.now, max_tokens=10),
    )
    assert world.heard(StartReplicas) == [StartReplicas("m", 1)]
    world.wait(21)
    (late,) = world.heard(NotPlaced)
    assert late.late
    assert "wake_limit" in late.message
    world.change(fleet({"u0": ["n"], "u1": ["m"]}, rolling={"m": RULES}, scaling=scaling))
    up(world, "u1")
    assert ask(world, "s") == ["u1"]
    tell(world, "u1", "s", prefilled=["s"], left=["s"])
    for second in range(40):
        world.report("u1", load(terminating=second > 33))
        world.wait(1)
    assert world.heard(StopReplica) == [StopReplica("m", "u1")]


def test_missed_objectives_bring_another_replica_and_idleness_takes_it_away() -> None:
    scaling = scaled(1, 2, hold=5)
    world = World(fleet({"u0": ["m"]}, rolling={"m": RULES}, scaling=scaling))
    world.controller()
    up(world, "u0")
    for number in range(20):
        world.now += 0.2
        assert ask(world, str(number)) == ["u0"]
        tell(world, "u0", str(number))
        world.now += 0.15  # later than a tenth of a second
        tell(world, "u0", prefilled=[str(number)], prefill_seconds=0.04)
        tell(world, "u0", left=[str(number)], steps=20 * number)
        world.report("u0", load())
    world.wait(1.1)
    assert StartReplicas("m", 1) in world.heard(StartReplicas)
    world.change(fleet({"u0": ["m"], "u1": ["m"]}, rolling={"m": RULES}, scaling=scaling))
    up(world, "u1")
    for _ in range(30):
        world.report("u0", load())
        world.report("u1", load())
        world.wait(1)
    told = [(peer, m) for peer, m in world.sent if isinstance(m, Terminating) and m.on]
    assert len({peer for peer, _ in told}) == 1, "one replica is enough, and none is too few"


def test_a_draining_replica_stays_when_it_is_needed() -> None:
    scaling = scaled(1, 2, hold=1)
    rules = msgspec.structs.replace(RULES, ttft=100.0)
    world = World(fleet({"u0": ["m"], "u1": ["m"]}, rolling={"m": rules}, scaling=scaling))
    up(world, "u0", "u1")
    for _ in range(4):
        world.report("u0", load())
        world.report("u1", load())
        world.wait(1)
    (draining,) = {peer for peer, message in world.sent if isinstance(message, Terminating)}
    world.sent = []
    world.report(draining.name, load(running=1, terminating=True))
    # More wait than there are replicas.
    ask(world, *(str(n) for n in range(9)), tokens=6000)
    world.wait(1.5)
    told = [(peer, m) for peer, m in world.sent if isinstance(m, Terminating)]
    assert (draining, Terminating("m", False)) in told
    assert draining.name in [m.unit for _, m in world.sent if isinstance(m, Placed)]


# ---------------------------------------------------------------- the fleet file


def test_other_objectives_are_taken_over_with_everything_that_is_known() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0", "u1")
    assert ask(world, "a", "b", "c", "d", "e") == ["u0", "u0", "u1", "u1", ""]
    tell(world, "u0", "a", "b", prefilled=["a", "b"])
    begun = world.now
    tell(world, "u0", steps=10)
    world.now += 0.02
    world.change(fleet({"u0": ["m"], "u1": ["m"]}, rolling={"m": msgspec.structs.replace(RULES, tpot=0.1)}))
    assert member(world, "u0").saved(world.now) == pytest.approx(10 * 0.1 - (world.now - begun))
    assert world.heard(Placed) == [Placed("e", "u0")]
    assert member(world, "u1").pending == 2


def test_rules_that_contradict_themselves_change_nothing() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    wrong = fleet(
        {"u0": ["m"], "u1": ["m"]}, rolling={"m": msgspec.structs.replace(RULES, lower=4, upper=4)}, generation=7
    )
    with pytest.raises(ValueError, match="N_u"):
        world.change(wrong)
    assert world.state()["generation"] == 0
    assert list(world.state()["units"]) == ["u0"]
    world.report("u0", load())
    assert ask(world, "a") == ["u0"]


def test_a_model_may_begin_to_roll_and_end() -> None:
    world = World(fleet({"u0": ["m"]}))
    world.report("u0", load())
    world.change(fleet({"u0": ["m"]}, rolling={"m": RULES}, generation=2))
    world.report("u0", load())
    assert SchedulerHello("s1") in world.heard(SchedulerHello)
    up(world, "u0")
    assert ask(world, "a") == ["u0"]
    world.change(fleet({"u0": ["m"]}, generation=3))
    world.say(ToUnit("u0"), RollingReport("u0", "e1", "m", whole=True))
    world.report("u0", load())
    assert ask(world, "b") == ["u0"]


def test_who_waits_goes_on_waiting_when_a_model_begins_to_roll_or_ends() -> None:
    world = World(fleet({"u0": []}, models=["m"]))
    assert ask_plain(world, "a") == []
    # In the same fleet file it begins to roll, and has a replica.
    world.change(fleet({"u0": ["m"]}, rolling={"m": RULES}, generation=2))
    assert world.heard(NotPlaced) == []
    up(world, "u0")
    assert world.heard(Placed, G0) == [Placed("a", "u0")]
    assert ask(world, "b", "c", tokens=50) == ["u0", ""]
    world.change(fleet({"u0": ["m"]}, generation=3))
    assert world.heard(SchedulerHello, ToUnit("u0")), "the new model_scheduler has heard of no replica"
    world.report("u0", load(running=2))
    assert world.heard(Placed, G0) == [Placed("c", "u0")]
    assert world.state()["models"]["m"]["waiting"] == 0


def test_what_the_controller_wants_outlives_a_change_of_policy() -> None:
    world = rolling(("u0", "u1"))
    world.controller()
    up(world, "u0", "u1", running=1)
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    assert world.heard(Terminating, ToUnit("u0")) == [Terminating("m", True)]
    world.change(fleet({"u0": ["m"], "u1": ["m"]}, generation=2))
    world.report("u0", load(running=1, terminating=True))
    world.report("u1", load(running=9, used=9_000))
    assert ask(world, "a", "b") == ["u1", "u1"]
    world.report("u0", load(terminating=True))
    world.wait(0.2)
    assert world.heard(StopReplica, CONTROLLER) == [StopReplica("m", "u0")]


def test_the_state_is_json() -> None:
    world = rolling(("u0", "u1", "u2"))
    up(world, "u0", "u1")
    world.report("u2", load())
    ask(world, "a")
    world.say(CONTROLLER, StateRequest())
    (state,) = world.heard(StateReply, CONTROLLER)
    shown = msgspec.json.decode(msgspec.json.encode(state.state))["models"]["m"]
    assert shown["replicas"]["u0"]["window"] == "prefill"
    assert shown["replicas"]["u0"]["saved_seconds"] is None
    assert "window" not in shown["replicas"]["u2"]
    assert shown["macro_instances"] == {"m1": ["u0", "u1"]}


def test_loads_of_units_without_reports_are_not_asked_about_too_often() -> None:
    world = rolling(("u0",))
    for _ in range(25):
        world.say(ToUnit("u0"), Loads("u0", "e1", [load()]))
        world.wait(0.1)
    assert len(world.heard(SchedulerHello)) == 3


def test_other_levels_and_bounds_are_taken_over_while_some_wait_and_some_drain() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0", "u1")
    world.say(CONTROLLER, DrainReplicas("u1", ["m"]))
    assert ask(world, "a", "b") == ["u0", "u0"]
    assert ask(world, "high", scheduling="high") == [""]
    assert ask(world, "c") == [""]
    world.change(
        fleet(
            {"u0": ["m"], "u1": ["m"]},
            rolling={"m": msgspec.structs.replace(RULES, ttft=0.13)},
            levels=(Level("normal", 0),),
        )
    )
    (refused,) = world.heard(NotPlaced)
    assert refused.request_id == "high"
    # The longer window holds one more, and the one that drains still gets nothing.
    assert set(member(world, "u0").requests) == {"a", "b", "c"}
    assert ask(world, "d") == [""]
    assert world.state()["models"]["m"]["macro_instances"] == {"m1": ["u0"]}


def test_a_replica_that_is_to_go_gets_nothing_when_it_comes_back() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0")
    world.say(CONTROLLER, DrainReplicas("u0", ["m"]))
    world.heard(Terminating)
    world.core.unit_gone("u0", world.now)
    up(world, "u0", epoch="e2")
    assert world.heard(Terminating, ToUnit("u0")) == [Terminating("m", True)]
    assert ask(world, "a") == [""]


def test_only_who_asks_can_take_the_question_back() -> None:
    world = rolling(("u0", "u1"))
    up(world, "u0")
    assert ask(world, "a", "b") == ["u0", "u0"]
    assert ask(world, "c") == [""]
    assert ask(world, "large", tokens=CAPACITY) == [""]
    world.say(G1, Unplace(["c", "large"]))
    assert world.state()["models"]["m"]["waiting"] == 2
    world.say(G0, Unplace(["c", "large", "a", "nobody"]))
    assert world.state()["models"]["m"]["waiting"] == 0
    up(world, "u1", capacity=10 * CAPACITY)
    assert world.heard(Placed) == []


def test_what_comes_with_its_kv_decodes_or_waits_to() -> None:
    world = rolling(("u0",))
    up(world, "u0")
    moved = RollingRequest("moved", 40, 10, prefilled=True, decoding_seconds=0.0)
    fresh = RollingRequest("fresh", 40, 10, prefilled=True)
    world.say(ToUnit("u0"), RollingReport("u0", "e1", "m", requests=[moved, fresh]))
    known = member(world, "u0")
    assert (known.decoding, known.pending, known.promised) == (2, 0, 100)
    # Who was placed may have its first token before it is named.
    world.now += 0.5
    tell(world, "u0", steps=500)
    assert ask(world, "a") == ["u0"]
    world.say(ToUnit("u0"), RollingReport("u0", "e1", "m", requests=[RollingRequest("a", 40, 10, True)], steps=500))
    assert (known.decoding, known.pending) == (3, 0)


def test_a_replica_that_died_is_replaced_when_it_has_been_away_for_long() -> None:
    scaling = scaled(2, 4, hold=5)
    world = World(fleet({"u0": ["m"], "u1": ["m"]}, rolling={"m": RULES}, scaling=scaling))
    world.controller()
    up(world, "u0", "u1")
    world.core.unit_gone("u1", world.now)
    for second in range(70):
        world.report("u0", load())
        world.wait(1)
        if second == 50:
            assert world.heard(StartReplicas) == []
    assert world.heard(StartReplicas) == [StartReplicas("m", 1)]
