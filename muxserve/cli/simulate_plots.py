"""Plots that only a simulation has: pages per model over time, and how busy the devices were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from muxserve.metrics.colours import colours_of
from muxserve.metrics.page import DASHES, INK, plot, share_axis
from muxserve.metrics.summary import Summary


def plots(runs: Mapping[str, Summary], models: Iterable[str]) -> list[tuple[str, Any]]:
    """Headed Plotly figures for `report_page`; `models` are those of the fleet, in its order."""
    import plotly.graph_objects as go

    colours = colours_of(models)
    busy = []
    for index, (name, summary) in enumerate(runs.items()):
        units: Any = summary.extra["units"]
        seconds = summary.overall.seconds or 1.0
        parts = [unit["busy_seconds"] / seconds for unit in units]
        busy.append(go.Bar(name=name, x=[u["name"] for u in units], y=parts, marker_color=INK[index % len(INK)]))
    axis = share_axis("part of the time in which a job runs")
    figures = [("Devices at work", plot(busy, yaxis=axis, barmode="group"))]
    for name, summary in runs.items():
        units = summary.extra["units"]
        lines = []
        for index, unit in enumerate(units):
            whole = sum(unit["pool_pages"].values()) or 1
            for model in unit["peak_pages"]:
                held = [count / whole for count in unit["pages"][model]]
                style = {"color": colours.get(model), "dash": DASHES[index % len(DASHES)], "width": 1.5}
                label = f"{model} ({unit['name']})"
                lines.append(go.Scatter(x=unit["pages"]["seconds"], y=held, name=label, mode="lines", line=style))
        pages = plot(lines, xaxis={"title": "seconds"}, yaxis=share_axis("part of the unit's pages", whole=False))
        figures.append((f"KV pages in use: {name}", pages))
    return figures
