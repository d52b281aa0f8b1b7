"""Turns of models that cannot be awake together: how long they are, and when one is over."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from muxserve.scheduling.turns import (
    StoppedRequest,
    TurnModel,
    TurnRules,
    TurnStanding,
    next_due,
    turn_round,
    turns_over,
    waiting_since,
)

# Nothing bounds a turn but Aegaeon's equation.
PAPER = TurnRules(longest=4.0, first_token=1e9, switching=0.999, worthwhile=0.0)


def model(name: str = "a", step: float = 0.02, switch: float = 0.5, memory: float = 1.0, **more: float) -> TurnModel:
    return TurnModel(name, more.get("ttft", 10.0), more.get("tpot", 0.1), step, switch, memory)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_round_is_that_of_the_papers_equation(count: int) -> None:
    models = [model(str(n), step=0.01 * (n + 1), switch=0.3 + 0.1 * n) for n in range(count)]
    n = [each.tpot / each.step for each in models]
    c, load = sum(each.switch for each in models), sum(1 / each for each in n)
    alpha = max(c / (min(n) * PAPER.longest) + load, 0.5)
    found = turn_round(models, PAPER)
    for index, each in enumerate(models):
        assert found.lengths[each.name] == pytest.approx(c / (n[index] * (alpha - load)))
    assert found.attainment == pytest.approx(min(1.0, 1.0 / alpha))
    assert found.seconds == pytest.approx(c + sum(found.lengths.values()))
    assert max(found.lengths.values()) <= PAPER.longest + 1e-9


def test_tokens_last_until_the_next_turn_if_they_can() -> None:
    found = turn_round([model(str(n)) for n in range(3)], PAPER)
    assert found.attainment == 1.0
    for length in found.lengths.values():
        assert length * 5 >= found.seconds  # a second of a turn makes tokens for five


def test_models_that_are_awake_together_take_as_much_of_a_round_as_of_the_memory() -> None:
    whole = turn_round([model(str(n)) for n in range(2)], PAPER)
    halves = turn_round([model(str(n), memory=0.5) for n in range(4)], PAPER)
    assert halves.seconds == pytest.approx(whole.seconds)
    assert halves.lengths["3"] == pytest.approx(whole.lengths["1"])


def test_a_round_is_no_longer_than_first_tokens_allow_but_switches_take_a_bounded_part() -> None:
    models = [model(str(n), memory=0.5) for n in range(7)]
    rules = TurnRules(first_token=0.5, switching=0.9)
    assert turn_round(models, replace(rules, first_token=9.0)).seconds > 5.0
    assert turn_round(models, rules).seconds == pytest.approx(5.0)
    impatient = [replace(each, ttft=0.1) for each in models]
    found = turn_round(impatient, rules)
    assert found.seconds == pytest.approx(0.5 * 7 * 0.5 / 0.9)


def test_bounds_hold_whatever_the_models() -> None:
    chance = random.Random(3)
    for _ in range(500):
        models = [
            model(
                str(n),
                step=chance.choice([0.0, chance.uniform(0.001, 0.5)]),
                switch=chance.choice([0.0, chance.uniform(0.01, 3.0)]),
                memory=chance.uniform(0.1, 1.0),
                ttft=chance.uniform(0.2, 20.0),
            )
            for n in range(chance.randint(1, 8))
        ]
        rules = TurnRules(switching=chance.uniform(0.1, 0.9))
        found = turn_round(models, rules)
        switches = sum(each.memory * each.switch for each in models)
        assert switches <= rules.switching * found.seconds + 1e-9
        assert 0.0 <= found.attainment <= 1.0
        assert all(length >= 0.0 for length in found.lengths.values())


LEAVING = TurnStanding(model("a"), awake_since=0.0, leaving=True, running=3)
WAITING = TurnStanding(model("b"), waits=True)
TURN = turn_round([LEAVING.model, WAITING.model], TurnRules()).lengths["a"]


def test_a_turn_is_over_when_it_was_had_and_somebody_waits() -> None:
    assert turns_over(TURN * 0.99, [LEAVING, WAITING], TurnRules()) == []
    assert turns_over(TURN, [LEAVING, WAITING], TurnRules()) == ["a"]


@pytest.mark.parametrize(
    "standings",
    [
        [LEAVING],
        [replace(LEAVING, leaving=False), WAITING],
        [replace(LEAVING, running=0), WAITING],
        [LEAVING, replace(WAITING, waits=False)],
        # Its own requests wait for the turn after the next.
        [replace(LEAVING, waits=True)],
    ],
)
def test_nobody_stops_for_nothing(standings: list[TurnStanding]) -> None:
    assert turns_over(100.0, standings, TurnRules()) == []


def test_models_that_would_all_be_late_are_served_one_after_the_other() -> None:
    slow = [replace(each, model=replace(each.model, step=0.3)) for each in (LEAVING, WAITING)]
    assert turns_over(100.0, slow, TurnRules()) == []
    assert turns_over(100.0, slow, TurnRules(worthwhile=0.1)) == ["a"]


def test_wakes_that_compute_leave_less_for_steps() -> None:
    models = [model(str(n), step=0.03, switch=0.75, memory=0.2, ttft=4.0) for n in range(6)]
    free = turn_round(models, TurnRules())
    # A round takes `seconds` of each core, the wakes 6 * 0.75 s of one; the rest is for steps.
    found = turn_round(models, TurnRules(cores=2))
    assert (found.lengths, found.seconds) == (free.lengths, free.seconds)
    needed = sum(found.lengths.values())
    assert found.attainment == pytest.approx(free.attainment * (2 * found.seconds - 6 * 0.75) / needed)
    assert found.attainment < 0.5 < free.attainment
    assert turn_round(models, TurnRules(cores=16)).attainment == free.attainment
    # Nothing at all is left.
    assert turn_round([replace(each, switch=9.0) for each in models], TurnRules(cores=1)).attainment == 0.0
    standings = [
        TurnStanding(models[0], awake_since=0.0, leaving=True, running=1),
        *(TurnStanding(each, waits=True) for each in models[1:]),
    ]
    assert turns_over(100.0, standings, TurnRules()) == ["0"]
    assert turns_over(100.0, standings, TurnRules(cores=2)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"cores": -1},
        {"longest": 0.0},
        {"first_token": 0.0},
        {"switching": 1.0},
        {"switching": 0.0},
        {"worthwhile": 2.0},
    ],
)
def test_rules_must_make_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be above zero|parts of a whole"):
        TurnRules(**wrong)


class TestWaitingSince:
    """A model whose first tokens are due within a second, then one every 100 ms, and which is woken in 0.3 s."""

    TTFT, TPOT, SWITCH = 1.0, 0.1, 0.3

    def since(self, now: float, *stopped: tuple[float, int], others: bool = False) -> list[float]:
        """Requests that came at 10, and were stopped at the given time with the given number of tokens."""
        requests = [StoppedRequest(at, next_due(10.0, made, self.TTFT, self.TPOT)) for at, made in stopped]
        return waiting_since(now, requests, TurnRules(standstill=30.0), self.TTFT, self.SWITCH, others)

    def test_whose_client_has_tokens_in_advance_is_due_when_they_have_been_read(self) -> None:
        # 40 tokens last until 15; with 10, they have been read long ago.
        assert self.since(12.0, (12.0, 40), (12.0, 10)) == pytest.approx([14.0, 12.0])

    def test_nobody_new_waits_for_one_that_has_tokens_for_two_switches(self) -> None:
        for now, counted in ((13.0, False), (14.3, False), (14.5, True)):
            assert bool(self.since(now, (12.0, 40), others=True)) is counted
            assert self.since(now, (12.0, 40)) == pytest.approx([14.0]), "nobody else wants the turn"

    def test_the_first_that_is_due_counts_for_all(self) -> None:
        assert self.since(12.5, (12.0, 400), (12.0, 10), others=True) == pytest.approx([50.0, 12.0])

    def test_nobody_stands_still_for_longer_than_may_be(self) -> None:
        assert self.since(41.9, (12.0, 9000), others=True) == []
        assert self.since(42.0, (12.0, 9000), (41.0, 9000), others=True) == pytest.approx([12.0, 910.0])

    def test_without_any_nobody_waits(self) -> None:
        assert self.since(12.0) == self.since(12.0, others=True) == []
