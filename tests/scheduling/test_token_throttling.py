"""Token budgets of micro-batches: Eq. 3 of gLLM by hand, and what must hold whatever happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper.one_phase import OnePhase
from muxserve.scheduling.token_throttling import (
    BudgetInputs,
    FixedBudget,
    StepBudget,
    Throttle,
    TokenBudget,
    TokenThrottling,
)

STATES = st.builds(
    lambda waiting, decoding, ready, free, depth: BudgetInputs(waiting, decoding, min(ready, decoding), free, depth),
    st.integers(0, 100_000),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.floats(0.0, 1.0),
    st.integers(1, 16),
)


def state(waiting: int = 8000, decoding: int = 100, ready: int = 25, free: float = 1.0, depth: int = 4) -> BudgetInputs:
    return BudgetInputs(waiting, decoding, ready, free, depth)


def test_the_defaults_are_the_papers() -> None:
    assert Throttle() == Throttle(iterations=8, max_prefill=2048, min_prefill=32, kv_threshold=0.05)


@pytest.mark.parametrize(
    ("waiting", "free", "expected"),
    [
        (8000, 1.0, 1000),  # WT: 8000 / 8
        (800_000, 1.0, 2048),  # UT: #MaxP, the cache being empty
        (800_000, 0.525, 1024),  # UT: half way between the threshold and empty
        (8000, 0.525, 1000),  # WT is the smaller one
        (8000, 0.1, 107),  # UT: 2048 * 0.05 / 0.95 = 107.8
        (80, 1.0, 32),  # #MinP: 80 / 8 = 10
        (8000, 0.06, 32),  # #MinP: 2048 * 0.01 / 0.95 = 21.6
        (8000, 0.05, 0),  # suspended at the threshold
        (8000, 0.0, 0),
    ],
)
def test_prefill_is_equation_3(waiting: int, free: float, expected: int) -> None:
    assert Throttle().prefill(state(waiting, free=free)) == expected


def test_utilisation_does_not_count_while_nobody_decodes() -> None:
    # Only sequences that decode give memory back: a prompt that fills the cache must get its last tokens.
    assert Throttle().prefill(state(8000, decoding=0, free=0.01)) == 1000


def test_the_hyper_parameters_act() -> None:
    assert Throttle(iterations=2).prefill(state(2000)) == 1000
    assert Throttle(max_prefill=512).prefill(state(800_000)) == 512
    assert Throttle(min_prefill=128).prefill(state(80)) == 128
    assert Throttle(kv_threshold=0.5).prefill(state(800_000, free=0.75)) == 1024


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"iterations": 0}, "#T"),
        ({"min_prefill": 0}, "min_prefill"),
        ({"max_prefill": 16}, "32 and 16"),
        ({"kv_threshold": 1.0}, "kv_threshold"),
        ({"kv_threshold": -0.1}, "kv_threshold"),
    ],
)
def test_hyper_parameters_that_make_no_sense_are_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Throttle(**wrong)  # type: ignore[arg-type]


def test_decode_budgets_of_one_round_hold_everybody_once() -> None:
    budgets = TokenThrottling()
    assert [budgets.next(state(decoding=10, depth=4)).decode for _ in range(8)] == [2, 3, 2, 3, 2, 3, 2, 3]


def test_fewer_sequences_than_micro_batches_get_one_each() -> None:
    budgets = TokenThrottling()
    assert {budgets.next(state(decoding=2, depth=4)).decode for _ in range(8)} == {1}


def test_one_stage_decodes_all_and_throttles_prefill() -> None:
    assert TokenThrottling().next(state(8000, decoding=100, depth=1)) == StepBudget(1000, 100)


def test_the_fixed_budget_takes_all_that_are_ready_and_fills_up_with_prompts() -> None:
    assert FixedBudget(2048).next(state(ready=48, free=0.0)) == StepBudget(2000, 48)
    assert FixedBudget(32).next(state(ready=48)) == StepBudget(0, 32)
    with pytest.raises(ValueError, match="at least 1"):
        FixedBudget(0)


def test_one_phase_takes_prompts_alone_and_then_sequences_alone() -> None:
    budget = OnePhase(512)
    assert budget.next(state(8000, decoding=10)) == StepBudget(512, 0)
    assert [budget.next(state(0, decoding=10)) for _ in range(4)] == [(0, 2), (0, 3), (0, 2), (0, 3)]
    # Only sequences that decode give memory back.
    assert budget.next(state(8000, decoding=10, free=0.0)).prefill == 0
    assert budget.next(state(8000, decoding=0, free=0.0)) == StepBudget(512, 0)


@given(decoding=st.integers(1, 2000), depth=st.integers(1, 16), rounds=st.integers(1, 5))
def test_decode_budgets_differ_by_one_at_most_and_add_up(decoding: int, depth: int, rounds: int) -> None:
    budgets = TokenThrottling()
    shares = [budgets.next(state(decoding=decoding, depth=depth)).decode for _ in range(depth * rounds)]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == decoding * rounds if decoding >= depth else set(shares) == {1}


@given(states=st.lists(STATES, min_size=1, max_size=20), kind=st.sampled_from([TokenThrottling, FixedBudget, OnePhase]))
def test_budgets_are_in_bounds_and_nothing_that_could_run_is_stopped(
    states: list[BudgetInputs], kind: Callable[[], TokenBudget]
) -> None:
    budget = kind()
    for each in states:
        prefill, decode = budget.next(each)
        assert 0 <= prefill <= 2048
        assert 0 <= decode <= max(1, each.decoding)
        if each.decoding == 0:
            assert decode == 0
            assert prefill >= 1
        elif each.ready:
            assert prefill + decode >= 1


@given(one=STATES, waiting=st.integers(0, 100_000), free=st.floats(0.0, 1.0))
def test_prefill_rises_with_waiting_tokens_and_free_memory(one: BudgetInputs, waiting: int, free: float) -> None:
    throttle = Throttle()
    more = one._replace(waiting_tokens=max(one.waiting_tokens, waiting), kv_free=max(one.kv_free, free))
    assert throttle.prefill(more) >= throttle.prefill(one)
