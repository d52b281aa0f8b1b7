"""What counts of what was measured lately."""

from __future__ import annotations

import pytest

from muxserve.costs.recent import recent_moments


def test_a_tail_counts_and_a_single_stall_does_not() -> None:
    # One in ten takes three times as long.
    seen = [(0.01 * n, 3.0 if n % 10 == 0 else 1.0) for n in range(1000)]
    mean, variance = recent_moments(seen)
    assert (mean, variance) == pytest.approx((1.2, 0.36))
    assert recent_moments([*seen, (10.0, 500.0)]) == pytest.approx((mean, variance), rel=0.01)
    assert recent_moments([(float(n), 9.0 if n == 3 else 1.0) for n in range(8)]) == (1.0, 0.0)
    assert recent_moments([(0.0, 2.0)]) == (2.0, 0.0)


def test_what_is_old_counts_only_where_little_is_new() -> None:
    old, new = [(float(n), 5.0) for n in range(100)], [(1000.0 + n, 1.0) for n in range(20)]
    assert recent_moments([*old, *new]) == (1.0, 0.0)
    mean, _ = recent_moments([*old, *new[:8]])
    assert mean == pytest.approx(3.0)
