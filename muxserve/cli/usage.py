"""`muxserve usage`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

from muxserve.cli.http import HTTPFailure, get_json
from muxserve.cli.output import console, escape, print_error
from muxserve.cli.which import endpoint_of
from muxserve.metrics.figure_table import FigureTable
from muxserve.net.exit_codes import ExitCode

USAGE = "/admin/usage"
_AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_COLUMNS = {"model": ("tenant", "model"), "key": ("tenant", "key", "model")}


class UsageQuery(NamedTuple):
    """What is asked for: days as YYYY-MM-DD, a tenant, each empty for the default; and what a row is of."""

    since: str
    until: str
    tenant: str
    by: str


def usage(url: str | None, key: str | None, query: UsageQuery, form: Literal["csv", "json", ""]) -> int:
    """Print what tenants of the fleet at `url` used, as a table unless `form` says otherwise; returns the exit code."""
    url = endpoint_of(url)
    if url is None:
        return ExitCode.WRONG
    since = query.since or datetime.now(UTC).date().replace(day=1).isoformat()
    asked = {"since": since, "until": query.until, "tenant": query.tenant, "by": query.by}
    words = urlencode({name: value for name, value in asked.items() if value})
    try:
        status, answer = get_json(url, f"{USAGE}?{words}", key)
    except HTTPFailure as error:
        print_error(f"{error}; is `muxserve deploy` running there?")
        return ExitCode.WRONG
    if status != 200:
        print_error(refusal(status, answer))
        return ExitCode.WRONG
    if form == "json":
        print(json.dumps(answer, indent=2))
    elif form == "csv":
        _print_csv(answer["data"], query.by)
    else:
        _print(answer, query, since)
    return ExitCode.DONE


def refusal(status: int, answer: object) -> str:
    """Why an endpoint did not do what it was asked for, and what helps."""
    error = answer.get("error") if isinstance(answer, dict) else None
    words = error.get("message") if isinstance(error, dict) else None
    if status in (401, 403):
        return f"{words or status}; give an admin's key with --api-key, or set MUXSERVE_API_KEY"
    return str(words or f"the endpoint answered {status}")


def _print_csv(rows: Iterable[Mapping[str, Any]], by: str) -> None:
    writer = csv.DictWriter(sys.stdout, ["day", *_COLUMNS[by], *_AMOUNTS], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _print(answer: Mapping[str, Any], query: UsageQuery, since: str) -> None:
    columns = _COLUMNS[query.by]
    sums: dict[tuple[str, ...], list[int]] = {}
    for row in answer["data"]:
        of = sums.setdefault(tuple(str(row[name]) for name in columns), [0] * len(_AMOUNTS))
        for index, name in enumerate(_AMOUNTS):
            of[index] += row[name]
    days = f"{since} to {query.until or 'today'} (UTC)"
    if not sums:
        console.print(f"nothing was used from {days}; usage is counted in fleets with `tenants`")
    else:
        table = FigureTable([*columns, *(name.replace("_", " ") for name in _AMOUNTS)], words=len(columns))
        for names, amounts in sorted(sums.items()):
            table.add_row(*map(escape, names), *(f"{amount:,}" for amount in amounts))
        console.print(f"used from {days}")
        console.print(table)
    if answer["budgets"]:
        table = FigureTable(["tenant", "model", "per", "used", "budget", "part", "reset (UTC)"], words=3)
        for each in answer["budgets"]:
            reset = datetime.fromtimestamp(each["resets_at"], UTC).strftime("%Y-%m-%d %H:%M")
            part = f"{100 * each['used'] / each['tokens']:.0f} %"
            names = (escape(each["tenant"]), escape(each["model"] or "all"), each["period"])
            table.add_row(*names, f"{each['used']:,}", f"{each['tokens']:,}", part, reset)
        console.print("budgets, in tokens of prompts and answers")
        console.print(table)
