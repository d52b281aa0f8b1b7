"""Arrangements of prefill and decode, compared: tables, and the same as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from muxserve.cli.output import console, errors, escape
from muxserve.config import Fleet
from muxserve.metrics.figure_table import FigureTable
from muxserve.planning.arrangements import is_open
from muxserve.planning.comparison import COLUMNS, SHARE, WITHIN, Compared, Comparison, Spread, cells

# Columns of a screen that has room for a row with all figures of an arrangement.
_WIDE = 220


@contextmanager
def comparison_bar(alone: Callable[[], AbstractContextManager[None]]) -> Iterator[Callable[[float, str], None]]:
    """A bar on the terminal while arrangements are compared, nothing elsewhere; `alone` takes what is there off the
    screen for a while."""
    if not errors.is_terminal:
        yield lambda *_: None
        return
    columns = (
        BarColumn(30),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with alone(), Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("comparing arrangements", total=1.0)
        yield lambda part, text: bar.update(task, completed=part, description=escape(text))


def show(comparison: Comparison, chosen: bool) -> None:
    """One table for a model; `chosen`: the recommendation is what the plan has."""
    console.print()
    console.print(
        f"[bold]{escape(comparison.model)}[/]: {comparison.rate:g} requests/s on {escape(comparison.devices)}, "
        f"{comparison.simulations} simulations"
    )
    console.print(_table(comparison))
    for each in comparison.arrangements:
        if each.figures is None:
            console.print(f"{each.phases} is not possible: {escape(each.why_not)}")
    for note in comparison.notes:
        console.print(f"- {escape(note)}")
    what = "chosen" if chosen else "recommended"
    console.print(f"{what}: [bold]{comparison.recommended}[/]; {escape(comparison.reason)}")


def show_comparisons(fleet: Fleet, comparisons: Sequence[Comparison]) -> None:
    """A table for each model."""
    for comparison in comparisons:
        show(comparison, is_open(fleet.model(comparison.model)))


def _table(comparison: Comparison) -> FigureTable:
    """A row for each arrangement, or where that is too wide for the screen a column."""
    rows = [_row(each, comparison.recommended) for each in comparison.arrangements]
    if console.width >= _WIDE:
        table = FigureTable(COLUMNS, words=2)
        for row in rows:
            table.add_row(*row)
        return table
    table = FigureTable(["", *(row[0] for row in rows)], words=1 + len(rows))
    for index, name in enumerate(COLUMNS[1:], 1):
        table.add_row(name, *(row[index] for row in rows))
    return table


def _row(each: Compared, recommended: str) -> list[str]:
    row = [escape(cell) for cell in cells(each)]
    if each.figures is not None and each.figures.attainment < SHARE:
        row[WITHIN] = f"[red]{row[WITHIN]}[/]"
    return [f"[bold]{cell}[/]" if cell else "" for cell in row] if each.phases == recommended else row


# ---------------------------------------------------------------- plain data


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain data; docs/plan.md has the keys."""
    return {
        "model": comparison.model,
        "devices": comparison.devices,
        "rate": comparison.rate,
        "recommended": comparison.recommended,
        "reason": comparison.reason,
        "notes": list(comparison.notes),
        "simulations": comparison.simulations,
        "arrangements": [_compared(each) for each in comparison.arrangements],
    }


def _compared(each: Compared) -> dict[str, Any]:
    f = each.figures
    if f is None:
        return {"phases": each.phases, "possible": False, "why_not": each.why_not}
    return {
        "phases": each.phases,
        "possible": True,
        "replicas": f.layout.replicas,
        "stages": f.layout.stages,
        "tensor_parallel": f.layout.tp,
        "devices": f.devices,
        "goodput": f.goodput,
        "goodput_wait_in_tpot": f.goodput_smooth,
        "attainment": f.attainment,
        "attainment_wait_in_tpot": f.attainment_smooth,
        "served": f.served,
        "ttft": _times(f.ttft),
        "ttft_with_wait": _times(f.ttft_with_wait),
        "tpot": _times(f.tpot),
        "tpot_after_wait": _times(f.tpot_after_wait),
        "preemptions": f.preemptions,
        "bubbles": list(f.bubbles),
        "balance": f.balance,
        "device_hours_per_1000": f.device_hours,
        "link_bytes_per_token": f.link_bytes,
        "link_bytes_per_second": f.link_rate,
        "network_bytes_per_token": f.network_bytes,
        "network_bytes_per_second": f.network_rate,
    }


def _times(times: Spread | None) -> dict[str, float] | None:
    return None if times is None else {"mean": times.mean, "p50": times.p50, "p90": times.p90, "p99": times.p99}


def documents(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """All of them."""
    return [comparison_document(each) for each in comparisons]
