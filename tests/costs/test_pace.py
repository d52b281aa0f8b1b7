"""What is learnt of how a machine's speed varies, and drawn again."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev

import pytest

from muxserve.costs.pace import Pace, PaceDraw, PaceMeter


def told(factors: list[float], steps: int = 20, scatter: float = 0.0, seed: int = 0) -> PaceMeter:
    """So many steps of a hundredth of a second in each second."""
    meter, draw = PaceMeter(), random.Random(seed)
    for second, factor in enumerate(factors):
        for step in range(steps):
            seconds = 0.01 * factor * max(0.1, draw.gauss(1.0, scatter))
            meter.told(100.0 + second + step / steps, seconds, 0.01)
    return meter


def drawn(pace: Pace, count: int, seed: int = 1) -> list[float]:
    draw = PaceDraw(pace, str(seed))
    return [draw.next() for _ in range(count)]


@pytest.mark.parametrize(("spread", "memory"), [(0.1, 0.5), (0.2, 0.8)])
def test_what_is_drawn_is_learnt_again(spread: float, memory: float) -> None:
    found = [told(drawn(Pace(spread, memory), 600, seed), scatter=0.3, seed=seed).pace for seed in range(8)]
    assert fmean(pace.spread for pace in found if pace) == pytest.approx(spread, rel=0.15)
    assert fmean(pace.memory for pace in found if pace) == pytest.approx(memory, abs=0.1)


def test_it_is_one_in_the_mean_and_as_wide_as_was_asked_for() -> None:
    factors = drawn(Pace(0.2, 0.6), 20_000)
    assert fmean(factors) == pytest.approx(1.0, abs=0.01)
    assert pstdev(map(math.log, factors)) == pytest.approx(0.2, rel=0.05)
    assert factors == drawn(Pace(0.2, 0.6), 20_000), "by the seed"
    assert factors != drawn(Pace(0.2, 0.6), 20_000, seed=2)


def test_the_scatter_of_steps_is_no_pace() -> None:
    pace = told([1.0] * 600, steps=5, scatter=0.5).pace
    assert pace is not None
    assert pace.spread < 0.08
    assert set(drawn(Pace(0.0, 0.5), 9)) == {1.0}


def test_the_scatter_of_prefill_steps_is_learnt_beside_the_pace_and_drawn_again() -> None:
    meter, draw = PaceMeter(), random.Random(3)
    for second, factor in enumerate(drawn(Pace(0.1, 0.8), 600)):
        for step in range(6):
            seconds = 0.01 * factor * math.exp(draw.gauss(0.0, 0.2))
            meter.told(100.0 + second + step / 6, seconds, 0.01)
            meter.prefilled(seconds, 0.01)
    pace = meter.pace
    assert pace is not None
    assert pace.scatter == pytest.approx(0.2, rel=0.15)
    again = PaceDraw(pace, "1")
    factors = [again.step() for _ in range(20_000)]
    assert fmean(factors) == pytest.approx(1.0, abs=0.01)
    assert pstdev(map(math.log, factors)) == pytest.approx(pace.scatter, rel=0.05)


def test_few_seconds_say_nothing_and_neither_do_those_with_hardly_a_step() -> None:
    assert told([1.0] * 50).pace is None
    assert told([1.0] * 900, steps=3).pace is None


def test_a_machine_that_stood_still_for_once_says_little() -> None:
    factors = [1.0] * 600
    factors[300:302] = [50.0, 50.0]
    pace = told(factors).pace
    assert pace is not None
    assert pace.spread < 0.06
