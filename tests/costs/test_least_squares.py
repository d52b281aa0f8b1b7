"""Recursive least squares: as good as all at once, following drift, never negative, not led astray by single ones."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.costs.least_squares import Matrix, RecursiveLeastSquares, inverse, non_negative


def learning(memory: float = 1e9, noise: float = 0.1) -> RecursiveLeastSquares:
    return RecursiveLeastSquares([1.0, 1.0], [[1.0, 0.5], [0.5, 1.0]], noise, memory)


def test_without_forgetting_it_is_the_ridge_regression_of_all() -> None:
    draw = random.Random(1)
    found = learning()
    rows = [
        ([x, z := draw.random()], 1.05 * x + 0.98 * z + draw.gauss(0, 0.01))
        for x in map(draw.uniform, [0] * 40, [1] * 40)
    ]
    found.scale = 0.1
    for x, y in rows:
        found.observe(x, y)
        assert found.scale <= 0.1, "errors count as they are expected"
    # R = R0 + X'X / noise^2 and r = R0 b0 + X'y / noise^2, at once.
    prior = inverse([[1.0, 0.5], [0.5, 1.0]])
    information = [[prior[i][j] + sum(100 * x[i] * x[j] for x, _ in rows) for j in range(2)] for i in range(2)]
    vector = [sum(prior[i]) + sum(100 * x[i] * y for x, y in rows) for i in range(2)]
    assert found.coefficients == pytest.approx(non_negative(information, vector), rel=1e-3)


def test_a_new_level_is_followed() -> None:
    draw = random.Random(2)
    found = learning(memory=200)
    for level in (2.0, 3.0):
        for _ in range(1000):
            x = [draw.random(), draw.random()]
            found.observe(x, level * sum(x) * draw.gauss(1.0, 0.05))
        assert found.coefficients == pytest.approx([level, level], rel=0.05)


def test_single_stalls_move_little() -> None:
    draw = random.Random(3)
    found = learning(memory=500)
    for number in range(1000):
        x = [draw.random(), draw.random()]
        found.observe(x, 1.5 * sum(x) * draw.gauss(1.0, 0.03) * (40.0 if number % 50 == 7 else 1.0))
    assert found.coefficients == pytest.approx([1.5, 1.5], rel=0.05)


def test_what_is_not_seen_keeps_the_prior_however_long() -> None:
    found = RecursiveLeastSquares([1.0, 1.0], [[1.0, 0.0], [0.0, 1.0]], 0.1, 20)
    for _ in range(10_000):
        found.observe([1.0, 0.0], 2.0)
    assert found.coefficients == pytest.approx([2.0, 1.0], rel=0.02)
    found.observe([0.0, 1.0], 1.0)
    assert found.coefficients == pytest.approx([2.0, 1.0], rel=0.02)


def test_what_moves_together_at_first_follows() -> None:
    found = RecursiveLeastSquares([1.0, 1.0], [[0.5, 0.49], [0.49, 0.5]], 0.1, 1000)
    for _ in range(100):
        found.observe([1.0, 0.0], 1.5)
    assert found.coefficients == pytest.approx([1.5, 1.5], rel=0.03)


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_active_sets_find_the_best_of_all_sets(seed: int, size: int) -> None:
    draw = random.Random(seed)
    rows = [[draw.gauss(0, 1) for _ in range(size)] for _ in range(size + 3)]
    matrix: Matrix = [
        [sum(r[i] * r[j] for r in rows) + (0.01 if i == j else 0.0) for j in range(size)] for i in range(size)
    ]
    vector = [draw.gauss(0, 3) for _ in range(size)]

    def cost(b: list[float]) -> float:
        return sum(b[i] * matrix[i][j] * b[j] for i in range(size) for j in range(size)) - 2 * sum(
            x * y for x, y in zip(b, vector, strict=True)
        )

    found = non_negative(matrix, vector)
    assert min(found) >= 0.0
    # No step away from it, of a coefficient or of two, makes it better.
    best = cost(found)
    for i, j in itertools.product(range(size), repeat=2):
        for a, b in itertools.product((-1e-3, 0.0, 1e-3), repeat=2):
            moved = [max(0.0, v + (a if k == i else 0.0) + (b if k == j else 0.0)) for k, v in enumerate(found)]
            assert cost(moved) >= best - 1e-9
