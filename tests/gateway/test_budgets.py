"""Budgets of tokens: what is used up and when it begins anew."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from muxserve.gateway.usage.budgets import PeriodSums, first_day, resets_at, spent, statuses
from muxserve.spec import BudgetSpec

DAYS = st.dates(date(2024, 1, 1), date(2030, 12, 31))
PERIODS = st.sampled_from(["day", "month"])


@given(PERIODS, DAYS)
def test_a_period_is_reset_when_its_last_day_has_ended(period: str, day: date) -> None:
    end = datetime.fromtimestamp(resets_at(period, day), UTC)
    assert (end.hour, end.minute, end.second) == (0, 0, 0)
    assert first_day(period, day) <= day < end.date()
    # The next day begins another period, and the one before it was of this one.
    assert first_day(period, end.date()) == end.date()
    assert first_day(period, end.date() - timedelta(days=1)) == first_day(period, day)


MODELS = st.sampled_from(["a", "b"])
USES = st.lists(st.tuples(DAYS, MODELS, st.integers(0, 1000), st.booleans()), max_size=30)


@given(USES, DAYS, PERIODS, st.sampled_from(["", "a"]))
def test_what_counts_is_what_was_used_in_the_period(
    uses: list[tuple[date, str, int, bool]], now: date, period: str, model: str
) -> None:
    """However it is divided between the database and what is not written yet."""
    uses = [each for each in uses if each[0] <= now]
    in_file = [each for each in uses if each[3]]

    def sums(first: date) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {"other": {"a": 10**9}, "one": {}}
        for day, of, tokens, _ in in_file:
            if day >= first:
                found["one"][of] = found["one"].get(of, 0) + tokens
        return found

    written = PeriodSums(now, sums(now), sums(now.replace(day=1)))
    unwritten = [(day, of, tokens) for day, of, tokens, there in uses if not there]
    (status,) = statuses("one", [BudgetSpec(period, 500, model)], now, written, unwritten)  # type: ignore[arg-type]
    begins = first_day(period, now)
    assert status.used == sum(tokens for day, of, tokens, _ in uses if day >= begins and model in ("", of))
    assert status.is_spent is (status.used >= 500)


def test_sums_of_another_day_count_no_more() -> None:
    written = PeriodSums(date(2026, 1, 31), {"one": {"a": 5}}, {"one": {"a": 50}})
    budgets = [BudgetSpec("day", 100), BudgetSpec("month", 100)]

    def used(day: date) -> list[int]:
        return [each.used for each in statuses("one", budgets, day, written, [])]

    assert used(date(2026, 1, 31)) == [5, 50]
    assert used(date(2026, 2, 1)) == [0, 0]
    earlier = PeriodSums(date(2026, 1, 30), {"one": {"a": 5}}, {"one": {"a": 50}})
    assert [each.used for each in statuses("one", budgets, date(2026, 1, 31), earlier, [])] == [0, 50]


def test_the_budget_that_is_reset_last_is_named() -> None:
    budgets = [BudgetSpec("day", 10), BudgetSpec("month", 10), BudgetSpec("month", 10, "b")]
    now = date(2026, 5, 4)
    found = [*statuses("one", budgets, now, PeriodSums(now, {}, {}), [(now, "a", 10)])]
    refused = spent("a", found)
    assert refused is not None
    assert (refused.period, refused.model) == ("month", "")
    assert refused.words == (
        "tenant one has used 10 tokens of its budget of 10 per month for all models; the budget is reset at "
        "2026-06-01T00:00:00Z"
    )
    of_b = [*statuses("one", [budgets[2]], now, PeriodSums(now, {}, {}), [(now, "b", 11)])]
    assert spent("a", of_b) is None
    assert spent("b", of_b) is not None
