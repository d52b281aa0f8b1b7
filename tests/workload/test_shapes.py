"""Arrivals that are not Poisson: their spread, and rates that vary over time, whose mean stays what was asked for."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.workload import Arrivals, Bursts, Diurnal, Groups
from muxserve.workload.shapes import ALONE, ModelPosition, Rotation, Shape, Steps, Wave


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0, 4.0])
def test_gamma_has_its_rate_and_its_spread(cv: float) -> None:
    times = list(Arrivals(cv).times(40.0, 500.0, random.Random(5)))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    # 20,000 gaps: the standard error of their mean is cv / 141, the deviation's is larger for clumps.
    assert len(times) == pytest.approx(20_000, rel=4 * cv / 141 + 0.001)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_even_arrivals() -> None:
    times = list(Arrivals(cv=0).times(10.0, 5.0, random.Random(3)))
    assert len(times) == 50
    assert [b - a for a, b in itertools.pairwise(times)] == pytest.approx([0.1] * 49)
    assert 0 <= times[0] < 0.1


shapes = st.one_of(
    st.builds(Wave, st.floats(0, 1), st.floats(0.5, 5000), st.floats(0, 1)),
    st.builds(
        lambda levels, width: Steps([i * width for i in range(len(levels) + 1)], levels),
        st.lists(st.floats(0.1, 50), min_size=1, max_size=9),
        st.floats(0.1, 400),
    ),
)


@settings(deadline=None, max_examples=200)
@given(shapes, st.lists(st.floats(0, 1e4), min_size=2, max_size=2).map(sorted))
def test_when_inverts_mass_and_keeps_order(shape: Shape, masses: list[float]) -> None:
    first, second = (shape.when(mass) for mass in masses)
    assert shape.mass(first) == pytest.approx(masses[0], rel=1e-6, abs=1e-6)
    assert shape.mass(second) == pytest.approx(masses[1], rel=1e-6, abs=1e-6)
    assert first <= second + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_a_day_swings_around_its_mean(cv: float) -> None:
    times = list(Arrivals(cv, Diurnal(0.8)).times(50.0, 1000.0, random.Random(1)))
    assert len(times) == pytest.approx(50_000, rel=0.04)
    night = sum(t < 125 or t >= 875 for t in times) / 250
    noon = sum(375 <= t < 625 for t in times) / 250
    # The means of 1 -+ 0.8 cos over these quarters are 1 -+ 0.72.
    assert night == pytest.approx(50 * 0.28, rel=0.12)
    assert noon == pytest.approx(50 * 1.72, rel=0.12)


def test_models_can_have_their_days_apart() -> None:
    arrivals = Arrivals(shape=Diurnal(1.0, period=100.0, spread=1.0))
    early = list(arrivals.times(20.0, 100.0, random.Random(1), position=ModelPosition(0, 2)))
    late = list(arrivals.times(20.0, 100.0, random.Random(1), position=ModelPosition(1, 2)))
    assert statistics.fmean(early) == pytest.approx(50, abs=4)
    # Half a period further the rate is lowest in the middle.
    assert sum(25 <= t < 75 for t in early) > 4 * sum(25 <= t < 75 for t in late)


def test_bursts_keep_the_rate_and_their_factor() -> None:
    bursts = Bursts(factor=8.0, every=100.0, length=20.0)
    rng = random.Random(2)
    shape = bursts.shape(2000.0, rng, ALONE)
    assert shape is not None
    assert shape.mass(2000.0) == pytest.approx(2000.0)
    slopes = sorted({round(shape.mass(t + 0.001) - shape.mass(t), 6) for t in range(0, 2000)})
    assert slopes[-1] / slopes[0] == pytest.approx(8, rel=0.01)
    times = list(Arrivals(shape=bursts).times(30.0, 2000.0, random.Random(2)))
    assert len(times) == pytest.approx(60_000, rel=0.03)
    counts = [0] * 400
    for time in times:
        counts[int(time / 5)] += 1
    # Poisson counts of 150 would vary by 12.
    assert statistics.pstdev(counts) > 60


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrivals(-1.0),
        lambda: Diurnal(1.5),
        lambda: Diurnal(0.5, period=0.0),
        lambda: Diurnal(0.5, spread=2.0),
        lambda: Bursts(0.5, 10.0, 1.0),
        lambda: Bursts(2.0, 10.0, 10.0),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"cv|amplitude|period|spread|factor|length"):
        make()  # type: ignore[operator]


@given(st.integers(1, 100), st.integers(0, 999), st.integers(0, 999), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_a_group_is_that_part_of_the_models(models: int, seed: int, phase: int, one: float, other: float) -> None:
    """To the whole number below or above it: no two models stand on one place of the circle."""
    least, most = min(one, other), max(one, other)
    groups = Groups(10.0, least, most, seed)
    active = sum(groups.active(phase, ModelPosition(number, models)) for number in range(models))
    assert math.floor(least * models - 1e-6) <= active <= math.ceil(most * models + 1e-6)


def drawn_before(groups: Groups, phase: int, part: float) -> tuple[int, bool]:
    """How groups were drawn before steps were chosen by the number of models: the step, and whether one was active."""
    drawn = random.Random(f"{groups.seed}/groups/{phase}")
    least = drawn.uniform(groups.least, groups.most)
    step = drawn.randrange(1, 1000)
    return step, (part * step + drawn.random()) % 1.0 < least


@given(st.integers(1, 100), st.integers(0, 999), st.integers(0, 99))
def test_draws_that_put_no_two_models_on_one_place_stay_as_they_were(models: int, seed: int, phase: int) -> None:
    groups = Groups(seed=seed)
    for number in range(models):
        step, active = drawn_before(groups, phase, number / models)
        if math.gcd(step, models) == 1:
            assert groups.active(phase, ModelPosition(number, models)) is active


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.integers(2, 60), st.integers(0, 99), st.floats(0.1, 0.4), st.floats(0.4, 1.0))
def test_a_model_of_groups_keeps_its_rate_and_is_silent_where_others_are_active(
    models: int, seed: int, least: float, most: float
) -> None:
    groups = Groups(10.0, least, most, seed)
    for number in range(models):
        position = ModelPosition(number, models)
        shape = groups.shape(400.0, random.Random(number), position)
        assert shape is not None
        assert shape.mass(400.0) == pytest.approx(400.0)
        silent = [phase for phase in range(40) if not groups.active(phase, position)]
        if len(silent) < 40:
            for phase in silent:
                assert shape.mass(10.0 * phase) == pytest.approx(shape.mass(10.0 * (phase + 1)))


def test_a_model_is_silent_in_the_phases_of_others() -> None:
    groups, position = Groups(10.0, 0.25, 0.25, seed=3), ModelPosition(2, 4)
    times = list(Arrivals(1.0, groups).times(2.0, 400.0, random.Random(1), position))
    assert len(times) == pytest.approx(800, rel=0.2)
    assert all(groups.active(int(time // 10), position) for time in times)


@pytest.mark.parametrize("wrong", [{"least": 0.0}, {"least": 0.6}, {"most": 1.1}, {"every": 0.0}])
def test_groups_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|need"):
        Groups(**wrong)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(1, 5), st.floats(1.0, 40.0))
def test_of_a_rotation_one_group_is_active_at_a_time_and_each_keeps_its_rate(
    count: int, rounds: int, every: float
) -> None:
    whole = count * rounds * every
    shapes = [Rotation(number, count, every).shape(whole, random.Random(0), ALONE) for number in range(count)]
    assert all(shape is not None and shape.mass(whole) == pytest.approx(whole) for shape in shapes)
    for phase in range(count * rounds):
        edges = (phase * every, min(whole, (phase + 1) * every))
        active = [n for n, shape in enumerate(shapes) if shape and shape.mass(edges[1]) > shape.mass(edges[0]) + 1e-6]
        assert active == [phase % count]


@pytest.mark.parametrize("wrong", [(2, 2, 1.0), (-1, 2, 1.0), (0, 1, 0.0)])
def test_rotations_that_make_no_sense(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match=r"no group|must"):
        Rotation(*wrong)
