"""Colocation costs what conservation says, and no less with more neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.costs.interference import slowdowns, stretch
from muxserve.costs.latency import Load

fractions = st.floats(0.0, 1.0)
loads = st.builds(Load, fractions, fractions)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8))
def test_stretched_demands_fit_and_are_stretched_no_further(demands: list[float]) -> None:
    x = stretch(demands) - 1.0
    together = sum(b / (1.0 + b * x) for b in demands)
    assert together <= 1.0 + 1e-6
    if x > 0:
        assert together == pytest.approx(1.0, rel=1e-5)
    else:
        assert sum(demands) <= 1.0


def test_two_equal_jobs_that_each_need_everything_take_twice_as_long() -> None:
    job = Load(1.0, 0.2)
    assert slowdowns([job, job]) == pytest.approx([2.0, 2.0])


def test_who_needs_little_of_what_is_short_loses_little() -> None:
    hungry, modest = Load(0.9, 0.1), Load(0.3, 0.1)
    of_hungry, of_modest = slowdowns([hungry, modest])
    assert 1.0 < of_modest < of_hungry < 1.34


@given(loads, st.lists(loads, max_size=4), loads)
def test_another_neighbour_never_helps(mine: Load, others: list[Load], more: Load) -> None:
    fewer, beside = (slowdowns(jobs) for jobs in ([mine, *others], [mine, *others, more]))
    assert all(1.0 <= a <= b + 1e-6 for a, b in zip(fewer, beside, strict=False))
