from __future__ import annotations

import random

import pytest

from muxserve.migration.chunks import TokenBucket


def test_no_limit() -> None:
    bucket = TokenBucket(0)
    bucket.take(1 << 40, 3.0)
    assert bucket.ready_at(3.0) == 3.0


@pytest.mark.parametrize("seed", range(5))
def test_the_average_is_kept_whatever_the_pieces(seed: int) -> None:
    draw = random.Random(seed)
    rate, burst = 1e6, 0.05
    bucket = TokenBucket(rate, burst)
    now, passed, largest = 100.0, 0, 200_000
    while now < 110.0:
        ready = bucket.ready_at(now)
        if ready > now:
            now = ready
            assert bucket.ready_at(now) == now
        piece = draw.randrange(1, largest)
        bucket.take(piece, now)
        passed += piece
    assert rate * 10 - largest <= passed <= rate * (now - 100 + burst) + largest


def test_a_pause_is_not_made_up_for() -> None:
    bucket = TokenBucket(1000.0, 0.1)
    assert bucket.ready_at(0.0) == 0.0
    bucket.take(100, 0.0)
    bucket.take(0, 1000.0)
    bucket.take(100, 1000.0)
    assert bucket.ready_at(1000.0) > 1000.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="rate"):
        TokenBucket(-1.0)
    with pytest.raises(ValueError, match="burst"):
        TokenBucket(1.0, 0.0)
