from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from muxserve.metrics.figure_table import FigureTable


def printed(table: FigureTable, width: int) -> list[str]:
    out = io.StringIO()
    # As the commands' console is.
    Console(file=out, width=width, soft_wrap=True).print(table)
    return out.getvalue().splitlines()


def wide() -> FigureTable:
    table = FigureTable(["model", "what limits it", "requests per second", "TTFT", "mean tokens"], words=2)
    table.add_row("atlas", "the memory of the pool", "12345678.9", "1.23 s", "163840")
    table.add_row("bear", "nothing", "3.1", "12 ms", "7")
    return table


def test_one_line_for_a_row_where_there_is_room() -> None:
    assert printed(wide(), 80) == [
        "model  what limits it          requests per second    TTFT  mean tokens",
        "atlas  the memory of the pool           12345678.9  1.23 s       163840",
        "bear   nothing                                 3.1   12 ms            7",
    ]


def test_headings_fold_first() -> None:
    lines = printed(wide(), 60)
    assert lines[:2] == [
        "                                 requests            mean",
        "model  what limits it          per second    TTFT  tokens",
    ]
    assert len(lines) == 4


def test_then_words() -> None:
    lines = printed(wide(), 50)
    assert max(map(len, lines)) <= 50
    assert [line.split() for line in lines[-3:]] == [
        ["atlas", "the", "memory", "of", "12345678.9", "1.23", "s", "163840"],
        ["the", "pool"],
        ["bear", "nothing", "3.1", "12", "ms", "7"],
    ]


def test_then_the_table_is_divided_and_each_part_says_what_a_row_is_about() -> None:
    lines = [line.split() for line in printed(wide(), 24)]
    assert [] in lines
    assert sum(line[:1] == ["model"] for line in lines) == sum(line[:1] == ["bear"] for line in lines) > 1


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 10**12), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(40, 120),
)
def test_no_figure_is_cut(rows: list[list[int]], width: int) -> None:
    table = FigureTable(["name", *(f"figure number {k}" for k in range(6))])
    for number, row in enumerate(rows):
        table.add_row(f"a model of the row {number}", *map(str, row))
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    for row in rows:
        for figure in row:
            assert str(figure) in words


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        FigureTable(["a"]).add_row("x", "y")
