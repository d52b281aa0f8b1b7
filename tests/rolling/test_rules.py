"""What processes are told of rolling prefill, and the predictions in it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.rolling.member import LatencyTargets
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.rules import RollingRules

POINTS = ((1, 0.01), (16, 0.02), (64, 0.05), (256, 0.2))
RULES = RollingRules(1.0, 0.1, POINTS, spared=None, lower=2, upper=5)


@pytest.mark.parametrize(("tokens", "seconds"), POINTS)
def test_points_are_what_was_predicted(tokens: int, seconds: float) -> None:
    assert RULES.prefill_seconds(tokens) == seconds


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(40, 0.035), (160, 0.125), (448, 0.35), (0, 0.0)], ids=["between", "too", "beyond", "none"]
)
def test_between_points_and_beyond_them_is_a_line(tokens: int, seconds: float) -> None:
    assert RULES.prefill_seconds(tokens) == pytest.approx(seconds)


def test_before_the_first_point_and_with_only_one_it_is_in_proportion() -> None:
    late = msgspec.structs.replace(RULES, prefill=((100, 0.1), (200, 0.4)))
    assert late.prefill_seconds(50) == pytest.approx(0.05)
    only = msgspec.structs.replace(RULES, prefill=((100, 0.1),))
    assert [only.prefill_seconds(tokens) for tokens in (50, 100, 300)] == pytest.approx([0.05, 0.1, 0.3])


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_longer_prompt_is_never_predicted_to_be_shorter(one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert RULES.prefill_seconds(short) <= RULES.prefill_seconds(long)


def test_they_survive_the_wire_and_are_what_policies_want() -> None:
    assert msgspec.json.decode(msgspec.json.encode(RULES), type=RollingRules) == RULES
    assert RULES.objectives == LatencyTargets(1.0, 0.1, None)
    assert RULES.bounds == Bounds(2, 5)


@pytest.mark.parametrize("wrong", [{"ttft": 0.0}, {"tpot": -1.0}, {"spared": 1.0}])
def test_objectives_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        _ = msgspec.structs.replace(RULES, **wrong).objectives


@pytest.mark.parametrize("wrong", [{"lower": 0}, {"lower": 4, "upper": 6}])
def test_bounds_that_cannot_be_kept_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="N_u"):
        _ = msgspec.structs.replace(RULES, **wrong).bounds
