"""Whatever a request waits for has a name, and an end."""

from __future__ import annotations

import pytest

from muxserve.gateway.routing.patience import (
    MARGIN_SECONDS,
    STUCK_SECONDS,
    UNPLACED_SECONDS,
    Patience,
    Wait,
    say_missing_pages,
)
from muxserve.gateway.routing.requests import Failure, Tracked
from muxserve.wire import Cancel, Placed, Unplace, Waits
from tests.gateway.test_routing import Told
from tests.gateway.world import MODEL


class Watched(Told):
    """With somebody who looks for requests that have waited for too long."""

    def __init__(self, units: str, scheduler: bool = False) -> None:
        super().__init__(units, scheduler)
        self.patience = Patience(self.router)

    def look(self, seconds: float) -> None:
        """So much time passes, with a look every half second."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.placing.retry(self.now)
            self.patience.expire(self.now)

    def reasons(self) -> list[Wait]:
        return self.patience.reasons(self.now).get(MODEL, [])

    def given_up(self) -> list[tuple[Tracked, str, Failure]]:
        failed, self.router.out.failed = self.router.out.failed, []
        return failed


def test_what_each_request_waits_for_has_a_name() -> None:
    told = Watched("a", scheduler=True)
    first, second = told.submit("r"), told.submit("s")
    told.now = 2.0
    assert told.reasons() == [Wait("an answer of the global scheduler", 2, 2.0)]
    told.placing.waits(Waits(first.request_id, asleep=True))
    told.placing.placed(Placed(second.request_id, "a"), told.now)
    assert told.reasons() == [Wait("a replica of its model", 1, 2.0), Wait("the queue of unit a", 1, 2.0)]
    told.router.unit_down("a", told.now)
    assert told.reasons()[1] == Wait("unit a to come back", 1, 2.0)
    told.placing.scheduler_gone(told.now)
    assert told.reasons()[0] == Wait("unit a to come up", 1, 2.0)
    second.first_token_at = second.last_token_at = 1.5
    told.router.unit_up("a", "a2", told.now)
    assert [wait.requests for wait in told.reasons()] == [1], "one that has tokens is served"


def test_who_waits_for_pages_of_others_hears_for_how_many() -> None:
    waits = [Wait("the queue of unit a", 2), Wait("the queue of unit b", 1), Wait("a replica of its model", 1)]
    say_missing_pages(waits, {"a": 624, "b": 0})
    assert [wait.reason for wait in waits] == [
        "the queue of unit a, the oldest one for 624 pages of the pool that others hold",
        "the queue of unit b",
        "a replica of its model",
    ]


@pytest.mark.parametrize("scheduler", [False, True])
def test_a_request_that_nobody_serves_is_answered(scheduler: bool) -> None:
    told = Watched("a", scheduler)
    told.router.unit_down("a", 0.0)
    request = told.submit()
    limit = UNPLACED_SECONDS + MARGIN_SECONDS
    told.look(limit)
    assert told.given_up() == []
    told.look(1.0)
    ((failed, words, failure),) = told.given_up()
    assert (failed, failure) == (request, Failure.LATE)
    reason = "an answer of the global scheduler" if scheduler else "unit a to come up"
    assert words == f"{MODEL} was not ready within {limit:g} s: the request waited for {reason}; try again later"
    assert not len(told.table)
    assert (Unplace([request.request_id]) in told.router.out.scheduler) == scheduler


def test_a_request_waits_for_its_replica_as_long_as_the_fleet_file_says() -> None:
    told = Watched("", scheduler=True)
    told.patience.learn({MODEL: 20.0})
    request = told.submit()
    told.placing.waits(Waits(request.request_id, asleep=True))
    told.look(29.0)
    assert told.given_up() == []
    told.look(2.0)
    assert [each[0] for each in told.given_up()] == [request]


def test_a_request_whose_unit_does_not_come_back_is_answered_though_it_has_tokens() -> None:
    told = Watched("a")
    request = told.submit()
    request.first_token_at = request.last_token_at = 0.0
    told.router.unit_down("a", 0.0)
    told.look(UNPLACED_SECONDS / 2)
    told.router.unit_up("a", "a2", told.now)
    told.look(1.0)
    told.router.unit_down("a", told.now)
    told.look(UNPLACED_SECONDS)
    assert told.given_up() == [], "it had its unit back meanwhile"
    told.look(MARGIN_SECONDS + 1.0)
    assert [each[0] for each in told.given_up()] == [request]


def test_a_unit_that_brings_no_token_of_a_model_for_long_is_not_waited_for() -> None:
    told = Watched("a")
    request = told.submit()
    told.look(STUCK_SECONDS - 10.0)
    told.patience.moved(MODEL, told.now)  # those before it in the queue are served
    told.look(STUCK_SECONDS - 1.0)
    assert told.given_up() == []
    told.look(2.0)
    ((failed, words, failure),) = told.given_up()
    assert (failed, failure) == (request, Failure.LATE)
    assert words.startswith(f"no token of {MODEL} has come for {STUCK_SECONDS:g} s")
    assert ("a", Cancel([request.request_id], [request.attempt])) in told.router.out.units
