"""Who gets a new request."""

import random

from hypothesis import given
from hypothesis import strategies as st

from muxserve.replicas.dispatch import DispatchQueue, FreestOfQueues, NewRequest
from muxserve.replicas.priorities import DEFAULT_LEVELS
from tests.replicas.support import load

NEW = NewRequest("new", 100, 0.0)
FREEST = FreestOfQueues(DEFAULT_LEVELS)


def test_the_highest_freeness_counts_and_not_the_least_memory() -> None:
    # a: room for 1,000 steps of each of its two; b: less memory in use, but eight share what is left.
    a, b = load("a", used=8_000, running=2), load("b", used=4_000, running=8)
    assert FREEST.choose([a, b], NEW) is a
    # All that wait count, also behind the first.
    a = load("a", 9_000, 10, waiting=5, head_demand=2_000, queued_demand=10_000)
    b = load("b", 9_500, 10, waiting=1, head_demand=2_000, queued_demand=2_000)
    assert FREEST.choose([a, b], NEW) is b


def test_the_batch_of_an_overloaded_instance_does_not_make_it_freer() -> None:
    small = load("small", 9_000, 2, waiting=1, queued_demand=2_000)
    large = load("large", 9_000, 40, waiting=1, queued_demand=3_000)
    assert FREEST.choose([large, small], NEW) is small


def test_headroom_is_kept_from_lower_priorities_only() -> None:
    cleared, mixed = load("cleared", 1_000, 1, levels={"high": 1}), load("mixed", 4_000, 5)
    assert FREEST.choose([cleared, mixed], NEW) is mixed
    assert FREEST.choose([cleared, mixed], NewRequest("vip", 100, 0.0, execution="high")) is cleared
    # The order in queues is another matter.
    assert FREEST.choose([cleared, mixed], NewRequest("first", 100, 0.0, scheduling="high")) is mixed


@given(st.lists(st.tuples(st.sampled_from(["high", "normal"]), st.integers(0, 5), st.booleans()), max_size=30))
def test_the_queue_is_by_priority_then_first_come_first_served(entries: list[tuple[str, int, bool]]) -> None:
    queue = DispatchQueue(DEFAULT_LEVELS)
    expected = []
    for number, (level, arrival, cancelled) in enumerate(entries):
        queue.push(NewRequest(str(number), 1, float(arrival), scheduling=level), float(number))
        if not cancelled:
            expected.append((level != "high", arrival, number))
    for number, (_, _, cancelled) in enumerate(entries):
        if cancelled:
            assert queue.remove(str(number))
            assert not queue.remove(str(number))
    assert len(queue) == len(expected)
    order = []
    while (popped := queue.pop()) is not None:
        request, since = popped
        assert since == int(request.request_id)
        order.append(int(request.request_id))
    assert order == [number for _, _, number in sorted(expected)]


def test_a_request_that_left_the_queue_may_come_back() -> None:
    queue = DispatchQueue(DEFAULT_LEVELS)
    queue.push(NewRequest("a", 1, 0.0), 0)
    queue.remove("a")
    queue.push(NewRequest("b", 1, 1.0), 1)
    queue.push(NewRequest("a", 1, 2.0), 2)
    popped = [queue.pop(), queue.pop(), queue.pop()]
    assert [(each[0].request_id, each[1]) if each else None for each in popped] == [("b", 1), ("a", 2), None]


def test_a_request_that_is_sent_again_has_waited_since_it_came_first() -> None:
    queue = DispatchQueue(DEFAULT_LEVELS)
    queue.push(NewRequest("a", 1, 0.0), 5)
    queue.push(NewRequest("a", 2, 0.0), 9)
    assert queue.pop() == (NewRequest("a", 2, 0.0), 5)
    assert queue.pop() is None


def test_a_queue_that_nobody_takes_from_does_not_grow_with_those_that_left() -> None:
    queue = DispatchQueue(DEFAULT_LEVELS)
    for number in range(1000):
        queue.push(NewRequest(str(number), 1, 0.0), 0)
        if number % 100:
            queue.remove(str(number))
    assert len(queue) == 10
    assert len(queue._heap) < 100
    assert [int(queue.pop()[0].request_id) for _ in range(10)] == list(range(0, 1000, 100))  # type: ignore[index]


def test_freest_spreads_requests_of_equal_size_evenly() -> None:
    loads = [load(f"i{n}") for n in range(7)]
    rng = random.Random(3)
    for _ in range(700):
        chosen = FREEST.choose(loads, NEW)
        chosen.used += 10
        chosen.running += 1
        rng.shuffle(loads)
    assert {each.running for each in loads} == {100}
