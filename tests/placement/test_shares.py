from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.unit import share_out

PARTS = st.lists(
    st.tuples(st.floats(min_value=1e-6, max_value=1e9), st.integers(min_value=0, max_value=10**6)),
    min_size=1,
    max_size=20,
)


@given(PARTS, st.integers(min_value=0, max_value=10**9))
def test_everything_is_given_out_and_nobody_gets_less_than_the_minimum(
    parts: list[tuple[float, int]], extra: int
) -> None:
    weights, minimums = [w for w, _ in parts], [m for _, m in parts]
    total = sum(minimums) + extra
    shares = share_out(total, weights, minimums)
    assert sum(shares) == total
    assert all(share >= minimum for share, minimum in zip(shares, minimums, strict=True))


@given(PARTS, st.integers(min_value=1, max_value=10**9))
def test_in_proportion_where_no_minimum_binds(parts: list[tuple[float, int]], total: int) -> None:
    weights = [w for w, _ in parts]
    shares = share_out(total, weights, [0] * len(weights))
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) <= 1 + 1e-6 * total


def test_who_gets_the_minimum_takes_it_from_the_others_in_proportion() -> None:
    assert share_out(100, [98, 1, 1], [0, 20, 0]) == [79, 20, 1]


@pytest.mark.parametrize(
    ("total", "weights", "minimums"), [(10, [1, 1], [6, 5]), (10, [1, 0], [0, 0]), (10, [], []), (10, [1], [0, 0])]
)
def test_what_cannot_be_shared_is_refused(total: int, weights: list[float], minimums: list[int]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        share_out(total, weights, minimums)
