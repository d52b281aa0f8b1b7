"""The page that reports are written as."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from muxserve.metrics.colours import COLOURS, colours_of
from muxserve.metrics.page import (
    Headline,
    Page,
    PageSection,
    PageTable,
    Strip,
    StripBox,
    StripPart,
    round_ticks,
    write_page,
)
from muxserve.metrics.page import plot as figure


def written(tmp_path: Path, *sections: PageSection, **more: object) -> str:
    path = tmp_path / "page.html"
    write_page(path, Page("T<b>", [Headline("it <is> enough", "good")], sections, **more))  # type: ignore[arg-type]
    return path.read_text()


def test_the_verdict_comes_first_and_all_is_escaped(tmp_path: Path) -> None:
    text = written(
        tmp_path,
        PageSection("Models & more", [PageTable(["<model>", "n"], [["chat", "1"], ["a<b", "2"]])], notes=["<note>"]),
        about="<about>",
        command="muxserve plan 'a b.yaml'",
        colours={"chat": "#0072b2"},
    )
    assert (
        text.index("it &lt;is&gt; enough")
        < text.index("Models &amp; more")
        < text.index("muxserve plan &#39;a b.yaml&#39;")
    )
    for words in ("<model>", "a<b", "<note>", "<about>", "T<b>"):
        assert words not in text
    assert 'style="background:#0072b2"></span>chat' in text
    assert "MuxServe 0." in text
    assert "plotly.js" not in text  # without a figure the page needs no library


def test_detail_is_folded_away(tmp_path: Path) -> None:
    text = written(tmp_path, PageSection("Shown", notes=["one"]), PageSection("Folded", notes=["two"], collapsed=True))
    assert "<h2>Shown</h2>" in text
    assert "<details><summary>Folded</summary>" in text
    assert text.index("<details>") < text.index("two")


def test_strips(tmp_path: Path) -> None:
    parts = [
        StripPart("weights", 0.25, "#0072b2"),
        StripPart("pages", 0.5, "#0072b2", pale=True),
        StripPart("none", 0.0, "#fff"),
    ]
    text = written(tmp_path, PageSection("Placement", boxes=[StripBox("unit0", [Strip("memory", parts)])]))
    assert 'style="width:25.000%;background:#0072b2"' in text
    assert '<i class="pale" title="pages" style="width:50.000%' in text
    assert 'title="none"' not in text


def test_only_the_first_figure_brings_the_library(tmp_path: Path) -> None:
    text = written(tmp_path, PageSection("A", figures=[figure([])]), PageSection("B", figures=[figure([])]))
    assert len(re.findall(r"plotly\.js v\d", text)) == 1


@pytest.mark.parametrize(
    ("least", "most", "ticks"),
    [
        (0.008, 0.6, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
        (0.0001, 100.0, [0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0]),
        (0.3, 0.4, [0.2]),
    ],
)
def test_ticks_are_round(least: float, most: float, ticks: list[float]) -> None:
    assert round_ticks(least, most) == ticks


def test_ticks_stay_few() -> None:
    assert len(round_ticks(1e-12, 1e12)) <= 10


def test_a_model_keeps_its_colour() -> None:
    names = [f"m{n}" for n in range(12)]
    colours = colours_of([*names, "m3"])
    assert list(colours) == names
    assert [colours["m0"], colours["m9"], colours["m10"]] == [COLOURS[0], COLOURS[9], COLOURS[0]]
    assert len(set(COLOURS)) == len(COLOURS)
