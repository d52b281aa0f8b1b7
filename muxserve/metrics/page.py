"""A report as one self-contained page: the outcome first, detail folded away. Opening it loads nothing.

What a page says is put together from sections here; how it looks stands in `templates/page.html`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

_TEMPLATES = Path(__file__).parent / "templates"
# Lines of runs, which have no colour of their own: colours are models'.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
INK = ("#1b1f24", "#5d6672", "#98a2b0")
_MOST_TICKS = 10


@dataclass(frozen=True, slots=True)
class Headline:
    """What came of it, in a sentence."""

    text: str
    tone: Literal["good", "bad", "plain"] = "plain"


@dataclass(frozen=True, slots=True)
class PageTable:
    """Cells as text; a first cell that is a model's name has its colour."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class StripPart:
    """A part of a strip, `share` of its length; `name` is shown where the pointer rests on it."""

    name: str
    share: float
    colour: str
    pale: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """Something that is shared, as a bar of its parts."""

    name: str
    parts: Sequence[StripPart]


@dataclass(frozen=True, slots=True)
class StripBox:
    """What belongs together, such as a unit."""

    heading: str
    strips: Sequence[Strip]


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of a page. `figures` are Plotly's."""

    heading: str
    tables: Sequence[PageTable] = ()
    figures: Sequence[Any] = ()
    notes: Sequence[str] = ()
    boxes: Sequence[StripBox] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """A page. `colours` are those of the models; `command` is what made it."""

    title: str
    verdicts: Sequence[Headline]
    sections: Sequence[PageSection]
    about: str = ""
    command: str = ""
    colours: Mapping[str, str] = field(default_factory=dict)


def write_page(path: str | os.PathLike[str], page: Page) -> None:
    """Write the page, with the plotting library (4.8 MB) in it if it has figures.

    Raises:
        OSError: it cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader

    library = True

    def plot(figure: Any) -> str:
        nonlocal library
        first, library = library, False
        made: str = figure.to_html(
            full_html=False,
            include_plotlyjs=first,
            default_width="100%",
            default_height="380px",
            config={"responsive": True, "displaylogo": False},
        )
        return made

    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True)
    text = environment.get_template("page.html").render(page=page, plot=plot, version=version("muxserve"))
    Path(path).write_text(text, encoding="utf-8")


def plot(traces: Iterable[Any], **layout: Any) -> Any:
    """A Plotly figure in the look of the pages."""
    import plotly.graph_objects as go

    base = {"template": "plotly_white", "margin": {"t": 20, "r": 20, "l": 60, "b": 50}, "showlegend": True}
    legend = {"legend": {"orientation": "h", "y": 1.12, "x": 0}}
    figure = go.Figure(list(traces))
    figure.update_layout({**base, **legend, **layout})
    return figure


def seconds_axis(values: Iterable[float], title: str) -> dict[str, Any]:
    """A logarithmic axis over `values`, seconds, with round numbers at its ticks."""
    given = [value for value in values if value > 0.0 and math.isfinite(value)]
    axis: dict[str, Any] = {"type": "log", "title": title}
    if not given:
        return axis
    ticks = round_ticks(min(given), max(given))
    return {**axis, "tickvals": ticks, "ticktext": [_tick(tick) for tick in ticks]}


def _tick(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"


def round_ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 of each power of ten from about `least` to about `most`, or powers of ten alone where those are
    many."""
    first, last = math.floor(math.log10(least)), math.floor(math.log10(most))
    powers = range(first, last + 1)
    for digits in ((1, 2, 5), (1,)):
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        inside = [tick for tick in ticks if least <= tick <= most]
        if len(inside) <= _MOST_TICKS:
            # An axis without a tick says nothing.
            return inside or [min(ticks, key=lambda tick: abs(math.log(tick / least)))]
    step = -(-len(inside) // _MOST_TICKS)
    return inside[::step]


def share_axis(title: str, whole: bool = True) -> dict[str, Any]:
    """An axis of parts of a whole, in percent; up to the `whole`, or as far as they go."""
    axis: dict[str, Any] = {"title": title, "tickformat": ".0%"}
    return (
        {**axis, "range": [0, 1.02], "dtick": 0.2} if whole else {**axis, "tickformat": ".3~p", "rangemode": "tozero"}
    )
