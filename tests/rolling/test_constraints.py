"""What is promised to a request before anybody knows how long its answer will be."""

from __future__ import annotations

import pytest

from muxserve.rolling.constraints import promise


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "capacity", "promised"),
    [
        (100, 0, 0, 356),
        (100, 20, 0, 120),
        (100, 9999, 5000, 356),
        (100, 0, 300, 300),
        (400, 50, 300, 400),
    ],
    ids=["nobody knows", "it says", "it says more than is usual", "a small replica", "one that outgrew the replica"],
)
def test_a_request_is_promised_what_it_has_and_what_it_may_make(
    tokens: int, max_tokens: int, capacity: int, promised: int
) -> None:
    assert promise(tokens, max_tokens, capacity, expected=256) == promised
