"""One unit's part in a migration, message by message; the test plays the engine and the migrator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.views import InstanceLoad
from muxserve.spec import ModelSpec
from muxserve.wire import (
    Abort,
    Blocks,
    Cancel,
    Detach,
    Detached,
    Elsewhere,
    EngineDown,
    EngineHello,
    EngineLost,
    GatewayHello,
    HandOff,
    Lease,
    Loads,
    Lost,
    MigratorHello,
    MoveAbort,
    MoveCommit,
    MoveCommitted,
    MoveFailed,
    MoveStage,
    MoveStaged,
    Moving,
    MovingIn,
    Paired,
    Reset,
    Retire,
    Returned,
    Revive,
    SchedulerHello,
    ShowBlocks,
    TakenOver,
    TakeOver,
    Terminating,
    TookOver,
    Unpaired,
)
from tests.support.requests import ASKED, asking, without
from tests.unit.support import GATEWAY, REPLY_TO, Bench, Sent, model, to

MIGRATOR = "migrator"
SCHEDULER = b"scheduler/s1"
DECODE = "a/decode"
# Always a source, and no destination becomes one.
RULES = MigrationRules(source_below=100_000, destination_above=100_000)


def elsewhere(**more: Any) -> InstanceLoad:
    """How the other replica stands: empty, and large."""
    return InstanceLoad("", 100_000_000, "a", **more)


ELSEWHERE = elsewhere()


def paired(load: InstanceLoad = ELSEWHERE) -> Paired:
    return Paired("a", "u1", "ipc:///u1/migrator.sock", load)


def bench(*requests: str, migrator: bool = True, models: Sequence[ModelSpec] = (), **more: Any) -> Bench:
    """Requests decode, and a migrator is there."""
    made = Bench(*models, migration=RULES, **more)
    for request_id in requests:
        made.decoding(request_id)
    if migrator:
        made.say(b"migrator", MigratorHello("m1", 7))
    return made


class Course:
    """Leads one move up to a step; one of them is met by models that keep states only."""

    STEPS = ("showing", "copying", "detaching", "last", "state", "committing")
    # The request has left its engine.
    STILL = STEPS[3:]
    # The migrator knows of it, and can undo it.
    UNDONE = STEPS[1:5]

    def __init__(self, bench: Bench, request_id: str = "r") -> None:
        self.bench = bench
        self.states = [21, 20][: bench.unit.ledger.by_name["a"].state_blocks]
        (self.show,) = to(DECODE, ShowBlocks, bench.say(SCHEDULER, paired()))
        assert self.show.request_id == request_id
        self.stage: MoveStage
        self.detach: Detach
        self.commit: MoveCommit

    def to(self, step: str) -> Course:
        for each in self.STEPS[1 : self.STEPS.index(step) + 1]:
            if each != "state" or self.states:
                getattr(self, each)()
        return self

    def copying(self) -> None:
        blocks = Blocks(self.show.request_id, self.show.incarnation, 0, [*self.states, 4, 9, 7], 33)
        (self.stage,) = to(MIGRATOR, MoveStage, self.bench.say(DECODE.encode(), blocks))

    def detaching(self) -> None:
        sent = self.bench.say(b"migrator", MoveStaged(self.stage.move, len(self.states) + 2, 0.001, 100))
        (self.detach,) = to(DECODE, Detach, sent)

    def last(self) -> Sent:
        d = self.detach
        gone = Detached(
            d.request_id,
            d.incarnation,
            d.key,
            since=d.since,
            blocks=[7],
            computed_tokens=35,
            output_tokens=list(range(16)),
        )
        sent = self.bench.say(DECODE.encode(), gone)
        (self.stage,) = to(MIGRATOR, MoveStage, sent)
        return sent

    def state(self) -> None:
        sent = self.bench.say(b"migrator", MoveStaged(self.stage.move, len(self.states) + 3, 0.001, 50))
        (self.stage,) = to(MIGRATOR, MoveStage, sent)

    def committing(self) -> None:
        sent = self.bench.say(b"migrator", MoveStaged(self.stage.move, len(self.states) or 3, 0.001, 50))
        (self.commit,) = to(MIGRATOR, MoveCommit, sent)


def at(step: str) -> tuple[Bench, Course]:
    """A move at that step."""
    models = [model("a", state_blocks=2), model("b")] if step == "state" else []
    made = bench("r", models=models)
    return made, Course(made).to(step)


def in_engine(bench: Bench, request_id: str = "r") -> bool:
    return request_id in bench.unit.ledger.by_name["a"].decoding


def counted(bench: Bench) -> tuple[int, int, int]:
    state = bench.state()["models"]["a"]
    return state["moved_in"], state["moved_out"], state["moves_aborted"]


# ---------------------------------------------------------------- the way out


def test_the_course_of_a_move() -> None:
    b = bench("r")
    course = Course(b)
    assert course.show.since == 0
    course.copying()
    # Whole blocks only, and room for all that there is and what is filled meanwhile.
    assert course.stage.blocks == [4, 9]
    assert (course.stage.since, course.stage.reserve) == (0, 4)
    assert course.stage.address == "ipc:///u1/migrator.sock"
    assert b.state()["models"]["a"]["decoding"] == 1
    course.detaching()
    assert course.detach.since == 2
    sent = course.last()
    assert (course.stage.since, course.stage.blocks, course.stage.reserve) == (2, [7], 0)
    assert b.state()["models"]["a"]["moving"] == 1
    assert b.state()["models"]["a"]["moves"] == {"last": 1}
    assert b.state()["engines"]["a/decode"]["lease"] is None, "its engine has nothing left"
    assert to(DECODE, Lease, sent) == []
    course.committing()
    moving = course.commit.request
    assert (moving.request_id, moving.attempt, moving.gateway_epoch, moving.request.body) == ("r", 0, "g1", b"r")
    assert (moving.output_tokens, moving.computed_tokens, moving.moves) == (list(range(16)), 35, 1)
    assert 0.0 <= moving.waited < 1.0
    b.say(b"migrator", MoveCommitted(course.stage.move), after=0.01)
    assert counted(b) == (0, 1, 0)
    assert b.memory.dropped == [("a", course.detach.key)]
    assert not b.unit.request_table.held
    assert not b.unit.moving.moves
    state = b.state()["models"]["a"]
    assert 0.01 <= state["last_downtime_seconds"] < 0.02


def test_a_state_is_copied_again_when_its_request_is_out() -> None:
    b, course = at("state")
    stages = [m for _, m in b.sent if isinstance(m, MoveStage)]
    # Ahead with the first whole blocks, and again after the last, when no step overwrites it any more.
    assert [(stage.since, stage.blocks) for stage in stages] == [(0, [21, 20, 4, 9]), (4, [7]), (0, [21, 20])]
    assert [stage.reserve for stage in stages] == [6, 0, 0]
    assert course.detach.since == 4
    assert b.state()["models"]["a"]["moves"] == {"state": 1}
    course.committing()
    b.say(b"migrator", MoveCommitted(course.stage.move))
    assert counted(b) == (0, 1, 0)


def test_who_was_given_away_is_lost_for_a_gateway_that_does_not_hear_of_it() -> None:
    b = bench("r")
    course = Course(b).to("committing")
    b.say(b"migrator", MoveCommitted(course.stage.move))
    assert b.unit.wakeup(b.now) <= b.now + 2.0
    assert to(GATEWAY, Lost, b.turn(after=1.9)) == []
    (lost,) = to(GATEWAY, Lost, b.turn(after=0.2))
    assert (lost.request_ids, lost.attempts) == (["r"], [0])


def test_who_came_back_meanwhile_is_not_called_lost() -> None:
    b = bench("r")
    course = Course(b).to("committing")
    b.say(b"migrator", MoveCommitted(course.stage.move))
    back = take_over("r", moves=2)
    b.say(b"migrator", back)
    assert to(GATEWAY, Lost, b.turn(after=2.1)) == []


def test_stages_go_on_until_few_blocks_are_left() -> None:
    b = bench("r")
    course = Course(b).to("copying")
    # While this stage was copied the engine made enough tokens for many blocks.
    b.unit.ledger.by_name["a"].decode.step_seconds = 0.001
    (show,) = to(DECODE, ShowBlocks, b.say(b"migrator", MoveStaged(course.stage.move, 2, 0.1, 100), after=0.1))
    assert show.since == 2
    more = Blocks("r", show.incarnation, 2, [7, 8, 10, 11, 12, 13], 16 * 7 + 3)
    (stage,) = to(MIGRATOR, MoveStage, b.say(DECODE.encode(), more))
    assert (stage.since, stage.blocks, stage.reserve) == (2, [7, 8, 10, 11, 12], 5)
    sent = b.say(b"migrator", MoveStaged(stage.move, 7, 0.01, 100), after=0.01)
    assert [d.since for d in to(DECODE, Detach, sent)] == [7]


def test_there_are_not_many_stages() -> None:
    b = bench("r")
    course = Course(b).to("copying")
    b.unit.ledger.by_name["a"].decode.step_seconds = 0.0001
    until = 2
    for _ in range(5):
        sent = b.say(b"migrator", MoveStaged(course.stage.move, until, 1.0, 100), after=1.0)
        if to(DECODE, Detach, sent):
            break
        (show,) = to(DECODE, ShowBlocks, sent)
        until += 40
        blocks = Blocks("r", show.incarnation, show.since, list(range(41)), 16 * until + 1)
        b.say(DECODE.encode(), blocks)
    assert len([m for _, m in b.sent if isinstance(m, MoveStage)]) == 3


def test_only_as_many_move_at_once_as_the_rules_allow() -> None:
    b = bench("r", "s")
    assert len(to(DECODE, ShowBlocks, b.say(SCHEDULER, paired()))) == 1
    assert to(DECODE, ShowBlocks, b.say(SCHEDULER, paired(), after=0.1)) == []
    (loads,) = to(SCHEDULER, Loads, b.say(SCHEDULER, SchedulerHello("s1")))
    assert [load.moving_out for load in loads.loads if load.model == "a"] == [1]


def test_the_next_one_moves_as_soon_as_one_has_arrived() -> None:
    b = bench("r", "s")
    course = Course(b).to("committing")
    (show,) = to(DECODE, ShowBlocks, b.say(b"migrator", MoveCommitted(course.stage.move)))
    assert show.request_id == "s"


def test_a_report_that_still_counts_a_move_that_has_ended_holds_nothing_up() -> None:
    b = bench("r", "s", "t")
    course = Course(b).to("committing")
    stale = paired(elsewhere(moving_in=1))
    assert to(DECODE, ShowBlocks, b.say(SCHEDULER, stale)) == [], "it is on its way"
    sent = b.say(b"migrator", MoveCommitted(course.stage.move))
    (show,) = to(DECODE, ShowBlocks, sent)
    b.say(DECODE.encode(), Blocks(show.request_id, show.incarnation, 0, [], 0))
    # Two have ended a moment ago; a third one is somebody else's.
    assert to(DECODE, ShowBlocks, b.say(SCHEDULER, paired(elsewhere(moving_in=3)), after=0.15)) == []
    (show,) = to(DECODE, ShowBlocks, b.say(SCHEDULER, paired(elsewhere(moving_in=2)), after=0.03))
    assert show.request_id == "t"


@pytest.mark.parametrize("why", ["unpaired", "silence", "no migrator", "not a source", "no room", "unknown model"])
def test_nothing_moves_without_a_reason(why: str) -> None:
    b = bench(migrator=why != "no migrator")
    message = paired()
    if why == "not a source":
        b = Bench()
        b.say(b"migrator", MigratorHello("m1", 7))
    elif why == "no room":
        message = paired(elsewhere(used=100_000_000))
    elif why == "unknown model":
        message = Paired("x", "u1", "ipc:///u1", ELSEWHERE)
    b.say(SCHEDULER, message)
    if why == "unpaired":
        b.say(SCHEDULER, Unpaired("a"))
    elif why == "silence":
        b.turn(after=2.1)
    b.decoding("r")
    b.turn(after=0.1)
    assert to(DECODE, ShowBlocks, b.sent) == []


def test_low_execution_priority_and_short_requests_move_first() -> None:
    b = bench()
    for request_id, prompt, level in (("high", 20, "high"), ("long", 100, "normal"), ("short", 20, "normal")):
        b.submit(request_id, prompt=prompt, execution=level)
        b.hand_over(request_id)
    # As far as prompts were handed over whole, all are in the decode engine by now.
    assert len(b.unit.ledger.by_name["a"].decoding) == 3
    (show,) = to(DECODE, ShowBlocks, b.say(SCHEDULER, paired()))
    assert show.request_id == "short"
    (loads,) = to(SCHEDULER, Loads, b.say(SCHEDULER, SchedulerHello("s1")))
    assert loads.loads[0].levels == {"high": 1, "normal": 2}


# ---------------------------------------------------------------- failures, at each step


def fails(b: Bench, course: Course, cause: str) -> Sent:
    """What the unit sends when it goes wrong."""
    name = b.unit.moving.moves.all()[0].name
    match cause:
        case "refused":
            return b.say(b"migrator", MoveFailed(name, "no room"))
        case "migrator anew":
            return b.say(b"migrator", MigratorHello("m2", 8))
        case "silence":
            # The engine goes on stepping meanwhile, and the global scheduler pairs no more.
            b.say(SCHEDULER, Unpaired("a"))
            return b.turn(after=10.1)
    raise AssertionError(cause)


@pytest.mark.parametrize("step", Course.STEPS)
@pytest.mark.parametrize("cause", ["refused", "migrator anew", "silence"])
def test_a_move_that_fails_leaves_the_request_here_or_has_it_served_again(step: str, cause: str) -> None:
    b, course = at(step)
    sent = fails(b, course, cause)
    assert not b.unit.moving.moves
    assert counted(b) == (0, 0, 1)
    uncertain = step == "committing" and cause != "refused"
    assert [m.request_ids for m in to(GATEWAY, Lost, sent)] == ([["r"]] if uncertain else [])
    aborts = [m.move for m in to(MIGRATOR, MoveAbort, sent)]
    assert bool(aborts) == (cause == "silence" and step in Course.UNDONE)
    if uncertain:
        assert b.memory.dropped == [("a", course.detach.key)]
        assert "r" not in b.unit.request_table.held
    elif step in Course.STILL:
        (lease,) = to(DECODE, Lease, sent)
        (admit,) = lease.admit
        assert (admit.hand_off, admit.output_tokens) == (HandOff(course.detach.key, 35), list(range(16)))
        assert b.memory.dropped == []
    else:
        assert in_engine(b)
    if step == "detaching":
        # The engine's answer comes all the same.
        d = course.detach
        sent = b.say(
            DECODE.encode(),
            Detached(
                "r", d.incarnation, d.key, since=d.since, blocks=[7], computed_tokens=35, output_tokens=list(range(16))
            ),
        )
        assert [a.hand_off.key for lease in to(DECODE, Lease, sent) for a in lease.admit] == [d.key]


@pytest.mark.parametrize("step", Course.STEPS)
def test_a_client_that_goes_away_ends_the_move(step: str) -> None:
    b, course = at(step)
    sent = b.say(GATEWAY, Cancel(["r"]))
    assert not b.unit.moving.moves
    assert "r" not in b.unit.request_table.held
    assert bool(to(MIGRATOR, MoveAbort, sent)) == (step in Course.UNDONE)
    if step in Course.STILL:
        assert b.memory.dropped == [("a", course.detach.key)]
        assert to(DECODE, Abort, sent) == []
    else:
        assert to(DECODE, Abort, sent)
    if step == "detaching":
        d = course.detach
        b.memory.dropped.clear()
        b.say(
            DECODE.encode(),
            Detached(
                "r", d.incarnation, d.key, since=d.since, blocks=[7], computed_tokens=35, output_tokens=list(range(16))
            ),
        )
        assert b.memory.dropped == [("a", d.key)]
        assert b.state()["engines"]["a/decode"]["lease"] is None
    if step == "committing":
        assert b.say(b"migrator", MoveCommitted(course.stage.move)) == []
        assert counted(b)[1] == 0


@pytest.mark.parametrize("step", ["showing", "copying"])
@pytest.mark.parametrize("end", ["finished", "returned", "lost", "engine dead", "memory dead"])
def test_a_request_that_goes_another_way_meanwhile_ends_the_move(step: str, end: str) -> None:
    b = bench("r")
    Course(b).to(step)
    incarnation = b.admitted(DECODE)[-1].incarnation
    match end:
        case "finished":
            sent = b.report(DECODE, finished=["r"], running=0)
        case "returned":
            sent = b.report(DECODE, returned=[Returned("r", incarnation, [1, 2])], running=0)
        case "lost":
            sent = b.say(DECODE.encode(), EngineLost(["r"], "why"))
        case "engine dead":
            sent = b.say(b"controller/1", EngineDown("a", "decode", "killed"))
        case _:
            b.memory.die()
            sent = b.turn(after=0.1)
    assert not b.unit.moving.moves or end == "memory dead"
    assert bool(to(MIGRATOR, MoveAbort, sent)) == (step == "copying")
    assert counted(b) == (0, 0, 1)


def test_what_was_cancelled_in_the_same_turn_is_not_handed_over() -> None:
    b = bench("r")
    course = Course(b).to("last")
    b.unit.handle(GATEWAY, Cancel(["r"]), 0.0)
    sent = b.say(b"migrator", MoveStaged(course.stage.move, 3, 0.001, 50))
    assert to(MIGRATOR, MoveCommit, sent) == []
    assert len(to(MIGRATOR, MoveAbort, sent)) == 1


def test_an_engine_that_dies_after_it_let_go_leaves_its_key_behind() -> None:
    b = bench("r")
    course = Course(b).to("detaching")
    sent = b.say(b"controller/1", EngineDown("a", "decode", "killed"))
    assert to(GATEWAY, Lost, sent)
    assert ("a", course.detach.key) in b.memory.dropped


def test_a_moving_request_outlives_its_engine() -> None:
    b = bench("r")
    course = Course(b).to("last")
    sent = b.say(b"controller/1", EngineDown("a", "decode", "killed"))
    assert to(GATEWAY, Lost, sent) == []
    course.committing()


@pytest.mark.parametrize("step", Course.STEPS[2:])
def test_the_memory_manager_dies_under_a_detached_request(step: str) -> None:
    b, course = at(step)
    b.memory.die(up=True)
    sent = b.turn(after=0.1)
    assert bool(to(GATEWAY, Lost, sent)) == (step != "committing")
    if step == "detaching":
        # It had let go, and its word comes late: nobody adopts blocks that are gone.
        d = course.detach
        gone = Detached(
            d.request_id,
            d.incarnation,
            d.key,
            since=d.since,
            blocks=[7],
            computed_tokens=35,
            output_tokens=list(range(16)),
        )
        assert to(DECODE, Lease, b.say(DECODE.encode(), gone)) == []
        assert to(GATEWAY, Lost, b.say(DECODE.encode(), EngineLost(["r"], "the memory manager died"))) == []
        assert b.state()["budget_used"] == 0.0
    if step == "committing":
        # What was committed does not depend on it; what comes back has no blocks any more.
        sent = b.say(b"migrator", MoveFailed(course.stage.move, "refused"))
        assert [m.request_ids for m in to(GATEWAY, Lost, sent)] == [["r"]]


def test_a_request_does_not_stand_still_for_long_because_of_a_silent_migrator() -> None:
    b = bench("r")
    Course(b).to("last")
    b.say(SCHEDULER, Unpaired("a"))
    (lease,) = to(DECODE, Lease, b.turn(after=3.1))
    assert [admit.request_id for admit in lease.admit] == ["r"]


def test_an_engine_that_does_not_have_it_running_is_left_alone() -> None:
    b = bench("r")
    course = Course(b)
    b.say(DECODE.encode(), Blocks("r", course.show.incarnation, 0, [], 0))
    assert not b.unit.moving.moves
    assert in_engine(b)
    # Not the same one again at once, although the pair holds.
    assert to(DECODE, ShowBlocks, b.say(SCHEDULER, paired(), after=0.5)) == []
    assert to(DECODE, ShowBlocks, b.say(SCHEDULER, paired(), after=0.6))


def test_failed_moves_are_not_tried_at_full_speed() -> None:
    b = bench(*"rstuv")
    tries = 0
    for _ in range(200):
        sent = b.say(SCHEDULER, paired(), after=0.01)
        for show in to(DECODE, ShowBlocks, sent):
            tries += 1
            b.say(DECODE.encode(), Blocks(show.request_id, show.incarnation, 0, [], 0), after=0.0)
    assert 3 <= tries <= 6


def test_answers_of_earlier_lives_are_not_believed() -> None:
    b = bench("r")
    course = Course(b).to("copying")
    b.say(DECODE.encode(), Blocks("r", course.show.incarnation, 0, [1], 20))
    b.say(
        DECODE.encode(),
        Detached("r", course.show.incarnation - 1, "old", since=0, blocks=[1], computed_tokens=20, output_tokens=[1]),
    )
    assert b.memory.dropped == [("a", "old")]
    b.say(b"migrator", MoveStaged("unit:other:1", 5, 0.1, 1))
    b.say(b"migrator", MoveCommitted(course.stage.move))
    b.say(b"migrator", MoveFailed("unit:other:1", "who?"))
    assert in_engine(b)
    course.detaching()


# ---------------------------------------------------------------- the way in


def take_over(request_id: str = "in", **changes: Any) -> TakeOver:
    values: dict[str, Any] = {
        "attempt": 0,
        "gateway_epoch": "g1",
        "model": "a",
        "body": b"body",
        "waited": 3.0,
        "execution": "high",
        "output_tokens": [5, 6, 7],
        "computed_tokens": 22,
        "moves": 1,
    } | changes
    request = asking(**without(values, *ASKED))
    return TakeOver("u9:aa:1", "key-in", 2, Moving(request_id, request=request, **values))


def test_a_request_that_comes_goes_straight_to_the_decode_engine() -> None:
    b = bench()
    sent = b.say(b"migrator", take_over())
    assert [m.reason for m in to(MIGRATOR, TakenOver, sent)] == [""]
    assert to(GATEWAY, TookOver, sent) == [TookOver("in", 0, 1)]
    (lease,) = to(DECODE, Lease, sent)
    (admit,) = lease.admit
    assert (admit.hand_off, admit.output_tokens) == (HandOff("key-in", 22, foreign=True), [5, 6, 7])
    assert (admit.reply_to, admit.gateway_epoch, admit.body) == (REPLY_TO, "g1", b"body")
    assert counted(b) == (1, 0, 0)
    live = b.unit.ledger.requests["in"]
    assert (live.execution, round(b.now - live.arrival, 3)) == ("high", 3.0)
    b.report(DECODE, finished=["in"], running=0)
    assert not b.unit.request_table.held


def test_it_moves_on_with_its_count() -> None:
    b = bench()
    b.say(b"migrator", take_over("r", execution="normal"))
    course = Course(b)
    blocks = Blocks("r", course.show.incarnation, 0, [4, 9, 7], 33)
    (course.stage,) = to(MIGRATOR, MoveStage, b.say(DECODE.encode(), blocks))
    for step in ("detaching", "last", "committing"):
        getattr(course, step)()
    assert course.commit.request.moves == 2
    assert course.commit.request.waited >= 3.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gateway_epoch": "g9"}, "gateway"),
        ({"model": "x"}, "not up"),
        ({"max_tokens": 100_000}, "room"),
        ({"request_id": "r"}, "here already"),
    ],
)
def test_requests_that_are_not_taken(changes: dict[str, Any], says: str) -> None:
    b = bench("r")
    sent = b.say(b"migrator", take_over(**changes))
    (answer,) = to(MIGRATOR, TakenOver, sent)
    assert says in answer.reason
    assert set(b.unit.request_table.held) == {"r"}
    assert to(GATEWAY, TookOver, sent) == []


@pytest.mark.parametrize("what", ["engine", "memory", "retired"])
def test_a_replica_that_is_not_up_takes_nothing(what: str) -> None:
    b = bench()
    if what == "engine":
        b.say(b"controller/1", EngineDown("a", "prefill", "gone"))
    elif what == "retired":
        b.say(b"controller/1", Retire("a"))
    else:
        b.memory.die()
        b.turn(after=0.1)
    (answer,) = to(MIGRATOR, TakenOver, b.say(b"migrator", take_over()))
    assert answer.reason
    assert not b.unit.request_table.held


def test_a_later_attempt_replaces_what_was_here() -> None:
    b = bench("r")
    sent = b.say(b"migrator", take_over("r", attempt=1))
    assert [m.reason for m in to(MIGRATOR, TakenOver, sent)] == [""]
    assert [m.request_ids for m in to(DECODE, Abort, sent)] == [["r"]]
    assert b.unit.request_table.held["r"].attempt == 1


def test_a_gateway_that_greets_again_hears_who_came() -> None:
    b = bench("own")
    b.say(b"migrator", take_over())
    sent = b.say(GATEWAY, GatewayHello("g1", REPLY_TO))
    assert to(GATEWAY, TookOver, sent) == [TookOver("in", 0, 1)]


def test_its_hand_off_is_nobodys_orphan_and_shares_end_by_themselves() -> None:
    b = bench()
    b.say(b"controller/1", EngineDown("a", "decode", "gone"))
    b.say(b"a/decode", EngineHello("a", "decode", 5))
    b.say(b"migrator", take_over())
    b.memory.waiting = {"a": ["key-in", "u0:00ff:12/1", "left:12:1"]}
    b.turn(after=1.1)
    b.turn(after=1.1)
    assert b.memory.dropped == [("a", "left:12:1")]


# ---------------------------------------------------------------- replicas


def loads(sent: Sent) -> dict[str, InstanceLoad]:
    (report,) = to(SCHEDULER, Loads, sent)
    assert report.unit == "unit"
    assert report.epoch == "unit-1"
    return {load.model: load for load in report.loads}


def test_replicas_are_reported_when_greeted_and_when_something_changes() -> None:
    b = bench()
    first = loads(b.say(SCHEDULER, SchedulerHello("s1")))
    assert set(first) == {"a", "b"}
    # 400 pages are the quota, and 1,000 the most: all of the pool. A block has 4 pages and 16 tokens.
    assert first["a"] == InstanceLoad("unit", 1000 // 4 * 16, "a", layout=first["a"].layout)
    assert "16t" in first["a"].layout
    b.now += 1
    b.memory.used["a"] = 40
    b.memory.used["b"] = 600
    report = loads(b.submit("r"))
    assert report["a"].running == 1
    # What the other one has is not to be had: 1,000 pages less both, and what was promised to the prompt.
    promised = b.unit.ledger.by_name["a"].promised
    assert report["a"].capacity - report["a"].used == (1000 - 640 - promised) // 4 * 16
    assert report["a"].levels == {"normal": 1}


def test_reports_are_few() -> None:
    b = bench("r")
    b.say(SCHEDULER, SchedulerHello("s1"))
    sent: Sent = []
    for _ in range(100):
        sent += b.report(DECODE, left=60)
    # A tenth of a second in which nothing but steps happened.
    assert to(SCHEDULER, Loads, sent) == []
    assert b.unit.wakeup(b.now) <= b.now + 1.0
    assert loads(b.turn(after=1.0))["a"].running == 1
    # Changes in quick succession are told together.
    sent = b.submit("s") + b.submit("t") + b.submit("u")
    assert to(SCHEDULER, Loads, sent) == []
    assert b.unit.wakeup(b.now) <= b.now + 0.02
    report = loads(b.turn(after=0.02))["a"]
    assert report.running + report.waiting == 4


def test_loads_name_what_has_come_to_the_unit_since_the_last_ones() -> None:
    b = bench()
    b.submit("before")
    b.say(SCHEDULER, SchedulerHello("s1"))
    b.submit("r")
    b.submit("s")
    # Refused, but not on its way any more.
    b.submit("t", prompt=1_000_000)
    (report,) = to(SCHEDULER, Loads, b.turn(after=0.02))
    assert report.came == ["r", "s", "t"]
    (report,) = to(SCHEDULER, Loads, b.turn(after=1.0))
    assert report.came == []


def test_what_waits_is_reported_as_demand() -> None:
    b = bench(models=[model("a", max_num_seqs=1), model("b")])
    b.decoding("r")
    b.submit("s", prompt=40)
    b.submit("t", prompt=100)
    report = loads(b.say(SCHEDULER, SchedulerHello("s1")))["a"]
    assert (report.waiting, report.head_demand, report.queued_demand) == (2, 48, 48 + 112)


def test_a_replica_without_a_seat_has_no_room() -> None:
    b = bench(models=[model("a", max_num_seqs=2), model("b")])
    b.decoding("r")
    report = loads(b.say(SCHEDULER, SchedulerHello("s1")))["a"]
    assert report.used < report.capacity
    b.decoding("s")
    report = loads(b.turn(after=0.03))["a"]
    assert report.used == report.capacity


def test_only_what_is_up_is_reported_and_moves_in_are_counted() -> None:
    b = bench()
    b.say(b"migrator", MovingIn({"a": 2}))
    assert loads(b.say(SCHEDULER, SchedulerHello("s1")))["a"].moving_in == 2
    b.say(b"migrator", MigratorHello("m2", 9))
    b.say(b"controller/1", EngineDown("b", "decode", "gone"))
    report = loads(b.turn(after=0.03))
    assert set(report) == {"a"}
    assert report["a"].moving_in == 0
    b.memory.die()
    assert loads(b.turn(after=0.1)) == {}


def test_the_scheduler_that_came_last_is_told() -> None:
    b = bench()
    b.say(SCHEDULER, SchedulerHello("s1"))
    (report,) = to("scheduler/s2", Loads, b.say(b"scheduler/s2", SchedulerHello("s2")))
    assert len(report.loads) == 2
    sent = b.submit("r") + b.turn(after=0.03)
    assert to(SCHEDULER, Loads, sent) == []
    assert to("scheduler/s2", Loads, sent)


def test_a_replica_that_is_drained_gives_its_queue_back() -> None:
    b = bench(models=[model("a", max_num_seqs=1), model("b")])
    b.decoding("r")
    b.submit("s")
    other = b"gateway/g2"
    b.say(other, GatewayHello("g2", "ipc:///g2", 1))
    b.submit("t", gateway=other)
    b.say(SCHEDULER, SchedulerHello("s1"))
    sent = b.say(SCHEDULER, Terminating("a", True))
    assert [m.request_ids for m in to(GATEWAY, Elsewhere, sent)] == [["s"]]
    assert [m.request_ids for m in to(other, Elsewhere, sent)] == [["t"]]
    assert set(b.unit.request_table.held) == {"r"}
    assert loads(sent + b.turn(after=0.03))["a"].terminating
    assert b.state()["models"]["a"]["given_back"] == 2
    b.say(SCHEDULER, Terminating("a", False))
    assert not b.state()["models"]["a"]["terminating"]


def test_a_draining_replica_is_left_by_all() -> None:
    b = Bench()
    b.say(b"migrator", MigratorHello("m1", 7))
    b.decoding("r")
    assert to(DECODE, ShowBlocks, b.say(SCHEDULER, paired())) == [], "it is free enough"
    b.say(SCHEDULER, Terminating("a", True))
    assert to(DECODE, ShowBlocks, b.turn(after=0.03))


def test_a_retired_model_gives_back_all_that_it_has_and_lends_its_pages() -> None:
    b = bench(models=[model("a", max_num_seqs=1), model("b")])
    b.say(SCHEDULER, SchedulerHello("s1"))
    b.decoding("r")
    b.submit("s")
    sent = b.say(b"controller", Retire("a"))
    # What runs has not failed by that.
    assert [m.request_ids for m in to(GATEWAY, Elsewhere, sent)] == [["s"], ["r"]]
    assert b.memory.quotas["a"] == 0
    assert set(loads(b.turn(after=0.03))) == {"b"}
    assert to(GATEWAY, Elsewhere, b.submit("t")) == [Elsewhere(["t"], [0])]
    for phase in ("prefill", "decode"):
        sent = b.say(b"controller", EngineDown("a", phase, "stopped"))
        assert to(GATEWAY, Lost, sent) == []
    for _ in range(20):
        b.turn(after=0.5)
    assert b.memory.quotas == {"a": 0, "b": 1000}
    # b takes what it was lent back as far as it does not need it, and a has its floor first.
    b.say(b"controller", Revive("a"))
    for _ in range(3):
        b.turn(after=0.5)
    assert b.memory.quotas["a"] >= 100
    for phase in ("prefill", "decode"):
        b.say(f"a/{phase}".encode(), EngineHello("a", phase, 200))
    b.submit("u")
    assert b.admitted("a/prefill")[-1].request_id == "u"


def test_a_static_policy_lends_the_quota_and_gives_it_back() -> None:
    b = bench(policy="fcfs")
    b.say(b"controller", Retire("a"))
    assert b.memory.quotas == {"a": 0, "b": 800}
    b.memory.used["b"] = 500
    b.say(b"controller", Revive("a"), after=0.11)
    assert b.memory.quotas == {"a": 400, "b": 500}
    b.memory.used["b"] = 420
    b.turn(after=0.11)
    assert b.memory.quotas == {"a": 400, "b": 420}
    b.memory.used["b"] = 0
    b.turn(after=0.11)
    assert b.memory.quotas == {"a": 400, "b": 400}
    told = len(b.memory.set)
    b.turn(after=0.11)
    assert len(b.memory.set) == told


def test_a_migrator_is_answered() -> None:
    b = bench(migrator=False)
    assert to(MIGRATOR, Reset, b.say(b"migrator", MigratorHello("m1", 7))) == [Reset("unit-1")]
    assert b.say(b"x", MigratorHello("m1", 7)) == []


def test_messages_about_unknown_models_change_nothing() -> None:
    b = bench()
    for message in (Terminating("x", True), Retire("x"), Revive("x"), Paired("a", "unit", "x", ELSEWHERE)):
        assert b.say(SCHEDULER, message) == []
    assert not b.unit.moving.moves
