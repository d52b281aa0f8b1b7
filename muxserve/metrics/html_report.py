"""One page with the tables and plots of one or several runs: no request leaves it when it is opened."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muxserve.metrics.plotly_library import DEFAULT, provide, script
from muxserve.metrics.summary import CURVE, Distribution, Summary
from muxserve.metrics.tables import comparison, model_columns, model_rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; } .about { color: #555; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
_LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "latency": "end-to-end latency"}


def write_html(
    path: str | os.PathLike[str],
    runs: Mapping[str, Summary],
    *,
    title: str = "MuxServe report",
    about: str = "",
    extra: Sequence[tuple[str, Any]] = (),
    plotly: str = DEFAULT,
) -> None:
    """Write the page: figures side by side, latency distributions, SLO attainment, throughput per model, the runs over
    time. `extra` appends headed Plotly figures of the caller's; `plotly` says where the page has the library from.

    Raises:
        OSError: the file cannot be written.
        ValueError: `plotly` is none of what there is.
    """
    figures = [*_figures(runs), *extra]
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
        f'<p class="about">{html.escape(about)}</p>' if about else "",
        _table(["", *runs], comparison(runs)),
    ]
    for number, (heading, figure) in enumerate(figures):
        parts.append(f"<h2>{html.escape(heading)}</h2>")
        # The first figure brings the plotting library along.
        library = script(plotly) if number == 0 else False
        parts.append(figure.to_html(full_html=False, include_plotlyjs=library, default_height="380px"))
    for name, summary in runs.items():
        suffix = f": {name}" if len(runs) > 1 else ""
        parts.append(f"<h2>{html.escape(f'Models{suffix}')}</h2>")
        parts.append(_table(model_columns(summary), model_rows(summary)))
        if summary.errors:
            parts.append(f"<h2>{html.escape(f'Errors{suffix}')}</h2>")
            parts.append(_table(["error", "requests"], [[text, str(n)] for text, n in summary.errors.items()]))
    parts.append("</body></html>\n")
    Path(path).write_text("\n".join(parts), encoding="utf-8")
    provide(plotly, path)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figures(runs: Mapping[str, Summary]) -> list[tuple[str, Any]]:
    import plotly.graph_objects as go

    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(runs)}
    figures: list[tuple[str, Any]] = []

    def figure(heading: str, x: str, y: str, traces: list[Any], **layout: Any) -> None:
        if traces:
            made = go.Figure(traces)
            made.update_layout(
                template="plotly_white", xaxis_title=x, yaxis_title=y, margin={"t": 20, "r": 20}, **layout
            )
            figures.append((heading, made))

    for key, words in _LATENCIES.items():
        traces = [
            go.Scatter(x=summary.curves[key], y=list(CURVE), name=name, mode="lines", line_color=colours[name])
            for name, summary in runs.items()
            if key in summary.curves
        ]
        figure(
            words.capitalize(), f"{words}, seconds", "share of completed requests", traces,
            xaxis_type="log", yaxis_tickformat=".0%", showlegend=True,
        )  # fmt: skip
    for criterion, words in (("latency", "Latency"), ("ttft_tpot", "TTFT and TPOT")):
        traces = [
            go.Scatter(
                x=summary.slo_scales, y=summary.overall.attainment[criterion], name=name, mode="lines+markers",
                line_color=colours[name],
            )
            for name, summary in runs.items()
            if criterion in summary.overall.attainment
        ]  # fmt: skip
        figure(
            f"SLO attainment: {words} within a multiple of what the request takes alone", "SLO scale",
            "share of all requests", traces, xaxis_type="log", yaxis_tickformat=".0%", showlegend=True,
        )  # fmt: skip
    bars = [
        go.Bar(
            x=list(summary.models), y=[of.requests_per_second for of in summary.models.values()], name=name,
            marker_color=colours[name],
        )
        for name, summary in runs.items()
    ]  # fmt: skip
    figure("Throughput of each model", "", "requests/s", bars, barmode="group", showlegend=True)
    tails = [
        go.Bar(
            x=list(summary.models), y=[_p99(of.latency) for of in summary.models.values()], name=name,
            marker_color=colours[name],
        )
        for name, summary in runs.items()
    ]  # fmt: skip
    figure("p99 latency of each model", "", "seconds", tails, barmode="group", showlegend=True)
    for heading, axis, rate in (
        ("Output tokens over time", "tokens/s", True),
        ("Requests under way", "requests", False),
    ):
        traces = []
        for name, summary in runs.items():
            time = summary.timeline
            if time is None:
                continue
            values = [tokens / time.step for tokens in time.output_tokens] if rate else time.in_flight
            at = [time.start + time.step * (i + (0.5 if rate else 1)) for i in range(len(values))]
            traces.append(go.Scatter(x=at, y=values, name=name, mode="lines", line_color=colours[name]))
        figure(heading, "seconds", axis, traces, showlegend=True)
    return figures


def _p99(distribution: Distribution | None) -> float | None:
    return None if distribution is None else distribution.p99
