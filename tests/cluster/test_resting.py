"""Which engines that rest give way to others. Pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muxserve.cluster.sleeping import those_to_end
from muxserve.spec import RestingSpec


def test_those_that_have_rested_longest_end_and_no_more_than_are_enough() -> None:
    resting, room = {"a": 3, "b": 2, "c": 4}, RestingSpec(10, 4)
    assert those_to_end(resting, 1, room) == []
    assert those_to_end(resting, 3, room) == ["a"]
    assert those_to_end(resting, 5, room) == ["a", "b"]
    assert those_to_end(resting, 10, room) == ["a", "b", "c"]
    assert those_to_end(resting, 11, room) is None
    assert those_to_end(resting, 1, RestingSpec(10, 2)) == ["a", "b"]
    assert those_to_end({}, 0, RestingSpec(0, 0)) is None


@given(
    st.dictionaries(st.text(max_size=2), st.integers(0, 20)),
    st.integers(0, 30),
    st.builds(RestingSpec, st.integers(0, 40), st.integers(0, 5)),
)
def test_there_is_room_for_those_that_are_left(resting: dict[str, int], size: int, room: RestingSpec) -> None:
    ended = those_to_end(resting, size, room)
    if ended is None:
        assert size > room.bytes or not room.models
        return

    def fits(gone: list[str]) -> bool:
        left = [taken for model, taken in resting.items() if model not in gone]
        return sum(left) + size <= room.bytes and len(left) + 1 <= room.models

    assert fits(ended)
    assert not ended or not fits(ended[:-1]), "one less would not be enough"
    assert ended == list(resting)[: len(ended)]
