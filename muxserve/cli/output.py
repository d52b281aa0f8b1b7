"""What commands print: problems on stderr, results on stdout, and what is going on while they compute."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, cast

from rich.console import Console

from muxserve.config import FleetError
from muxserve.gpu.budget import Budget
from muxserve.gpu.budget import table as budget_rows
from muxserve.metrics.figure_table import FigureTable
from muxserve.net.logs import JsonLineStream, in_json
from muxserve.spec import ModelSpec, UnitSpec
from placement.format import format_size

# Where nobody looks at a screen, nothing is cut to the width of one.
_WIDE = 240


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if in_json():
        lines = JsonLineStream(stream, "muxserve.deploy", "error" if stderr else "info")
        return Console(file=cast(IO[str], lines), highlight=False, soft_wrap=True, width=_WIDE)
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if stream.isatty() else _WIDE)


console = _console(stderr=False)
errors = _console(stderr=True)


def print_problems(error: FleetError, outcome: str) -> None:
    """Every problem on a line of its own, `file:line: key: what`, as editors and people can follow it.

    `outcome` says what that means.
    """
    for problem in error.problems:
        print(problem, file=sys.stderr)
    count = len(error.problems)
    errors.print(f"[bold red]{count} problem{'s' if count > 1 else ''}[/]; {outcome}")


def print_error(message: str) -> None:
    """One line that says what is wrong."""
    errors.print(f"[bold red]error:[/] {escape(message)}")


def escape(text: str) -> str:
    """`text` with nothing in it that rich would take for markup."""
    from rich.markup import escape as rich_escape

    return rich_escape(text)


def command_line() -> str:
    """The command that runs, as it can be given again; a key that was given in it is left out."""
    words = ["muxserve", *sys.argv[1:]]
    shown = ["KEY" if before == "--api-key" else word for before, word in zip(["", *words], words, strict=False)]
    return shlex.join(re.sub(r"^(--api-key)=.*", r"\1=KEY", word) for word in shown)


def models_table(unit_spec: UnitSpec) -> FigureTable:
    """The models as they are deployed."""
    columns = ("model", "dtype", "layers x KV heads", "pool", "block", "quota", "max_len", "threads")
    table = FigureTable(columns, words=len(columns))
    for model in unit_spec.models:
        kept = f"latent {model.latent}" if model.latent else f"head {model.head_dim}"
        if model.private:
            kept = "in its own cache"
        if model.state_blocks:
            kept += f", states in {model.state_blocks} blocks"
        table.add_row(
            escape(model.name),
            model.dtype,
            kept if model.private else f"{model.layers} x {model.kv_heads} ({kept})",
            model.pool if model.pages_per_block else "-",
            f"{model.block_tokens} tokens" if model.pages_per_block else "-",
            quota_words(model),
            f"{model.max_len} tokens",
            str(model.threads),
        )
    return table


def quota_words(model: ModelSpec) -> str:
    """`6808 pages (425 blocks)`; `no pages` of a model that keeps no KV; `256.0 MiB, private`."""
    if model.private:
        return f"{format_size(model.kv_bytes)}, private"
    if not model.pages_per_block:
        return "no pages"
    return f"{model.quota_pages} pages ({model.quota_pages // model.pages_per_block} blocks)"


def budget_table(budgets: Sequence[Budget]) -> FigureTable:
    """What the memory of each GPU goes to."""
    table = FigureTable(["GPU memory", *(escape(budget.gpu) for budget in budgets)])
    for row in budget_rows(budgets):
        table.add_row(*map(escape, row))
    return table


@contextmanager
def working(first: str) -> Iterator[Callable[[str], None]]:
    """Shows on the terminal what goes on, `first` at once and then what the function is called with."""
    if not errors.is_terminal:
        yield lambda _: None
        return
    with errors.status(first) as status:
        yield lambda text: status.update(escape(text))
