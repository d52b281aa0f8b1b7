"""Colocation: conservation, and constants found again from slowdowns that they made."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muxserve.costs.interference import MOST_BROUGHT, Interference, fit, slowdowns, stretch, stretch_by_work
from muxserve.costs.latency import Load

fractions = st.floats(0.0, 1.0)
loads = st.builds(
    Load,
    fractions,
    fractions,
    st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.sampled_from([1.0, 0.5]),
)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), st.floats(0.3, 1.2))
def test_stretched_demands_fit_and_are_stretched_no_further(demands: list[float], capacity: float) -> None:
    x = stretch(demands, capacity) - 1.0
    together = sum(b / (1.0 + b * x) for b in demands)
    assert together <= capacity + 1e-6
    if x > 0:
        assert together == pytest.approx(capacity, rel=1e-5)
    else:
        assert sum(demands) <= capacity


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 0.5), st.sampled_from([1.0, 0.5])), min_size=1, max_size=6),
    st.floats(0.0, 2.0),
)
def test_work_that_jobs_bring_fits_as_well_and_has_half_at_most(
    jobs: list[tuple[float, float, float]], alone: float
) -> None:
    """`alone` comes with no job."""
    demands, brought, waits = zip(*jobs, (0.0, alone, 1.0), strict=True)
    x = stretch(demands, 1.0) - 1.0
    y = stretch_by_work(demands, x, 1.0, brought, waits)
    own = sum(b / (1.0 + b * (x + w * y)) for b, _, w in jobs)
    others = sum(f / (1.0 + b * (x + w * y)) for b, f, w in jobs) + alone
    assert own + min(MOST_BROUGHT, others) <= 1.0 + 1e-6
    if y > 0:
        assert own + min(MOST_BROUGHT, others) == pytest.approx(1.0, rel=1e-5)


def test_who_waits_less_for_others_work_leaves_more_of_it_to_the_rest() -> None:
    prefill, decode = Load(0.0, 0.5, 0.05), Load(0.0, 0.5, 0.1, waits=0.5)
    long, short = (factor - 1.0 for factor in slowdowns(Interference(), [prefill, decode]))
    assert short == pytest.approx(long / 2)
    # Both of a kind share it equally, whichever kind that is.
    alike = [slowdowns(Interference(), [load._replace(waits=waits) for load in (prefill, decode)]) for waits in (1, 2)]
    assert alike[0] == pytest.approx(alike[1])
    assert alike[0][0] == pytest.approx(alike[0][1])
    assert short < alike[0][0] - 1.0 < long
    # For each other jobs wait as before.
    full = [Load(0.0, 1.0), Load(0.0, 1.0, waits=0.5)]
    assert slowdowns(Interference(), full) == pytest.approx([2.0, 2.0])


def test_two_equal_jobs_that_each_need_everything_take_twice_as_long() -> None:
    job = Load(1.0, 0.2)
    assert slowdowns(Interference(), [job, job]) == pytest.approx([2.0, 2.0])


def test_who_needs_little_of_what_is_short_loses_little() -> None:
    hungry, modest = Load(0.9, 0.1), Load(0.3, 0.1)
    of_hungry, of_modest = slowdowns(Interference(), [hungry, modest])
    assert 1.0 < of_modest < of_hungry < 1.34


@given(loads, st.lists(loads, max_size=4), loads)
@example(Load(0.8, 5e-324, 0.4), [Load(0.0, 5e-324, 0.4), Load(0.4, 0.5), Load(0.0, 0.85)], Load(0.5, 0.69, 0.1))
@example(Load(0.3, 0.12, 0.1), [Load(0.0, 5e-324, 0.4), Load(0.5, 5e-324, 0.4), Load(1.0, 0.92)], Load(0.0, 0.0, 0.4))
def test_another_neighbour_never_helps(mine: Load, others: list[Load], more: Load) -> None:
    fewer, beside = (slowdowns(Interference(friction=0.1), jobs) for jobs in ([mine, *others], [mine, *others, more]))
    assert all(1.0 <= a <= b + 1e-6 for a, b in zip(fewer, beside, strict=False))


def test_a_job_has_the_friction_of_its_own_and_that_of_the_device() -> None:
    rough, smooth = Load(0.1, 0.5, friction=0.2), Load(0.1, 0.5)
    assert slowdowns(Interference(), [rough, smooth]) == pytest.approx([1.1, 1.0])
    assert slowdowns(Interference(friction=0.1), [rough, smooth]) == pytest.approx([1.15, 1.05])
    assert slowdowns(Interference(friction=0.1), [rough]) == [1.0]


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
