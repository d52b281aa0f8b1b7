"""Algorithm 1, by hand and as properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.views import InstanceView
from muxserve.replicas.virtual_usage import FAKE, freeness, freeness_of, freeness_with, headroom_share, virtual_usage
from tests.replicas.support import CAPACITY, THREE, instances, request, waiting

# Thirds of a headroom do not quite add up to it.
ROUNDING = 1e-6


def test_running_requests_count_with_what_they_hold() -> None:
    view = InstanceView("i", CAPACITY, running=[request("a", 1_000), request("b", 3_000)])
    assert freeness_of(view, DEFAULT_LEVELS) == (10_000 - 4_000) / 2


def test_only_the_first_of_the_queue_counts() -> None:
    queue = [waiting("x", 9_000), waiting("y", 5_000)]
    view = InstanceView("i", CAPACITY, running=[request("a", 2_000)], waiting=queue)
    assert [virtual_usage(each, view, DEFAULT_LEVELS) for each in queue] == [9_000, 0]
    assert freeness_of(view, DEFAULT_LEVELS) == -1_000


def test_headroom_is_divided_among_the_requests_of_its_level() -> None:
    view = InstanceView(
        "i", CAPACITY, running=[request("a", 100, "high"), request("b", 300, "high"), request("c", 500)]
    )
    # The high level's target load is 1,600 tokens.
    assert headroom_share("high", view, DEFAULT_LEVELS) == 8_400 / 2
    assert virtual_usage(view.running[1], view, DEFAULT_LEVELS) == 300 + 4_200
    assert virtual_usage(view.running[2], view, DEFAULT_LEVELS) == 500
    assert freeness_of(view, DEFAULT_LEVELS) == pytest.approx((10_000 - 900 - 8_400) / 3)


def test_a_terminating_instance_is_as_full_as_can_be() -> None:
    view = InstanceView("i", CAPACITY, terminating=True)
    assert virtual_usage(FAKE, view, DEFAULT_LEVELS) == math.inf
    assert freeness_of(view, DEFAULT_LEVELS) == -math.inf


def test_an_idle_instance_is_freer_than_one_with_the_shortest_request() -> None:
    idle, busy = InstanceView("i", CAPACITY), InstanceView("j", CAPACITY, running=[request("a", 16)])
    assert freeness_of(idle, DEFAULT_LEVELS) == CAPACITY > freeness_of(busy, DEFAULT_LEVELS)


@given(instances())
def test_sums_give_what_the_algorithm_gives_request_by_request(view: InstanceView) -> None:
    assert freeness(view.load(), THREE) == pytest.approx(freeness_of(view, THREE))


@given(instances(), st.integers(0, 3_000), st.sampled_from([level.name for level in THREE]))
def test_freeness_with_one_more_is_that_of_the_instance_with_it(view: InstanceView, usage: int, level: str) -> None:
    predicted = freeness_with(view.load(), THREE, usage, level)
    view.running = [*view.running, request("new", usage, level)]
    assert predicted == pytest.approx(freeness_of(view, THREE))


@given(instances(terminating=False))
def test_taking_a_request_away_never_makes_an_instance_less_free_when_it_has_room(view: InstanceView) -> None:
    before = freeness_of(view, THREE)
    for index in range(len(view.running)):
        kept = [each for n, each in enumerate(view.running) if n != index]
        after = freeness_of(InstanceView("i", view.capacity, "", kept, view.waiting, view.reserved), THREE)
        if before >= 0:
            assert after >= before - ROUNDING
        else:
            # Overloaded: the sum of virtual usage falls, though it is shared by fewer.
            assert after * max(1, len(kept)) >= before * len(view.running) - ROUNDING
