"""The global scheduler: events in, decisions out."""

import pytest

from muxserve.replicas.decisions import Dispatch, Drain, Pair, RefuseRequest, Resume, Start, StopInstance
from muxserve.replicas.dispatch import NewRequest
from muxserve.replicas.global_scheduler import GlobalScheduler
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import PriorityError
from muxserve.replicas.scaling import ScalingRules
from muxserve.replicas.views import InstanceLoad
from tests.replicas.support import CAPACITY

ZERO = ScalingRules(minimum=0, maximum=2, idle_seconds=60, wake_limit=30)


def up(scheduler: GlobalScheduler, name: str, used: int = 0, running: int = 0) -> InstanceLoad:
    load = InstanceLoad(name, CAPACITY, used=used, running=running)
    scheduler.up(load)
    return load


def new(name: str, arrival: float = 0.0, demand: int = 100, scheduling: str = "normal") -> NewRequest:
    return NewRequest(name, demand, arrival, scheduling)


def test_a_burst_between_two_reports_does_not_all_go_to_one_instance() -> None:
    scheduler = GlobalScheduler("m")
    for name in "ab":
        up(scheduler, name, 5_000, 1)
    sent = [scheduler.arrive(0, new(str(n)))[0] for n in range(40)]
    assert sent[:2] == [Dispatch("0", "a"), Dispatch("1", "b")]
    assert sum(isinstance(each, Dispatch) and each.instance == "a" for each in sent) == 20


def test_requests_wait_for_an_instance_and_go_by_priority() -> None:
    scheduler = GlobalScheduler("m")
    assert scheduler.arrive(0, new("slow", 0)) == []
    assert scheduler.arrive(1, new("fast", 1, scheduling="high")) == []
    assert scheduler.arrive(2, new("gone", 2)) == []
    assert scheduler.cancel("gone")
    assert not scheduler.cancel("gone")
    up(scheduler, "a")
    assert scheduler.dispatch(3) == [Dispatch("fast", "a"), Dispatch("slow", "a")]


def test_what_no_instance_can_hold_is_refused_and_others_are_served() -> None:
    scheduler = GlobalScheduler("m")
    up(scheduler, "a")
    big = InstanceLoad("big", 2 * CAPACITY, used=CAPACITY, running=30)
    scheduler.up(big)
    assert scheduler.arrive(0, new("x", demand=CAPACITY + 1)) == [Dispatch("x", "big")]
    (refused,) = scheduler.arrive(0, new("y", demand=2 * CAPACITY + 1))
    assert isinstance(refused, RefuseRequest)
    assert not refused.late
    assert f"{2 * CAPACITY + 1} tokens" in refused.reason
    assert "shorten the prompt" in refused.reason


def test_an_unknown_priority_is_an_error_of_the_request() -> None:
    scheduler = GlobalScheduler("m")
    with pytest.raises(PriorityError):
        scheduler.arrive(0, new("x", scheduling="hgih"))
    with pytest.raises(PriorityError):
        scheduler.arrive(0, NewRequest("x", 1, 0.0, execution="vip"))
    assert not scheduler.queue


def test_a_sleeping_model_wakes_for_a_request_which_waits_with_a_limit() -> None:
    scheduler = GlobalScheduler("m", scaling=ZERO)
    assert scheduler.tick(0) == []
    assert scheduler.arrive(10, new("a", 10)) == [Start(1)]
    assert scheduler.arrive(11, new("b", 11)) == []
    assert scheduler.tick(20) == []
    (late,) = scheduler.tick(40)
    assert isinstance(late, RefuseRequest)
    assert late.late
    assert late.request_id == "a"
    assert "wake_limit" in late.reason
    load = InstanceLoad("i", CAPACITY)
    scheduler.up(load)
    assert scheduler.dispatch(40.5) == [Dispatch("b", "i")]
    assert scheduler.starting == 0


