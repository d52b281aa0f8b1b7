"""The generators: shares of the power law, the Poisson process, bounds of lengths, and independence of models."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.workload import (
    Arrivals,
    FixedLength,
    LogNormalLengths,
    ModelLoad,
    UniformLengths,
    WorkloadError,
    generate,
    open_workload,
    power_law_rates,
)

NAMES = [f"m{i}" for i in range(20)]


@settings(deadline=None)
@given(st.integers(1, 40), st.floats(0.01, 1e4), st.floats(0, 4))
def test_power_law_splits_the_total_and_falls(count: int, total: float, alpha: float) -> None:
    rates = list(power_law_rates([f"m{i}" for i in range(count)], total, alpha).values())
    assert math.isclose(math.fsum(rates), total, rel_tol=1e-9)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(rates[0] * count**-alpha)


@pytest.mark.parametrize(("alpha", "share"), [(0.0, 0.2), (0.9, 0.53), (2.1, 0.91)])
def test_first_fifth_gets_the_papers_share(alpha: float, share: float) -> None:
    rates = list(power_law_rates(NAMES, 1.0, alpha).values())
    assert sum(rates[:4]) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    ("models", "total", "alpha"),
    [([], 1.0, 1.0), (["a", "a"], 1.0, 1.0), (["a"], 0.0, 1.0), (["a"], math.inf, 1.0), (["a"], 1.0, -1.0)],
)
def test_power_law_refuses_nonsense(models: list[str], total: float, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"model|rate|alpha"):
        power_law_rates(models, total, alpha)


def test_poisson_has_its_rate_and_its_spread() -> None:
    times = list(Arrivals().times(50.0, 200.0, random.Random(7)))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert all(gap >= 0 for gap in gaps)
    assert 0 <= times[0] <= times[-1] < 200.0
    # 10,000 expected; six standard deviations are 600.
    assert abs(len(times) - 10_000) < 600
    # Gaps of a Poisson process are exponential: their deviation equals their mean.
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)


def test_poisson_edges() -> None:
    assert list(Arrivals().times(0.0, 10.0, random.Random(1))) == []
    assert list(Arrivals().times(5.0, 0.0, random.Random(1))) == []
    for rate, duration in ((-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="must be zero or positive"):
            Arrivals().times(rate, duration, random.Random(1))


@settings(deadline=None)
@given(
    st.integers(1, 500).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 2000))),
    st.floats(0.05, 3.0),
    st.integers(0, 2**32),
)
def test_lengths_stay_inside_their_bounds(bounds: tuple[int, int], sigma: float, seed: int) -> None:
    low, high = bounds
    rng = random.Random(seed)
    for lengths in (
        FixedLength(low),
        UniformLengths(low, high),
        LogNormalLengths((low * high) ** 0.5, sigma, low, high),
    ):
        samples = [lengths.sample(rng) for _ in range(20)]
        assert all(low <= sample <= lengths.high <= high for sample in samples)
        assert all(isinstance(sample, int) for sample in samples)


def test_log_normal_keeps_its_median() -> None:
    rng = random.Random(3)
    samples = [LogNormalLengths(100, 0.5, 1, 5000).sample(rng) for _ in range(4000)]
    assert statistics.median(samples) == pytest.approx(100, rel=0.05)
    assert statistics.mean(samples) == pytest.approx(100 * math.exp(0.125), rel=0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedLength(0),
        lambda: UniformLengths(5, 4),
        lambda: LogNormalLengths(10, 0.0, 1, 20),
        lambda: LogNormalLengths(30, 1.0, 1, 20),
    ],
)
def test_lengths_refuse_nonsense(make: object) -> None:
    with pytest.raises(ValueError, match=r"lengths need|sigma|median"):
        make()  # type: ignore[operator]


def test_generate_is_seeded_ordered_and_independent_per_model() -> None:
    loads = {
        "a": ModelLoad(8.0, UniformLengths(4, 40), FixedLength(16)),
        "b": ModelLoad(2.0, FixedLength(7), UniformLengths(1, 9)),
    }
    requests = list(generate(loads, 50.0, seed=5))
    assert requests == list(generate(loads, 50.0, seed=5))
    assert requests != list(generate(loads, 50.0, seed=6))
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    assert {r.model for r in requests} == {"a", "b"}
    # Another model beside it, or another rate of it, changes nothing for "a".
    alone = list(generate({"a": loads["a"]}, 50.0, seed=5))
    assert alone == [r for r in requests if r.model == "a"]
    assert 300 < len(alone) < 500


def test_bursty_groups_are_written_as_a_specification() -> None:
    text = "bursty-groups:rate=20,alpha=0,duration=100,phase=20,active_least=0.25,active_most=0.25,prompt=8,output=8"
    requests = list(open_workload(text, [f"m{n}" for n in range(8)]))
    assert len(requests) == pytest.approx(2000, rel=0.2)
    for phase in range(5):
        active = {request.model for request in requests if 20 * phase <= request.arrival < 20 * phase + 20}
        assert 0 < len(active) < 8
    with pytest.raises(WorkloadError, match="bursty-groups excludes"):
        open_workload(f"{text},burst=2", ["a"])
    with pytest.raises(WorkloadError, match="belong to bursty-groups"):
        open_workload("poisson:rate=1,phase=3", ["a"])
