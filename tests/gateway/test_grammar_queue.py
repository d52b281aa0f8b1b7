"""Which grammar compiles when."""

from __future__ import annotations

from muxserve.gateway.grammars.queue import GrammarQueue


def test_small_ones_first_and_as_many_at_once_as_there_are_workers() -> None:
    queue = GrammarQueue(workers=2)
    for job, size in [(1, 30), (2, 10), (3, 20)]:
        queue.add(job, size)
    assert queue.start() == [(2, True), (3, True)]
    assert queue.start() == []
    queue.remove(3)
    assert queue.start() == [(1, True)]


def test_one_that_takes_long_makes_room_for_quick_ones_and_begins_anew() -> None:
    queue = GrammarQueue(workers=1)
    queue.add(1, 5)
    queue.add(2, 5)
    assert queue.start() == [(1, True)]
    assert queue.overran(1)
    assert queue.start() == [(2, True), (1, False)]
    queue.remove(2)
    queue.add(3, 900)
    assert queue.start() == [(3, True)]
    assert not queue.overran(1)
    assert not queue.running(1)


def test_slow_ones_wait_for_each_other_not_for_quick_ones() -> None:
    queue = GrammarQueue(workers=1)
    queue.add(1, 1)
    queue.start()
    assert queue.overran(1)
    queue.add(2, 1)
    assert queue.start() == [(2, True), (1, False)]
    assert queue.overran(2)
    assert queue.start() == []
    queue.remove(1)
    assert queue.start() == [(2, False)]


def test_who_leaves_is_not_begun() -> None:
    queue = GrammarQueue(workers=1)
    for job in (1, 2, 3):
        queue.add(job, job)
    assert queue.start() == [(1, True)]
    queue.remove(2)
    queue.remove(1)
    assert queue.start() == [(3, True)]
    assert len(queue) == 1


def test_what_was_lost_begins_again() -> None:
    queue = GrammarQueue(workers=1)
    queue.add(1, 1)
    assert queue.start() == [(1, True)]
    queue.again(1)
    assert not queue.running(1)
    assert queue.start() == [(1, True)]