def test_a_start_that_fails_is_tried_again_while_requests_wait() -> None:
    scheduler = GlobalScheduler("m", scaling=ZERO)
    assert scheduler.arrive(0, new("a")) == [Start(1)]
    scheduler.start_failed()
    assert scheduler.tick(1) == [Start(1)]


def test_the_last_instance_drains_when_idle_and_stays_when_a_request_comes_in_time() -> None:
    scheduler = GlobalScheduler("m", scaling=ZERO)
    load = up(scheduler, "i")
    scheduler.tick(0)
    assert scheduler.tick(60) == [Drain("i")]
    load.running, load.used = 1, 10
    scheduler.report(load)
    assert scheduler.arrive(61, new("a", 61)) == [Resume("i"), Dispatch("a", "i")]


def test_drain_on_request_takes_no_new_requests_gives_away_and_is_stopped_when_empty() -> None:
    scheduler = GlobalScheduler("m", migration=MigrationRules())
    a, b = up(scheduler, "a", 100, 1), up(scheduler, "b", 5_000, 5)
    assert scheduler.drain("a") == [Drain("a")]
    assert scheduler.drain("a") == []
    assert scheduler.drain("nobody") == []
    assert scheduler.arrive(0, new("x")) == [Dispatch("x", "b")]
    # Its next report does not know yet that it is to drain.
    scheduler.report(InstanceLoad("a", CAPACITY, used=100, running=1))
    assert scheduler.tick(1) == [Pair("a", "b")]
    scheduler.report(InstanceLoad("a", CAPACITY))
    assert StopInstance("a") in scheduler.tick(2)
    scheduler.down("a")
    assert [*scheduler._loads] == ["b"]
    assert a is not b


def test_drained_on_request_is_not_resumed_by_the_load() -> None:
    rules = ScalingRules(minimum=1, maximum=3, hold=0)
    scheduler = GlobalScheduler("m", scaling=rules)
    for name in "ab":
        up(scheduler, name, 9_990, 1)
    scheduler.drain("a")
    assert scheduler.tick(0) == [Start(1)]


def test_a_new_scheduler_has_its_view_back_with_the_next_reports() -> None:
    reports = [InstanceLoad("a", CAPACITY, terminating=True, used=50, running=1), InstanceLoad("b", CAPACITY)]
    scheduler = GlobalScheduler("m", migration=MigrationRules())
    scheduler.arrive(0, new("x"))
    for each in reports:
        scheduler.report(each)
    assert scheduler.dispatch(1) == [Dispatch("x", "b")]
    assert scheduler.tick(2) == [Pair("a", "b")]


def test_how_long_a_request_has_waited_counts_from_when_it_came_here() -> None:
    """A request that has run elsewhere for minutes does not wake a model in vain."""
    scheduler = GlobalScheduler("m", scaling=ZERO)
    assert scheduler.arrive(100, new("a", arrival=0)) == [Start(1)]
    assert scheduler.tick(129) == []
    assert [type(each) for each in scheduler.tick(131)] == [RefuseRequest]


def test_what_fits_nowhere_waits_for_an_instance_that_starts() -> None:
    scheduler = GlobalScheduler("m", scaling=ScalingRules(maximum=2))
    up(scheduler, "a")
    scheduler.starting = 1
    assert scheduler.arrive(0, new("x", demand=2 * CAPACITY)) == []
    assert scheduler.arrive(1, new("y")) == [Dispatch("y", "a")]
    scheduler.up(InstanceLoad("b", 2 * CAPACITY))
    assert scheduler.dispatch(2) == [Dispatch("x", "b")]


def test_only_instances_whose_kv_is_laid_out_alike_are_paired() -> None:
    scheduler = GlobalScheduler("m", migration=MigrationRules())
    for name, layout, used in (("a", "x", CAPACITY), ("b", "y", 0), ("c", "x", 5_000), ("d", "y", CAPACITY)):
        scheduler.up(InstanceLoad(name, CAPACITY, used=used, running=1, layout=layout))
    scheduler.tick(0)
    assert scheduler.pairs == {"a": "c", "d": "b"}
