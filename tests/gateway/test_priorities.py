"""Which levels a request gets; over HTTP see test_fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.gateway.http.errors import RequestError
from muxserve.gateway.limits.priorities import MOST, Priorities, RequestLevels
from muxserve.replicas.priorities import DEFAULT_LEVELS, Level, Levels

LEVELS = Levels((Level("low", 0), Level("mid", 10), Level("high", 11)), "mid")


def test_by_default_nothing_changes() -> None:
    priority = Priorities(DEFAULT_LEVELS).of([(b"host", b"x")], None)
    assert priority == RequestLevels()
    assert (priority.queue(5), priority.engine(-5)) == (5, -5)


@given(st.sampled_from(["low", "mid", "high"]), st.sampled_from(["low", "mid", "high"]), st.integers(), st.integers())
def test_the_level_counts_for_more_than_any_priority(first: str, second: str, a: int, b: int) -> None:
    priorities = Priorities(LEVELS)
    one, other = (priorities.of([(b"x-muxserve-priority", level.encode())], None) for level in (first, second))
    if LEVELS[first].rank > LEVELS[second].rank:
        assert one.queue(a) < other.queue(b)
        assert one.engine(a) < other.engine(b)
    elif first == second and abs(a) < MOST and abs(b) < MOST:
        assert (one.queue(a) < other.queue(b)) == (a < b)
    assert abs(one.queue(a)) < 2**63


def test_a_key_s_level_is_the_default_and_the_most() -> None:
    priorities = Priorities(LEVELS)
    assert priorities.of([], "low").scheduling == "low"
    assert priorities.of([(b"x-muxserve-execution-priority", b" low ")], "mid").execution == "low"
    with pytest.raises(RequestError, match="may ask for priority 'mid' and below") as refused:
        priorities.of([(b"x-muxserve-execution-priority", b"high")], "mid")
    assert refused.value.status == 403


def test_the_more_special_header_wins() -> None:
    headers = [(b"x-muxserve-scheduling-priority", b"high"), (b"x-muxserve-priority", b"low")]
    priority = Priorities(LEVELS).of(headers, None)
    assert (priority.scheduling, priority.execution) == ("high", "low")
