"""Budgets of tokens over a day and a month: what is used up, and when it begins anew. Pure: no file, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

import msgspec

from muxserve.spec import BudgetSpec

# Tokens by tenant and model.
TokenSums = Mapping[str, Mapping[str, int]]


class BudgetStatus(msgspec.Struct):
    """A budget of `tenant` with what is `used` of it; `model` is empty where it is for all models together, and
    `resets_at` in seconds since 1970."""

    tenant: str
    period: str
    model: str
    tokens: int
    used: int
    resets_at: int

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.used >= self.tokens

    @property
    def words(self) -> str:
        """What is used up, until when; for the tenant."""
        of = f"model {self.model}" if self.model else "all models"
        until = datetime.fromtimestamp(self.resets_at, UTC).isoformat().replace("+00:00", "Z")
        return (
            f"tenant {self.tenant} has used {self.used:,} tokens of its budget of {self.tokens:,} per {self.period} "
            f"for {of}; the budget is reset at {until}"
        )


@dataclass(frozen=True, slots=True)
class PeriodSums:
    """Tokens that were used in the month and on the day `day`, as the database has them."""

    day: date
    of_day: TokenSums
    of_month: TokenSums

    def of(self, period: str) -> TokenSums:
        """Those of the current day or month."""
        return self.of_day if period == "day" else self.of_month


def first_day(period: str, day: date) -> date:
    """The first day of the period that `day` is in."""
    return day if period == "day" else day.replace(day=1)


def resets_at(period: str, day: date) -> int:
    """When the period of `day` ends, in seconds since 1970."""
    after = day + timedelta(days=1) if period == "day" else (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    return round(datetime.combine(after, time(), UTC).timestamp())


def statuses(
    tenant: str,
    budgets: Iterable[BudgetSpec],
    day: date,
    written: PeriodSums,
    unwritten: Iterable[tuple[date, str, int]],
) -> Iterator[BudgetStatus]:
    """Every budget of `tenant` on `day`.

    Args:
        written: what the database has. Sums of an earlier day, or of an earlier month, count no more.
        unwritten: day, model and tokens that the tenant used and that are not in `written`.
    """
    more = list(unwritten)
    for budget in budgets:
        begins = first_day(budget.period, day)
        used = sum(tokens for used_on, model, tokens in more if used_on >= begins and budget.model in ("", model))
        if written.day >= begins:
            of_tenant = written.of(budget.period).get(tenant, {})
            used += sum(tokens for model, tokens in of_tenant.items() if budget.model in ("", model))
        yield BudgetStatus(tenant, budget.period, budget.model, budget.tokens, used, resets_at(budget.period, day))


def spent(model: str, budgets: Iterable[BudgetStatus]) -> BudgetStatus | None:
    """The budget because of which a request for `model` is refused: of those that are used up the one that is reset
    last."""
    used_up = [each for each in budgets if each.is_spent and each.model in ("", model)]
    return max(used_up, key=lambda each: (each.resets_at, not each.model), default=None)
