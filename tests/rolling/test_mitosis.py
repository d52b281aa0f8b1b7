"""Macro instances grow, split, shrink and merge within their bounds."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.rolling.mitosis import Bounds, Dissolve, Found, HandleMove, Join, Leave, Mitosis


def sizes(mitosis: Mitosis) -> list[int]:
    return sorted(len(members) for members in mitosis.macros.values())


def grown(count: int, bounds: Bounds) -> Mitosis:
    mitosis = Mitosis(bounds)
    for number in range(count):
        mitosis.grow(f"u{number}")
    return mitosis


def test_it_grows_to_the_upper_bound_and_then_splits_off_the_lower() -> None:
    mitosis = Mitosis(Bounds(2, 4))
    assert mitosis.grow("u0") == [Found("u0", "m1")]
    assert mitosis.grow("u1") == [Join("u1", "m1")]
    mitosis.grow("u2")
    mitosis.grow("u3")
    changes = mitosis.grow("u4")
    assert changes == [Join("u4", "m1"), HandleMove("u0", "m1", "m2"), HandleMove("u1", "m1", "m2")]
    assert sizes(mitosis) == [2, 3]
    with pytest.raises(ValueError, match="already"):
        mitosis.grow("u4")


def test_the_fullest_that_has_room_grows() -> None:
    mitosis = grown(5, Bounds(2, 4))
    assert mitosis.grow("u5") == [Join("u5", "m1")]
    assert mitosis.grow("u6") == [Join("u6", "m2")]


def test_the_smallest_shrinks_to_the_lower_bound_then_a_full_one_until_both_fit() -> None:
    mitosis = grown(7, Bounds(2, 4))
    assert sizes(mitosis) == [3, 4]
    assert mitosis.shrink({"u0": 5.0, "u1": 1.0, "u6": 3.0}) == [Leave("u1", "m2")]
    assert sizes(mitosis) == [2, 4]
    # The small one stays at N_l; the full one goes on until both fit into N_u.
    assert mitosis.shrink({}) == [Leave("u2", "m1")]
    assert sizes(mitosis) == [2, 3]
    assert mitosis.shrink({}) == [
        Leave("u3", "m1"),
        HandleMove("u4", "m1", "m2"),
        HandleMove("u5", "m1", "m2"),
        Dissolve("m1"),
    ]
    assert sizes(mitosis) == [4]


def test_twenty_members_shrink_as_in_the_paper() -> None:
    mitosis = grown(20, Bounds(4, 16))
    seen = [sizes(mitosis)]
    while mitosis.macros:
        mitosis.shrink({})
        seen.append(sizes(mitosis))
    contraction = [[4, 16], [4, 15], [4, 14], [4, 13], [16]]
    assert seen[-len(contraction) - 16 :] == [*contraction, *([left] for left in range(15, 0, -1)), []]


def test_a_death_in_a_small_one_is_made_up_for_by_the_fullest() -> None:
    mitosis = grown(6, Bounds(2, 4))
    assert mitosis.macros == {"m1": ["u2", "u3", "u4", "u5"], "m2": ["u0", "u1"]}
    assert mitosis.gone("u0") == [Leave("u0", "m2"), HandleMove("u2", "m1", "m2")]
    assert sizes(mitosis) == [2, 3]


def test_the_last_one_dissolves() -> None:
    mitosis = grown(1, Bounds(1, 2))
    assert mitosis.shrink({}) == [Leave("u0", "m1"), Dissolve("m1")]
    assert mitosis.shrink({}) == []
    assert mitosis.gone("u0") == []


@pytest.mark.parametrize(("lower", "upper"), [(0, 4), (3, 4)])
def test_bounds_that_cannot_be_kept_are_refused(lower: int, upper: int) -> None:
    with pytest.raises(ValueError, match="N_l"):
        Bounds(lower, upper)


@given(
    st.integers(1, 4).flatmap(lambda low: st.tuples(st.just(low), st.integers(2 * low - 1, 3 * low + 2))),
    st.lists(st.sampled_from(["grow", "grow", "shrink", "gone"]), max_size=80),
    st.randoms(use_true_random=False),
)
def test_changes_describe_what_happens_and_bounds_hold(
    limits: tuple[int, int],
    events: list[str],
    random: Random,
) -> None:
    mitosis = Mitosis(Bounds(*limits))
    mirror: dict[str, list[str]] = {}
    alive: list[str] = []
    for number, event in enumerate(events):
        if event == "grow":
            alive.append(f"u{number}")
            changes = mitosis.grow(f"u{number}")
        elif event == "shrink":
            changes = mitosis.shrink({name: random.random() for name in alive})
        else:
            changes = mitosis.gone(random.choice(alive)) if alive else []
        for change in changes:
            match change:
                case Found(member, macro):
                    assert macro not in mirror
                    mirror[macro] = [member]
                case Join(member, macro):
                    mirror[macro].append(member)
                case HandleMove(member, source, target):
                    mirror[source].remove(member)
                    mirror.setdefault(target, []).append(member)
                case Leave(member, macro):
                    mirror[macro].remove(member)
                    alive.remove(member)
                case Dissolve(macro):
                    assert mirror.pop(macro) == []
        assert {name: sorted(each) for name, each in mirror.items()} == {
            name: sorted(each) for name, each in mitosis.macros.items()
        }
        assert sorted(name for each in mirror.values() for name in each) == sorted(alive)
        least = limits[0] if len(mirror) > 1 else 1
        assert all(least <= len(each) <= limits[1] for each in mirror.values())
