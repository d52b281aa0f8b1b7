"""A comparison of arrangements as the cells of a table, for the terminal and for pages."""

from __future__ import annotations

from muxserve.planning.phases_figures import Compared, Figures, Spread
from placement.cluster import PlacedUnit
from placement.format import format_size

# The first two are words, the others numbers.
COLUMNS = (
    "arrangement",
    "layout",
    "goodput",
    "within",
    "TTFT p50/p90/p99",
    "with wait p99",
    "TPOT p50/p90/p99",
    "bubbles",
    "balance",
    "device-h per 1000",
    "links, per token",
    "links, at the goodput",
)
WITHIN = COLUMNS.index("within")


def cells(compared: Compared) -> list[str]:
    """One row, in the order of `COLUMNS`."""
    if compared.figures is None:
        return [compared.phases, "not possible"] + [""] * (len(COLUMNS) - 2)
    return [compared.phases, *_figures(compared.figures)]


def unit_phases(unit: PlacedUnit) -> str:
    """How the model of a unit is arranged; empty if it is multiplexed."""
    if unit.phases == "multiplexed":
        return ""
    return f"{unit.phases}, {unit.stages} stages" if unit.phases == "pipelined" else unit.phases


def seconds_words(seconds: float) -> str:
    """`12 ms`, `1.25 s`."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def part_words(part: float) -> str:
    """`97%`, `99.7%`."""
    return f"{part:.0%}" if part < 0.995 else f"{part:.1%}"


def _figures(figures: Figures) -> list[str]:
    wait = figures.ttft_with_wait
    return [
        figures.layout.words,
        f"{figures.goodput:.3g}/s" if figures.goodput else "0",
        part_words(figures.attainment),
        _spread(figures.ttft),
        seconds_words(wait.p99) if wait else "-",
        _spread(figures.tpot),
        " ".join(f"{part:.0%}" for part in figures.bubbles) or "-",
        f"{figures.balance:.2f}",
        "-" if figures.device_hours is None else f"{figures.device_hours:.3g}",
        format_size(int(figures.link_bytes)) if figures.link_bytes else "-",
        f"{figures.link_rate / 1e9:.3g} GB/s" if figures.link_bytes else "-",
    ]


def _spread(times: Spread | None) -> str:
    return "-" if times is None else " / ".join(seconds_words(each) for each in (times.p50, times.p90, times.p99))
