"""The page of one or several runs of a load: what came of them, figures side by side, latencies, models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muxserve.metrics.colours import colours_of
from muxserve.metrics.page import (
    DASHES,
    INK,
    Headline,
    Page,
    PageSection,
    PageTable,
    plot,
    seconds_axis,
    share_axis,
)
from muxserve.metrics.summary import CURVE, Distribution, Summary
from muxserve.metrics.tables import comparison, model_columns, model_rows, seconds_words

_LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "latency": "end-to-end latency"}
# Share of requests within their objectives; a smaller one is marked.
_GOOD = 0.95


def report_page(
    runs: Mapping[str, Summary],
    *,
    title: str = "MuxServe report",
    about: str = "",
    extra: Sequence[tuple[str, Any]] = (),
    command: str = "",
    models: Sequence[str] = (),
) -> Page:
    """The page: what came of each run, its models, latency distributions, SLO attainment, throughput, the runs
    over time. `extra` appends headed Plotly figures of the caller's; `command` is the command that made the page;
    `models` have their colours in the order given.
    """
    colours = colours_of([*models, *(model for summary in runs.values() for model in summary.models)])
    sections = []
    for name, summary in runs.items():
        suffix = f": {name}" if len(runs) > 1 else ""
        sections.append(PageSection(f"Models{suffix}", [PageTable(model_columns(summary), model_rows(summary))]))
        if summary.errors:
            errors = [[text, str(n)] for text, n in summary.errors.items()]
            sections.append(PageSection(f"Errors{suffix}", [PageTable(["error", "requests"], errors)]))
    figures = [*_figures(runs, colours), *((heading, figure, True) for heading, figure in extra)]
    sections += [PageSection(heading, figures=[figure], collapsed=folded) for heading, figure, folded in figures]
    sections.append(PageSection("All figures", [PageTable(["", *runs], comparison(runs))], collapsed=True))
    verdicts = [_verdict(name if len(runs) > 1 else "", summary) for name, summary in runs.items()]
    return Page(title, verdicts, sections, about, command, colours)


def _verdict(name: str, summary: Summary) -> Headline:
    figures = summary.overall
    words = [f"{figures.completed} of {figures.requests} requests completed"]
    if figures.requests_per_second is not None:
        words[0] += f", {figures.requests_per_second:.4g} per second"
    met = figures.slo.get("all")
    if met is not None:
        words.insert(0, f"{met:.1%} within their objectives")
    if figures.ttft is not None:
        words.append(f"TTFT p99 {seconds_words(figures.ttft.p99)}")
    if figures.tpot is not None:
        words.append(f"TPOT p99 {seconds_words(figures.tpot.p99)}")
    tone: Any = "plain" if met is None else "good" if met >= _GOOD else "bad"
    if figures.requests and not figures.completed:
        tone = "bad"
    return Headline((f"{name}: " if name else "") + "; ".join(words), tone)


def _figures(runs: Mapping[str, Summary], colours: Mapping[str, str]) -> list[tuple[str, Any, bool]]:
    """Heading, figure, and whether it is folded away."""
    import plotly.graph_objects as go

    lines = {
        name: {"color": INK[index % len(INK)], "dash": DASHES[index % len(DASHES)]} for index, name in enumerate(runs)
    }
    figures: list[tuple[str, Any, bool]] = []

    def figure(heading: str, traces: list[Any], folded: bool = False, **layout: Any) -> None:
        if traces:
            figures.append((heading, plot(traces, **layout), folded))

    for key, words in _LATENCIES.items():
        drawn = {name: summary.curves[key] for name, summary in runs.items() if key in summary.curves}
        figure(
            words.capitalize(),
            [go.Scatter(x=x, y=list(CURVE), name=name, mode="lines", line=lines[name]) for name, x in drawn.items()],
            xaxis=seconds_axis((value for curve in drawn.values() for value in curve), words),
            yaxis=share_axis("share of completed requests"),
        )
    for criterion, words in (("latency", "Latency"), ("ttft_tpot", "TTFT and TPOT")):
        judged = {name: s for name, s in runs.items() if criterion in s.overall.attainment}
        scales = sorted({scale for summary in judged.values() for scale in summary.slo_scales})
        figure(
            f"SLO attainment: {words} within a multiple of what the request takes alone",
            [
                go.Scatter(
                    x=s.slo_scales, y=s.overall.attainment[criterion], name=name, mode="lines+markers", line=lines[name]
                )
                for name, s in judged.items()
            ],
            folded=True,
            xaxis={"type": "log", "title": "SLO scale", "tickvals": scales, "ticktext": [f"{s:g}" for s in scales]},
            yaxis=share_axis("share of all requests"),
        )
    # Runs stand side by side, models keep their colours.
    models = [model for model in colours if any(model in summary.models for summary in runs.values())]

    def bars(value: Any) -> list[Any]:
        return [
            go.Bar(
                x=list(runs),
                y=[value(summary.models[model]) if model in summary.models else None for summary in runs.values()],
                name=model,
                marker_color=colours[model],
            )
            for model in models
        ]

    throughput = {"title": "requests/s", "rangemode": "tozero"}
    figure("Throughput of each model", bars(lambda of: of.requests_per_second), barmode="group", yaxis=throughput)
    tails = {"title": "seconds", "rangemode": "tozero"}
    figure("p99 latency of each model", bars(lambda of: _p99(of.latency)), barmode="group", yaxis=tails)
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
            traces.append(go.Scatter(x=at, y=values, name=name, mode="lines", line=lines[name]))
        figure(heading, traces, folded=True, xaxis={"title": "seconds"}, yaxis={"title": axis, "rangemode": "tozero"})
    return figures


def _p99(distribution: Distribution | None) -> float | None:
    return None if distribution is None else distribution.p99
