"""Algorithm 1, by hand and as properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.views import InstanceView, RequestView
from muxserve.replicas.virtual_usage import freeness, freeness_with
from tests.replicas.support import CAPACITY, THREE, freeness_of, instances, request, waiting

# Thirds of a headroom do not quite add up to it.
ROUNDING = 1e-6


@pytest.mark.parametrize(
    ("running", "queue", "expected"),
    [
        ([request("a", 1_000), request("b", 3_000)], [], (10_000 - 4_000) / 2),
        # Only the first of the queue counts.
        ([request("a", 2_000)], [waiting("x", 9_000), waiting("y", 5_000)], -1_000),
        # The high level's target load is 1,600 tokens; its headroom is divided among its requests.
        ([request("a", 100, "high"), request("b", 300, "high"), request("c", 500)], [], (10_000 - 900 - 8_400) / 3),
        # An idle instance is freer than with the shortest request.
        ([], [], CAPACITY),
        ([request("a", 16)], [], CAPACITY - 16),
    ],
)
def test_freeness_by_hand(running: list[RequestView], queue: list[RequestView], expected: float) -> None:
    view = InstanceView("i", CAPACITY, running=running, waiting=queue)
    assert freeness(view.load(), DEFAULT_LEVELS) == pytest.approx(expected)
    view.terminating = True
    assert freeness(view.load(), DEFAULT_LEVELS) == -math.inf


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
        after = freeness_of(InstanceView("i", view.capacity, kept, view.waiting, view.reserved), THREE)
        if before >= 0:
            assert after >= before - ROUNDING
        else:
            # Overloaded: the sum of virtual usage falls, though it is shared by fewer.
            assert after * max(1, len(kept)) >= before * len(view.running) - ROUNDING
