"""How much of a device has rested."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.costs.activity import LONG_SECONDS, MEMORY_SECONDS, SHORT_SECONDS, Activity, lost_in


def test_the_longer_a_pause_the_more_is_lost_up_to_all() -> None:
    pauses = [0.0, SHORT_SECONDS, (SHORT_SECONDS + LONG_SECONDS) / 2, LONG_SECONDS, math.inf]
    assert [lost_in(pause) for pause in pauses] == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])


def test_a_device_wakes_and_rests_within_the_same_moments() -> None:
    activity = Activity(10.0)
    assert activity.rested(10.0, 1.0) == 1.0
    assert activity.rested(10.0 + MEMORY_SECONDS, 1.0) == pytest.approx(1 / math.e)
    activity.passed(11.0, 1.0)
    assert activity.rested(11.0, 0.0) == pytest.approx(0.0, abs=1e-6)
    assert activity.rested(11.0 + MEMORY_SECONDS, 0.0) == pytest.approx(1 - 1 / math.e)
    assert activity.rested(12.0, 0.0) == pytest.approx(1.0)


def test_half_of_it_at_work_is_half_of_it_at_rest() -> None:
    activity = Activity()
    activity.passed(1.0, 0.5)
    assert activity.rested(1.0, 0.5) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.floats(0.0, 0.2), st.floats(0.0, 1.5)), min_size=1, max_size=20))
def test_it_is_the_same_however_often_one_looks(spans: list[tuple[float, float]]) -> None:
    seldom, often, now = Activity(), Activity(), 0.0
    for seconds, part in spans:
        often.passed(now + seconds / 3, part)
        now += seconds
        seldom.passed(now, part)
        often.passed(now, part)
        assert 0.0 <= seldom.rested(now, 0.0) <= 1.0
        assert often.rested(now, 0.0) == pytest.approx(seldom.rested(now, 0.0), abs=1e-9)
