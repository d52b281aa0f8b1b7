"""Fitted distributions against the figures they are fitted to. Quantiles are exact functions, so nothing is random."""

from __future__ import annotations

import bisect
import math
import random
import statistics

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from muxserve.workload import CappedLengths, PowerLawLengths, QuantileLengths, UniformLengths, WorkloadError
from muxserve.workload.published import TABLE, Published, parse_lengths, published

# Relative errors that docs/workload.md admits. A power law has three parameters for five figures.
WITHIN = {"short": 0.10, "medium": 0.04, "long": 0.02}
EVEN = [(i + 0.5) / 5_000 for i in range(5_000)]


def figures(lengths: PowerLawLengths | QuantileLengths) -> Published:
    """Mean and percentiles of what `sample` returns, at evenly spread shares."""
    counts = sorted(min(lengths.high, max(lengths.low, round(lengths.quantile(share)))) for share in EVEN)
    at = [counts[int(share * len(counts))] for share in (0.5, 0.8, 0.95, 0.99)]
    return Published(statistics.fmean(counts), *at)


@pytest.mark.parametrize("name", TABLE)
def test_published_figures_come_out(name: str) -> None:
    made, row = figures(published(*f"{name} prompt".split()[:2])), TABLE[name]
    for got, wanted in zip(made, row, strict=True):
        assert got == pytest.approx(wanted, rel=WITHIN.get(name, 0.01), abs=0.5 if name not in WITHIN else 0)


def misfit(lengths: PowerLawLengths, row: Published) -> float:
    even = [(i + 0.5) / 1000 for i in range(1000)]
    mean = statistics.fmean(lengths.quantile(share) for share in even)
    made = [mean, *(lengths.quantile(share) for share in (0.5, 0.8, 0.95, 0.99))]
    return sum(math.log(got / wanted) ** 2 for got, wanted in zip(made, row, strict=True))


@pytest.mark.parametrize("name", ["short", "medium", "long"])
def test_no_other_power_law_nearby_fits_better(name: str) -> None:
    law, row = published(name, "prompt"), TABLE[name]
    assert isinstance(law, PowerLawLengths)
    best = misfit(law, row)
    for exponent in (0.97, 1.0, 1.03):
        for low in (-2, 0, 2):
            for high in (0.92, 1.0, 1.08):
                other = PowerLawLengths(law.exponent * exponent, law.low + low, round(law.high * high))
                assert other == law or misfit(other, row) > best * 0.98


@pytest.mark.parametrize("name", ["sharegpt prompt", "medium"])
def test_samples_follow_the_quantiles(name: str) -> None:
    lengths = published(*f"{name} prompt".split()[:2])
    rng = random.Random(11)
    samples = sorted(lengths.sample(rng) for _ in range(4000))
    for share in (0.1, 0.5, 0.8, 0.95):
        below = bisect.bisect_right(samples, lengths.quantile(share)) / len(samples)  # type: ignore[attr-defined]
        # Four standard deviations of a share of 4,000, and what rounding to whole tokens moves.
        assert below == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000) + 0.01)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(2, 9000), min_size=4, max_size=4, unique=True).map(sorted),
    st.floats(0.15, 0.85),
    st.integers(0, 2**32),
)
def test_any_percentiles_and_mean_that_go_together(knots: list[int], place: float, seed: int) -> None:
    shares = (0.5, 0.8, 0.95, 0.99)
    weights = (0.5, 0.3, 0.15, 0.04, 0.01)
    ends = [1, *knots, 10_000]
    least = sum(w * a for w, a in zip(weights, ends[:-1], strict=True))
    most = sum(w * b for w, b in zip(weights, ends[1:], strict=True))
    mean = least + place * (most - least)
    try:
        lengths = QuantileLengths(mean, dict(zip(shares, knots, strict=True)), 1, 10_000)
    except ValueError:
        reject()  # means near the ends need a bend that no reasonable curve has
    for share, knot in zip(shares, knots, strict=True):
        assert lengths.quantile(share) == pytest.approx(knot)
    assert statistics.fmean(map(lengths.quantile, EVEN)) == pytest.approx(mean, rel=0.02)
    assert 1 <= lengths.sample(random.Random(seed)) <= 10_000
    assert lengths.quantile(1.0) == pytest.approx(10_000)
    assert lengths.quantile(0.0) == pytest.approx(1)


def test_power_law_of_exponent_one() -> None:
    law = PowerLawLengths(1.0, 10, 1000)
    assert law.quantile(0.5) == pytest.approx(100)
    assert law.quantile(0.25) == pytest.approx(PowerLawLengths(1.000001, 10, 1000).quantile(0.25), rel=1e-4)


def test_capped() -> None:
    capped = CappedLengths(UniformLengths(1, 100), 10)
    rng = random.Random(1)
    counts = [capped.sample(rng) for _ in range(500)]
    assert max(counts) == capped.high == 10
    assert counts.count(10) / 500 == pytest.approx(0.91, abs=0.06)


@pytest.mark.parametrize(
    ("text", "sample"), [("64", {64}), ("3..4", {3, 4}), ("lognormal/5/0.1/5/5", {5}), ("powerlaw/1.5/7/7", {7})]
)
def test_names_of_distributions(text: str, sample: set[int]) -> None:
    rng = random.Random(0)
    assert {parse_lengths(text, "prompt").sample(rng) for _ in range(40)} == sample
    assert parse_lengths("sharegpt", "prompt").high != parse_lengths("sharegpt", "output").high


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shareGPT", "are not known; write sharegpt, burstgpt"),
        ("9..4", "low 9 and high 4"),
        ("a..b", "invalid literal"),
        ("lognormal/5", "are not known"),
        ("powerlaw/x/1/2", "could not convert"),
        ("sharegpt/3", "are not known"),
        ("0", "low 0"),
    ],
)
def test_mistakes_in_names(text: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        parse_lengths(text, "output")


@pytest.mark.parametrize(
    "make",
    [
        lambda: PowerLawLengths(0.0, 1, 2),
        lambda: PowerLawLengths(1.5, 3, 2),
        lambda: QuantileLengths(50, {0.5: 10, 0.4: 20}, 1, 100),
        lambda: QuantileLengths(500, {0.5: 10}, 1, 100),
        lambda: QuantileLengths(50, {0.5: 200}, 1, 100),
        lambda: CappedLengths(UniformLengths(1, 2), 0),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"exponent|low|rise|means"):
        make()  # type: ignore[operator]
