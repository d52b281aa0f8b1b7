"""Every request is served to its end, wherever it goes and whoever dies."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.gateway.routing.placing import PLACE_SECONDS
from muxserve.gateway.routing.requests import Failure, RequestTable, Tracked
from muxserve.gateway.routing.router import Router
from muxserve.wire import (
    Cancel,
    Degraded,
    Elsewhere,
    Failures,
    Lost,
    Message,
    NotPlaced,
    Place,
    Placed,
    Refused,
    RequestFailed,
    ServedBefore,
    StateReply,
    StateRequest,
    Submit,
    TookOver,
    Unplace,
    Waits,
)
from tests.gateway.world import MODEL, World
from tests.support.requests import asking


class Told:
    """A router whose orders are written down. Units `a`, `b`, ... serve the model."""

    def __init__(self, units: str, scheduler: bool = False, max_tries: int = 8) -> None:
        self.table = RequestTable("gw", max_tries)
        self.router = Router(self.table)
        self.placing = self.router.placing
        self.now = 0.0
        self.learn(units, scheduler)
        for unit in units:
            self.router.unit_up(unit, f"{unit}1", 0.0)
        if scheduler:
            self.placing.scheduler_connected(0.0)

    def learn(self, units: str, scheduler: bool = False, models: tuple[str, ...] = (MODEL,)) -> None:
        self.router.learn({unit: [MODEL] for unit in units}, [MODEL] if scheduler else [], models, self.now)

    def suspect(self, units: str, *suspects: str) -> None:
        self.router.learn(
            {unit: [MODEL] for unit in units}, [], [MODEL], self.now, {(unit, MODEL) for unit in suspects}
        )

    def submit(self, front_id: str = "r") -> Tracked:
        request = Tracked(self.table.new_id(), front_id, asking(MODEL, 10, 100), arrival=self.now)
        self.router.submit(request, self.now)
        return request

    def take(self, unit: str, message: Message) -> None:
        assert self.router.take(unit, message, self.now)

    def sent(self) -> list[tuple[str, str, int]]:
        """What units were told: (unit, what, attempt or number of requests)."""
        told = [
            (unit, "submit", message.attempt)
            if isinstance(message, Submit)
            else (unit, "cancel", len(message.request_ids) if isinstance(message, Cancel) else -1)
            for unit, message in self.router.out.units
        ]
        self.router.out.units.clear()
        return told

    def asked(self) -> list[str]:
        """What the global scheduler was told."""
        told = [type(message).__name__ for message in self.router.out.scheduler]
        self.router.out.scheduler.clear()
        return told

    def failed(self) -> list[Failure]:
        """The requests that ended with an error."""
        failures = [failure for _, _, failure in self.router.out.failed]
        self.router.out.failed.clear()
        return failures

    def counted(self) -> list[str]:
        """Why requests are served again."""
        reasons = [why for _, why in self.router.out.again]
        self.router.out.again.clear()
        return reasons


# ------------------------------------------------------------ one unit


def test_a_replica_that_gives_no_sign_of_life_is_passed_over_where_others_serve() -> None:
    told = Told("ab")
    told.suspect("ab", "a")
    assert [told.submit(str(number)).unit for number in range(3)] == ["b", "b", "b"]
    told.suspect("ab", "a", "b")
    assert told.submit("x").unit == "a"  # nobody else is there
    told.suspect("ab")
    assert told.submit("y").unit == "a"


def test_with_one_replica_nobody_is_asked() -> None:
    told = Told("a")
    told.submit()
    assert told.sent() == [("a", "submit", 0)]
    assert told.asked() == []


def test_requests_wait_for_the_only_unit() -> None:
    told = Told("a")
    told.router.unit_down("a", 1.0)
    told.submit()
    assert told.sent() == []
    assert told.placing.waiting[MODEL] == 1
    told.router.unit_up("a", "a2", 2.0)
    assert told.sent() == [("a", "submit", 0)]
    assert told.counted() == []


def test_a_new_unit_scheduler_is_given_what_the_old_one_had() -> None:
    told = Told("a")
    had = told.submit("had")
    told.router.unit_down("a", 1.0)
    told.submit("had not")
    told.sent()
    told.router.unit_up("a", "a2", 2.0)
    assert told.sent() == [("a", "submit", 1), ("a", "submit", 0)]
    assert told.counted() == ["unit_restarted"]
    assert had.tries == 2


def test_after_a_break_of_the_connection_the_unit_is_told_everything_again() -> None:
    told = Told("a")
    stays, goes = told.submit("stays"), told.submit("goes")
    told.router.unit_down("a", 1.0)
    told.router.cancel(told.table.cancel(MODEL, ["goes"]))
    told.sent()
    told.router.unit_up("a", "a1", 2.0)
    assert told.router.out.units == [("a", Cancel([goes.request_id], [0])), ("a", stays.submit())]
    assert stays.attempt == 0


def test_what_was_cancelled_before_a_death_is_not_told_to_the_next() -> None:
    told = Told("a")
    told.submit()
    told.router.unit_down("a", 1.0)
    told.router.cancel(told.table.cancel(MODEL, ["r"]))
    told.sent()
    told.router.unit_up("a", "a2", 2.0)
    assert told.sent() == []


def test_what_an_engine_drops_is_served_anew_where_it_was() -> None:
    told = Told("ab")
    request = told.submit()
    told.sent()
    old_id, unit = request.request_id, request.unit
    told.router.replace(request, 1.0, "dropped")
    assert told.router.out.units == [(unit, Cancel([old_id], [0])), (unit, request.submit())]
    assert (request.attempt, request.unit) == (1, unit)
    assert request.request_id != old_id


def test_a_unit_that_hangs_is_sent_nothing_twice_again() -> None:
    told = Told("ab")
    requests = [told.submit("one"), told.submit("two")]
    assert [request.unit for request in requests] == ["a", "b"]
    told.sent()

    def repeated() -> list[str]:
        told.now += 100.0
        told.router.repeat_quiet(told.now)
        sent = [(unit, type(message)) for unit, message in told.router.out.units]
        told.router.out.units.clear()
        assert [unit for unit, kind in sent if kind is Submit] == [unit for unit, kind in sent if kind is StateRequest]
        return sorted(unit for unit, kind in sent if kind is Submit)

    assert repeated() == ["a", "b"]
    assert not told.router.take("b", StateReply({}), told.now)  # not about requests, but a sign of life
    assert repeated() == ["b"]
    told.router.unit_up("a", "a1", told.now)  # the connection was lost meanwhile
    told.sent()
    assert repeated() == ["a"]


def test_what_kills_whoever_serves_it_is_given_up() -> None:
    told = Told("a", max_tries=2)
    request = told.submit()
    told.take("a", Lost([request.request_id], [request.attempt], "died"))
    told.take("a", Lost([request.request_id], [request.attempt], "died"))
    assert told.failed() == [Failure.AGAIN]
    assert not len(told.table)


def test_refusal_counts_for_the_present_attempt_at_its_unit_only() -> None:
    told = Told("ab")
    request = told.submit()
    told.take("a", Lost([request.request_id], [request.attempt], "died"))
    assert (request.unit, request.attempt) == ("b", 1)
    told.take("b", Refused(request.request_id, 0, "no"))
    told.take("a", Refused(request.request_id, 1, "no"))
    assert (told.failed(), request.unit, request.attempt) == ([], "b", 1)


def test_what_is_too_large_for_one_unit_may_fit_into_another() -> None:
    told = Told("ab")
    request = told.submit()
    told.sent()
    told.take("a", Refused(request.request_id, 0, "no"))
    assert told.sent() == [("a", "cancel", 1), ("b", "submit", 1)]
    assert request.tries == 1
    told.take("b", Refused(request.request_id, 1, "no"))
    assert told.failed() == [Failure.NEVER]


# ------------------------------------------------------------ several units


def test_without_a_scheduler_the_one_with_the_fewest_requests_is_chosen() -> None:
    told = Told("abc")
    for n in range(6):
        told.submit(str(n))
    assert [unit for unit, _, _ in told.sent()] == list("abcabc")


def test_a_dead_unit_s_requests_go_elsewhere_at_once() -> None:
    told = Told("ab")
    told.submit("1"), told.submit("2")
    told.sent()
    told.router.unit_down("a", 1.0)
    assert told.sent() == [("b", "submit", 1)]
    assert told.counted() == ["unit_down"]
    # It was only cut off, and may serve still.
    told.router.unit_up("a", "a1", 2.0)
    assert told.sent() == [("a", "cancel", 1)]


def test_the_first_unit_that_comes_takes_those_of_the_dead() -> None:
    told = Told("ab")
    told.router.unit_down("b", 0.5)
    request = told.submit()
    told.router.unit_down("a", 1.0)
    told.sent()
    told.router.unit_up("b", "b2", 2.0)
    assert told.sent() == [("b", "submit", 1)]
    assert request.unit == "b"


def test_lost_requests_avoid_the_unit_that_lost_them() -> None:
    told = Told("ab")
    first, second = told.submit("1"), told.submit("2")
    told.sent()
    told.take("a", Lost([first.request_id, second.request_id, "unknown"], [0, 0, 0], "died"))
    assert told.sent() == [("a", "cancel", 1), ("b", "submit", 1)]
    assert second.attempt == 0  # it is at b, and what a says of it is old


def test_a_drained_unit_gives_back_what_it_has_not_begun() -> None:
    told = Told("ab")
    request = told.submit()
    told.sent()
    told.take("a", Elsewhere([request.request_id], [request.attempt]))
    assert told.sent() == [("a", "cancel", 1), ("b", "submit", 1)]
    assert request.tries == 1  # nobody died
    told.take("b", Elsewhere([request.request_id], [request.attempt]))
    assert told.placing.waiting[MODEL] == 1
    # It is not thrown from one to the other and back for as long as both are drained.
    told.sent()
    told.placing.retry(0.5)
    assert told.sent() == []
    told.placing.retry(1.5)
    assert told.sent() == [("a", "submit", 2)]


@pytest.mark.parametrize("late", [Lost, Elsewhere])
def test_late_words_about_an_attempt_spare_the_next_one(late: type[Lost] | type[Elsewhere]) -> None:
    """The request moved to another unit and comes back as a new attempt, just when its first unit speaks of the old."""
    told = Told("ab")
    request = told.submit()
    told.take("b", TookOver(request.request_id, 0, 1))
    told.router.unit_down("b", told.now)
    assert (request.unit, request.attempt, request.tries) == ("a", 1, 2)
    told.sent()
    told.counted()
    words = Lost([request.request_id], [0], "moved") if late is Lost else Elsewhere([request.request_id], [0])
    told.take("a", words)
    assert (request.unit, request.attempt, request.tries, request.refused_by) == ("a", 1, 2, ())
    assert told.sent() == []
    assert told.counted() == []


def test_a_unit_that_leaves_the_fleet() -> None:
    told = Told("ab")
    told.submit()
    told.sent()
    told.learn("b")
    assert told.sent() == [("b", "submit", 1)]
    assert told.counted() == ["unit_removed"]


def test_a_model_that_leaves_the_fleet() -> None:
    told = Told("a")
    request = told.submit()
    told.learn("a", models=())
    assert told.failed() == []  # it may finish
    told.take("a", Elsewhere([request.request_id], [request.attempt]))
    told.learn("", models=())
    assert told.failed() == [Failure.AGAIN]


@pytest.mark.parametrize("scheduler", [False, True])
def test_what_was_admitted_too_late_does_not_wait_for_a_model_that_has_left(scheduler: bool) -> None:
    told = Told("a", scheduler)
    told.learn("a", scheduler, models=())
    late = told.submit("late")
    assert bool(late.unit) is not scheduler  # its replica goes when it is empty
    told.learn("", scheduler, models=())
    assert told.failed() == [Failure.AGAIN]
    told.submit("later still")
    assert told.failed() == [Failure.AGAIN]
    assert len(told.table) == 0
    assert not told.placing.waiting


# ------------------------------------------------------------ migration


def test_a_request_moves_within_its_attempt() -> None:
    told = Told("ab")
    request = told.submit()
    told.sent()
    told.take("b", TookOver(request.request_id, 0, 1))
    assert (request.unit, request.attempt) == ("b", 0)
    assert [(r.model, *way) for r, *way in told.router.out.moved] == [(MODEL, "a", "b")]
    assert told.sent() == []
    # Its old unit did not learn that it arrived.
    told.take("a", Lost([request.request_id], [request.attempt], "destination silent"))
    assert told.sent() == []
    told.take("b", Lost([request.request_id], [request.attempt], "died"))
    assert request.attempt == 1


def test_of_two_moves_the_second_may_be_heard_of_first() -> None:
    told = Told("abc")
    request = told.submit()
    told.take("c", TookOver(request.request_id, 0, 2))
    told.take("b", TookOver(request.request_id, 0, 1))
    assert request.unit == "c"
    told.sent()
    told.take("c", Lost([request.request_id], [request.attempt], "died"))
    told.take("b", TookOver(request.request_id, 1, 1))
    assert request.unit == "b"  # moves are counted per attempt


def test_what_arrives_too_late_is_cancelled_where_it_arrived() -> None:
    told = Told("abc")
    request = told.submit()
    told.take("a", Lost([request.request_id], [request.attempt], "destination silent"))
    assert request.unit == "b"
    told.sent()
    told.take("c", TookOver(request.request_id, 0, 1))
    told.take("c", TookOver("finished long ago", 0, 1))
    assert told.sent() == [("c", "cancel", 1), ("c", "cancel", 1)]
    # Where its later life is, only the earlier is meant.
    told.take("b", TookOver(request.request_id, 0, 1))
    assert told.router.out.units == [("b", Cancel([request.request_id], [0]))]


# ------------------------------------------------------------ the global scheduler


def test_the_global_scheduler_says_where() -> None:
    told = Told("ab", scheduler=True)
    request = told.submit()
    assert told.sent() == []
    (place,) = told.router.out.scheduler
    assert isinstance(place, Place)
    assert (place.request_id, place.model, place.demand) == (request.request_id, MODEL, 11)
    told.placing.placed(Placed(request.request_id, "b"), 0.1)
    assert told.sent() == [("b", "submit", 0)]
    told.placing.placed(Placed(request.request_id, "a"), 0.1)  # once is enough
    assert told.sent() == []


def test_it_is_not_waited_for_for_long() -> None:
    told = Told("ab", scheduler=True)
    request = told.submit()
    told.asked()
    assert told.placing.next_deadline == 0.25
    told.placing.expire(0.2)
    assert told.sent() == []
    told.placing.expire(0.25)
    assert told.sent() == [("a", "submit", 0)]
    assert told.asked() == ["Unplace"]
    # While it is silent nobody waits for it, but everyone asks.
    assert not told.placing.scheduler_up
    told.submit("2")
    assert told.sent() == [("b", "submit", 0)]
    assert told.asked() == ["Place", "Unplace"]
    told.placing.placed(Placed(request.request_id, "b"), 1.0)
    assert told.placing.scheduler_up
    told.submit("3")
    assert (told.sent(), told.asked()) == ([], ["Place"])


def test_when_it_dies_the_gateway_chooses() -> None:
    told = Told("ab", scheduler=True)
    told.submit("1"), told.submit("2")
    told.asked()
    told.placing.scheduler_gone(0.1)
    assert told.sent() == [("a", "submit", 0), ("b", "submit", 0)]
    told.submit("3")
    assert told.sent() == [("a", "submit", 0)]
    assert told.asked() == []


def test_without_any_replica_a_request_waits_for_its_answer() -> None:
    told = Told("", scheduler=True)
    request = told.submit()
    assert told.asked() == ["Place"]
    told.placing.expire(5.0)
    assert told.placing.next_deadline is None
    assert (told.sent(), told.asked()) == ([], [])
    told.learn("a", scheduler=True)
    told.router.unit_up("a", "a1", 6.0)
    told.placing.placed(Placed(request.request_id, "a"), 7.0)
    assert told.sent() == [("a", "submit", 0)]


def test_a_question_may_be_lost() -> None:
    told = Told("", scheduler=True)
    told.submit()
    told.asked()
    told.placing.expire(0.3)
    told.placing.retry(1.0)
    assert told.asked() == []
    told.placing.retry(2.0)
    (again,) = told.router.out.scheduler
    # Not taken back before: the global scheduler counts how long it has waited.
    assert isinstance(again, Place)
    assert again.since == 0.0
    told.asked()
    told.placing.retry(3.0)
    assert told.asked() == []


def test_who_is_told_to_wait_waits_for_as_long_as_the_global_scheduler_answers() -> None:
    told = Told("ab", scheduler=True)
    request = told.submit()
    (place,) = told.router.out.scheduler
    assert (place.demand, place.max_tokens, place.before) == (11, 100, None)
    told.asked()
    told.placing.waits(Waits(request.request_id))
    assert told.placing.next_deadline is None
    for second in range(1, 20):
        told.placing.expire(float(second))
        told.placing.retry(float(second))
        if told.asked():
            # Asked again it has as long for an answer as the first time.
            assert told.placing.next_deadline == pytest.approx(second + PLACE_SECONDS)
            told.placing.waits(Waits(request.request_id))
    assert told.sent() == []
    assert told.placing.waiting == {MODEL: 1}
    told.placing.placed(Placed(request.request_id, "b"), 20.0)
    assert told.sent() == [("b", "submit", 0)]
    assert not told.placing.waiting
    told.placing.waits(Waits(request.request_id))
    assert not told.placing.waiting, "an answer that comes too late"


def test_who_was_told_to_wait_does_not_wait_for_one_that_hangs_or_dies() -> None:
    for dies in (True, False):
        told = Told("ab", scheduler=True)
        first, second = told.submit("1"), told.submit("2")
        for request in (first, second):
            told.placing.waits(Waits(request.request_id))
        told.asked()
        if dies:
            told.placing.scheduler_gone(1.0)
            assert told.asked() == []
        else:
            told.placing.retry(2.0)
            assert told.asked() == ["Place", "Place"]
            told.placing.expire(2.0 + PLACE_SECONDS)
            assert told.asked() == ["Unplace", "Unplace"]
            assert not told.placing.scheduler_up
        assert told.sent() == [("a", "submit", 0), ("b", "submit", 0)]
        assert not told.placing.waiting


def test_what_was_said_to_wait_may_be_cancelled_or_refused() -> None:
    told = Told("ab", scheduler=True)
    first, second = told.submit("1"), told.submit("2")
    for request in (first, second):
        told.placing.waits(Waits(request.request_id))
    told.asked()
    told.router.cancel(told.table.cancel(MODEL, ["1"]))
    assert told.asked() == ["Unplace"]
    told.placing.not_placed(NotPlaced(second.request_id, "no", False), 1.0)
    assert told.failed() == [Failure.NEVER]
    assert not told.placing.waiting
    told.placing.retry(9.0)
    assert told.asked() == []


def test_what_is_left_of_a_request_is_what_is_asked_for() -> None:
    told = Told("ab", scheduler=True)
    request = told.submit()
    request.emitted += [1, 2, 3]
    place = request.place(0.0)
    assert (place.demand, place.max_tokens, place.before) == (14, 97, ServedBefore(told.now, 3))


def test_a_request_that_goes_away_is_not_placed() -> None:
    told = Told("", scheduler=True)
    request = told.submit()
    told.asked()
    told.router.cancel(told.table.cancel(MODEL, ["r"]))
    assert isinstance(told.router.out.scheduler[0], Unplace)
    told.placing.placed(Placed(request.request_id, "a"), 1.0)
    assert told.sent() == []
    assert not told.placing.waiting


@pytest.mark.parametrize(("late", "failure"), [(True, Failure.LATE), (False, Failure.NEVER)])
def test_it_may_have_nothing_to_offer(late: bool, failure: Failure) -> None:
    told = Told("", scheduler=True)
    request = told.submit()
    told.placing.not_placed(NotPlaced(request.request_id, "no", late), 1.0)
    assert told.failed() == [failure]
    assert not len(told.table)


def test_a_stream_that_has_begun_waits_on() -> None:
    told = Told("a", scheduler=True)
    request = told.submit()
    told.placing.placed(Placed(request.request_id, "a"), 0.0)
    request.emitted += [1, 2, 3]
    told.router.take("a", Lost([request.request_id], [request.attempt], "died"), 100.0)
    place = told.router.out.scheduler[-1]
    assert isinstance(place, Place)
    assert (place.since, place.demand) == (100.0, 14)
    told.asked()
    told.placing.not_placed(NotPlaced(request.request_id, "no", True), 130.0)
    assert told.failed() == []
    assert told.asked() == ["Place"]


def test_it_may_be_behind_the_times() -> None:
    told = Told("abc", scheduler=True)
    told.router.unit_down("b", 0.1)
    first, second = told.submit("1"), told.submit("2")
    told.placing.placed(Placed(first.request_id, "b"), 0.1)
    assert told.sent() == [("a", "submit", 0)]
    told.placing.placed(Placed(second.request_id, "c"), 0.1)
    told.take("c", Elsewhere([second.request_id], [second.attempt]))
    told.sent()
    told.placing.placed(Placed(second.request_id, "c"), 0.2)
    assert told.sent() == [("a", "submit", 1)]


def test_of_a_new_unit_the_gateway_may_hear_last() -> None:
    told = Told("", scheduler=True)
    request = told.submit()
    told.placing.placed(Placed(request.request_id, "new"), 0.1)
    assert told.sent() == []
    told.asked()
    told.learn("", scheduler=True)
    assert told.asked() == ["Place"]
    told.learn("n", scheduler=True)
    told.router.unit_up("n", "n1", 0.2)
    told.placing.placed(Placed(request.request_id, "n"), 0.3)
    assert told.sent() == [("n", "submit", 0)]


def test_the_global_scheduler_is_still_asked_when_a_unit_has_left() -> None:
    told = Told("ab", scheduler=True)
    told.router.learn({"a": [MODEL]}, iter([MODEL]), iter([MODEL]), 0.1)
    told.submit()
    assert told.asked() == ["Place"]


# ------------------------------------------------------------ everything


@pytest.mark.parametrize("with_scheduler", [False, True])
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 3), st.integers(1, 200))
def test_tokens_come_once_and_in_order_whatever_happens(
    with_scheduler: bool, seed: int, units: int, events: int
) -> None:
    world = World(Random(seed), units, with_scheduler)
    for _ in range(events):
        world.event()
    world.calm_down()
    assert world.disagreements() == []
    world.finish()
    for front_id, length in world.length.items():
        assert world.streamed[front_id] == list(range(length))
        assert world.finished[front_id] == 1
    assert not len(world.table)
    assert not world.router.placing.waiting
    # Nobody serves what nobody wants.
    assert not any(unit.serving for unit in world.units.values())


# ---------------------------------------------------------------- degraded models


def test_nobody_waits_for_a_model_that_cannot_be_started() -> None:
    told = Told("a")
    waiting = told.submit()
    told.take("a", Degraded(MODEL, "no weights", 4.2))
    # What its unit still has it gives back itself.
    assert told.failed() == []
    told.take("a", Elsewhere([waiting.request_id], [waiting.attempt]))
    told.submit("s")
    assert [(text, failure) for _, text, failure in told.router.out.failed] == [
        (f"the model {MODEL!r} cannot be served at the moment (no weights); it is tried again in 5 s", Failure.DEGRADED)
    ] * 2
    told.failed()
    told.now = 3.5
    assert told.placing.retry_after(MODEL, told.now) == 1
    assert told.placing.trouble(MODEL) == "no weights"
    told.sent()
    told.take("a", Degraded(MODEL, ""))
    told.submit("t")
    assert told.sent() == [("a", "submit", 0)]
    assert told.placing.trouble(MODEL) == ""


def test_another_replica_serves_while_one_cannot_be_started() -> None:
    told = Told("ab")
    told.take("a", Degraded(MODEL, "no weights", 4.0))
    for name in "rst":
        told.submit(name)
    assert {unit for unit, _, _ in told.sent()} == {"b"}
    told.take("b", Degraded(MODEL, "no weights either", 4.0))
    told.submit("u")
    assert told.failed() == [Failure.DEGRADED]
    # A new unit scheduler says itself what is degraded.
    told.router.unit_up("a", "a2", 1.0)
    told.submit("v")
    assert ("a", "submit", 0) in told.sent()


def test_those_that_wait_for_the_global_scheduler_are_told_as_well() -> None:
    told = Told("a", scheduler=True)
    told.submit()
    told.take("a", Degraded(MODEL, "no weights", 4.0))
    assert told.failed() == [Failure.DEGRADED]
    assert told.asked() == ["Place", "Unplace"]


# ---------------------------------------------------------------- requests that engines failed with


def test_what_is_known_of_a_request_goes_with_it() -> None:
    told = Told("ab")
    request = told.submit()
    ((first, _, _),) = told.sent()
    told.take(first, Lost([request.request_id], [0], "crashed", [Failures(crashes=1)]))
    # Not where it has just failed.
    (_, (second, submit)) = told.router.out.units
    assert isinstance(submit, Submit)
    assert submit.failures == Failures(crashes=1)
    assert second != first
    told.sent()
    # A suspect stays, so that it cannot take the batch of one replica after the other along.
    told.take(second, Lost([request.request_id], [1], "crashed", [Failures(crashes=2)]))
    assert told.sent() == [(second, "cancel", 1), (second, "submit", 2)]
    told.take(second, RequestFailed(request.request_id, 2, "it crashes alone"))
    assert [(text, failure) for _, text, failure in told.router.out.failed] == [("it crashes alone", Failure.ERROR)]
    assert request.request_id not in told.table


def test_a_suspect_whose_unit_is_gone_is_served_elsewhere() -> None:
    told = Told("ab")
    request = told.submit()
    ((first, _, _),) = told.sent()
    told.take(first, Lost([request.request_id], [0], "crashed", [Failures(crashes=2)]))
    told.sent()
    told.router.unit_down(first, 1.0)
    ((second, _, _),) = told.sent()
    assert second != first


def test_an_older_life_that_failed_ends_nothing() -> None:
    told = Told("a")
    request = told.submit()
    told.take("a", Lost([request.request_id], [0], "crashed"))
    told.take("a", RequestFailed(request.request_id, 0, "late"))
    assert told.failed() == []
    assert request.request_id in told.table
