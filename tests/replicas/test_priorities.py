"""Levels: order, headroom, and what users get wrong."""

import pytest

from muxserve.replicas.priorities import DEFAULT_LEVELS, Level, Levels, PriorityError


def test_headroom_is_capacity_less_target_load_and_never_negative() -> None:
    level = Level("high", 1, 1600)
    assert level.headroom(13_616) == 12_016
    assert level.headroom(1_000) == 0
    assert Level("normal", 0).headroom(13_616) == 0


def test_an_automatic_target_load_is_the_models() -> None:
    levels = (Level("high", 1, "auto"), Level("urgent", 2, 500), Level("normal", 0))
    assert Levels(levels, auto=2000).headrooms(10_000) == {"urgent": 9_500, "high": 8_000}
    assert Levels(levels).headrooms(10_000) == {"urgent": 9_500, "high": 8_400}
    assert Levels(levels) != Levels(levels, auto=2000)


def test_levels_come_from_high_to_low_and_only_some_have_headroom() -> None:
    levels = Levels((Level("batch", -5), Level("normal", 0, 9_000), Level("high", 3, 1_000)))
    assert [level.name for level in levels] == ["high", "normal", "batch"]
    assert levels.headrooms(10_000) == {"high": 9_000, "normal": 1_000}
    assert levels.headrooms(500) == {}


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ((Level("normal", 0), Level("normal", 1)), "same name"),
        ((Level("normal", 0), Level("high", 0)), "same rank"),
        ((Level("normal", 0, -1),), "target load"),
        ((Level("high", 0),), "default priority level 'normal' is not declared; declared are high"),
        ((), "declared are none"),
    ],
)
def test_levels_that_contradict_each_other(levels: tuple[Level, ...], says: str) -> None:
    with pytest.raises(PriorityError, match=says):
        Levels(levels)


def test_unknown_level_suggests_the_one_that_is_meant() -> None:
    with pytest.raises(PriorityError, match="did you mean 'high'"):
        DEFAULT_LEVELS["hihg"]
    with pytest.raises(PriorityError, match="declared are high, normal"):
        DEFAULT_LEVELS["x"]
