"""How long wakes take beside each other: what is learnt, and when each of several ends."""

from __future__ import annotations

import random

import pytest

from muxserve.scheduling.wake_times import WakePace


def test_what_a_wake_takes_alone_and_beside_others_is_learnt() -> None:
    chance, pace = random.Random(0), WakePace(cores=2)
    assert pace.slowdown(1) == pytest.approx(1.5)
    for _ in range(200):
        others = chance.choice([0, 1, 1, 2, 3])
        pace.learn(1.4 * (1 + 0.6 * others / 2) * chance.uniform(0.9, 1.1), others)
    # What was believed at first still counts as four wakes.
    assert pace.scale == pytest.approx(1.4, rel=0.1)
    assert pace.slowdown(1) == pytest.approx(1.3, rel=0.1)


def test_one_wake_that_met_something_else_hardly_counts() -> None:
    pace = WakePace(cores=2)
    pace.learn(500.0, 0)
    assert pace.scale < 2.5


def test_without_any_wake_beside_another_what_is_believed_of_that_stays() -> None:
    pace = WakePace(cores=2)
    for _ in range(20):
        pace.learn(1.0, 0)
    assert (pace.scale, pace.drag) == (pytest.approx(1.0), pytest.approx(1.0))


def test_wakes_end_one_after_the_other_or_side_by_side() -> None:
    pace = WakePace(cores=2, drag=1.0)
    assert pace.ends([], [1.0, 2.0, 1.0], 1, busy=0) == [1.0, 3.0, 4.0]
    # Both go on at 2/3 of the speed; the third begins when the first has ended, and then the last is alone.
    assert pace.ends([], [1.0, 2.0, 0.5], 2, busy=0) == pytest.approx([1.5, 2.75, 2.25])
    # One is under way, and a model that runs slows it down.
    assert pace.ends([0.4], [1.0], 1, busy=1) == pytest.approx([0.6, 2.1])
    assert pace.ends([], [], 2, busy=3) == []
