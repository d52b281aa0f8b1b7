"""Plots that only a simulation has: pages per model over time, and how busy the devices were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muxserve.metrics.summary import Summary


def plots(runs: Mapping[str, Summary]) -> list[tuple[str, Any]]:
    """Headed Plotly figures for `write_html`."""
    import plotly.graph_objects as go

    figures: list[tuple[str, Any]] = []
    busy = go.Figure()
    for name, summary in runs.items():
        units: Any = summary.extra["units"]
        seconds = summary.overall.seconds or 1.0
        busy.add_bar(name=name, x=[unit["name"] for unit in units], y=[u["busy_seconds"] / seconds for u in units])
    busy.update_layout(yaxis_title="part of the time in which a job runs", barmode="group", showlegend=True)
    figures.append(("Devices at work", busy))
    for name, summary in runs.items():
        pages = go.Figure()
        units = summary.extra["units"]
        for unit in units:
            whole = sum(unit["pool_pages"].values()) or 1
            for model in unit["peak_pages"]:
                held = [count / whole for count in unit["pages"][model]]
                pages.add_scatter(
                    x=unit["pages"]["seconds"], y=held, name=f"{model} ({unit['name']})", mode="lines", line_width=1
                )
        pages.update_layout(xaxis_title="seconds", yaxis_title="part of the unit's pages", showlegend=True)
        figures.append((f"KV pages in use: {name}", pages))
    return figures
