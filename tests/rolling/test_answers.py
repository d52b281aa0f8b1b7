"""How long answers are expected to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.rolling.answers import AnswerLengths


def learnt(first: int, *lengths: int) -> int:
    answers = AnswerLengths(first)
    for length in lengths:
        answers.add(length - 1, 1)
    return answers.expected


def test_the_first_expectation_holds_until_answers_show_better() -> None:
    assert learnt(256) == 256
    assert 200 < learnt(256, 20) < 256, "one answer is not enough"
    assert learnt(256, *[20] * 100) < 40


def test_lengths_that_change_are_followed() -> None:
    assert learnt(50, *[50] * 5000, *[400] * 2000) == pytest.approx(400, rel=0.03)
    assert learnt(400, *[400] * 5000, *[50] * 2000) == pytest.approx(50, rel=0.2)


def test_answers_that_go_on_count_before_they_end() -> None:
    """Short ones end first."""
    answers = AnswerLengths(100)
    for _ in range(50):
        answers.add(2 * 10, 1)
    assert answers.expected > 25, "as many are twice as long or longer"


@given(st.integers(1, 10_000), st.lists(st.integers(1, 10_000)))
def test_an_expectation_is_within_what_was_seen(first: int, lengths: list[int]) -> None:
    assert min([first, *lengths]) <= learnt(first, *lengths) <= max([first, *lengths]) + 1, "but for rounding"
