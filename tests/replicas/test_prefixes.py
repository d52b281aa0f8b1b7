"""Who gets a request of whose prompt a part is cached somewhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muxserve.replicas.dispatch import FreestOfQueues, NewRequest
from muxserve.replicas.global_scheduler import GlobalScheduler
from muxserve.replicas.prefixes import KEY_BYTES, KEY_TOKENS, PrefixAware, PrefixRecord, keys_of
from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.views import InstanceLoad
from tests.replicas.support import load


def turn(number: int, keys: int, talk: str = "talk", **more: str) -> NewRequest:
    """A turn of a conversation whose prompt has so many keys."""
    return NewRequest(str(number), keys * KEY_TOKENS + 10, 0.0, prefix=[(talk, n) for n in range(keys)], **more)


def policy_that_sent(*names: str, keys: int = 10) -> PrefixAware:
    """A policy that had only these instances when the conversation's first turn came, one each time."""
    policy = PrefixAware(DEFAULT_LEVELS)
    for name in names:
        policy.choose([load(name)], turn(0, keys))
    return policy


def test_a_conversation_returns_to_its_instance() -> None:
    policy = policy_that_sent("b")
    a, b = load("a"), load("b", used=3_000, running=1)
    assert FreestOfQueues(DEFAULT_LEVELS).choose([a, b], turn(1, 12)) is a
    assert policy.choose([a, b], turn(1, 12)) is b
    assert policy.choose([a, b], turn(2, 12, "another")) is a


def test_it_does_not_where_others_are_done_before() -> None:
    policy = policy_that_sent("b")
    a, b = load("a"), load("b", used=5_000, running=30, waiting=8, queued_demand=4_000)
    assert policy.choose([a, b], turn(1, 12)) is a
    # From now on both have it.
    assert policy.choose([load("a"), load("b")], turn(2, 12)).name == "a"
    assert policy.choose([load("a", used=2_000, running=30), load("b")], turn(3, 12)).name == "b"


def test_nor_where_there_is_no_room() -> None:
    policy = policy_that_sent("b")
    a, b = load("a", used=9_000, running=50), load("b", used=9_900, running=2)
    assert policy.choose([a, b], turn(1, 14)) is a
    full = load("a", used=9_950, running=50)
    assert policy_that_sent("b").choose([full, b], turn(2, 14)) is b


def test_headroom_is_kept_for_higher_priorities() -> None:
    policy = policy_that_sent("b")
    a, b = load("a", used=4_000, running=5), load("b", used=1_600, running=1, levels={"high": 1})
    assert policy.choose([a, b], turn(1, 12)) is a
    assert policy_that_sent("b").choose([a, b], turn(2, 12, execution="high")) is b


@given(
    st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(0, 20),
)
def test_what_is_known_nowhere_goes_to_the_freest(states: list[tuple[int, int, int]], keys: int) -> None:
    loads = [
        load(f"i{n}", used, running, waiting=waiting, queued_demand=50 * waiting)
        for n, (used, running, waiting) in enumerate(states)
    ]
    request = turn(1, keys, "new")
    assert policy_that_sent("i0").choose(loads, request) is FreestOfQueues(DEFAULT_LEVELS).choose(loads, request)


def test_the_record_holds_what_the_instance_can() -> None:
    record, small = PrefixRecord(), InstanceLoad("a", 20 * KEY_TOKENS)
    first, second = turn(1, 12).prefix, turn(2, 12, "another").prefix
    record.sent(small, first)
    record.sent(small, second)
    # The end of the prompt that came first has made room.
    assert record.cached("a", second) == 12
    assert record.cached("a", first) == 8
    assert record.cached("b", first) == 0
    record.sent(small, first)
    assert record.cached("a", first) == 12
    assert record.cached("a", second) == 8
    record.gone("a")
    assert record.cached("a", first) == 0


def test_an_instance_that_was_gone_has_nothing() -> None:
    scheduler = GlobalScheduler("m", dispatch=PrefixAware(DEFAULT_LEVELS))
    scheduler.up(load("b"))
    assert [d.instance for d in scheduler.arrive(0.0, turn(1, 10))] == ["b"]  # type: ignore[union-attr]
    scheduler.up(load("a"))
    scheduler.report(load("b", used=700, running=1))
    assert [d.instance for d in scheduler.arrive(1.0, turn(2, 11))] == ["b"]  # type: ignore[union-attr]
    scheduler.down("b")
    scheduler.up(load("b", used=700, running=1))
    scheduler.report(load("a"))
    assert [d.instance for d in scheduler.arrive(2.0, turn(3, 11))] == ["a"]  # type: ignore[union-attr]


def test_keys_come_in_one_piece() -> None:
    assert keys_of(b"") == []
    assert keys_of(b"a" * KEY_BYTES + b"b" * KEY_BYTES) == [b"a" * KEY_BYTES, b"b" * KEY_BYTES]
