"""Colocation: conservation, and constants found again from slowdowns that they made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.costs.interference import Interference, fit, slowdowns, stretch
from muxserve.costs.latency import Load

fractions = st.floats(0.0, 1.0)
loads = st.builds(Load, fractions, fractions)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), st.floats(0.3, 1.2))
def test_stretched_demands_fit_and_are_stretched_no_further(demands: list[float], capacity: float) -> None:
    x = stretch(demands, capacity) - 1.0
    together = sum(b / (1.0 + b * x) for b in demands)
    assert together <= capacity + 1e-6
    if x > 0:
        assert together == pytest.approx(capacity, rel=1e-5)
    else:
        assert sum(demands) <= capacity


def test_two_equal_jobs_that_each_need_everything_take_twice_as_long() -> None:
    job = Load(1.0, 0.2)
    assert slowdowns(Interference(), [job, job]) == pytest.approx([2.0, 2.0])


def test_who_needs_little_of_what_is_short_loses_little() -> None:
    hungry, modest = Load(0.9, 0.1), Load(0.3, 0.1)
    of_hungry, of_modest = slowdowns(Interference(), [hungry, modest])
    assert 1.0 < of_modest < of_hungry < 1.34


@given(loads, st.lists(loads, max_size=4), loads)
def test_another_neighbour_never_helps(mine: Load, others: list[Load], more: Load) -> None:
    fewer, beside = (slowdowns(Interference(friction=0.1), jobs) for jobs in ([mine, *others], [mine, *others, more]))
    assert all(1.0 <= a <= b + 1e-6 for a, b in zip(fewer, beside, strict=False))


@pytest.mark.parametrize(
    "true", [Interference(0.7, 1.0, 0.0), Interference(1.0, 0.8, 0.1), Interference(0.6, 0.9, 0.05)]
)
def test_constants_are_found_again(true: Interference) -> None:
    kinds = [Load(0.9, 0.2), Load(0.6, 0.9), Load(0.2, 0.95), Load(0.4, 0.4)]
    measured = [(a, (b,), slowdowns(true, [a, b])[0]) for a in kinds for b in kinds]
    found = fit(measured)
    for mine, others, factor in measured:
        assert slowdowns(found, [mine, *others])[0] == pytest.approx(factor, rel=0.03)
    assert found.bandwidth == pytest.approx(true.bandwidth, abs=0.05)
    assert found.compute == pytest.approx(true.compute, abs=0.05)
    assert found.friction == pytest.approx(true.friction, abs=0.03)


def test_nothing_measured_leaves_conservation() -> None:
    assert fit([]) == Interference()
