"""Tables for a terminal in which no figure is ever cut."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_GAP = 2
# Narrower than this words are not folded: a column of single letters cannot be read.
_NARROWEST_WORDS = 12


class FigureTable:
    """A table that fits the console it is printed on, without cutting a cell.

    Where it is too wide, its headings fold, then its columns of words; what is still too wide is divided into tables
    one below the other, each of which begins with the columns that say what a row is about. Cells and headings may have
    rich's markup.

    Args:
        columns: the headings.
        words: how many columns, from the first, hold words; they stand left, figures right.
        keys: the columns that say what a row is about, by number.
    """

    def __init__(self, columns: Sequence[str], words: int = 1, keys: Sequence[int] = (0,)) -> None:
        self.columns = list(columns)
        self.words = words
        self.keys = list(keys)
        self.rows: list[tuple[list[str], str]] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        """One row, a cell for each column; `style` is rich's.

        Raises:
            ValueError: there are not as many cells as columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append((list(cells), style))

    def layout(self, width: int) -> list[dict[int, int]]:
        """The tables that it becomes on a console of `width` characters: the width of each column by its number."""
        bodies = [max((_width(row[index]) for row, _ in self.rows), default=0) for index in range(len(self.columns))]
        natural = {k: max(body, _width(self.columns[k])) for k, body in enumerate(bodies)}
        if _total(natural.values()) <= width:
            return [natural]
        folded = {k: max(body, _longest_word(self.columns[k])) for k, body in enumerate(bodies)}
        if _total(folded.values()) <= width:
            return [folded]
        narrow = self._fold_words(folded, width)
        if _total(narrow.values()) <= width:
            return [narrow]
        fewest = len(self._divide(folded, width))
        # The narrowest limit that takes no more tables makes them equally wide.
        tables = next(tables for limit in range(width + 1) if len(tables := self._divide(folded, limit)) == fewest)
        return [self._fold_words(each, width) for each in tables]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        for number, widths in enumerate(self.layout(options.max_width)):
            if number:
                yield ""
            table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
            for k in sorted(widths):
                lines = textwrap.wrap(self.columns[k], widths[k], break_long_words=False, break_on_hyphens=False)
                table.add_column(
                    "\n".join(lines),
                    justify="left" if k < self.words else "right",
                    min_width=widths[k],
                    max_width=widths[k],
                    overflow="fold",
                )
            for row, style in self.rows:
                table.add_row(*(row[k] for k in sorted(widths)), style=style)
            yield table

    def _divide(self, widths: dict[int, int], limit: int) -> list[dict[int, int]]:
        """Tables at most `limit` wide, if their keys and each single column are; the columns keep their order."""
        tables: list[dict[int, int]] = []
        keys = {k: widths[k] for k in self.keys}
        for k in sorted(widths.keys() - keys.keys()):
            if tables and _total([*tables[-1].values(), widths[k]]) <= limit:
                tables[-1][k] = widths[k]
            else:
                tables.append({**keys, k: widths[k]})
        return tables

    def _fold_words(self, widths: dict[int, int], width: int) -> dict[int, int]:
        """`widths` with columns of words made narrower, the widest first, as far as that helps."""
        narrow = dict(widths)
        while (excess := _total(narrow.values()) - width) > 0:
            foldable = {k: of for k, of in narrow.items() if k < self.words and of > _NARROWEST_WORDS}
            if not foldable:
                break
            widest = max(foldable, key=lambda k: foldable[k])
            narrow[widest] = max(_NARROWEST_WORDS, narrow[widest] - excess)
        return narrow


def _total(widths: Iterable[int]) -> int:
    each = list(widths)
    return sum(each) + _GAP * (len(each) - 1)


def _width(cell: str) -> int:
    from rich.text import Text

    return max((line.cell_len for line in Text.from_markup(cell).split()), default=0)


def _longest_word(heading: str) -> int:
    return max(map(_width, heading.split()), default=0)
