"""The figures of a run in words, and as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from muxserve.metrics.figure_table import FigureTable
from muxserve.metrics.summary import Distribution, Figures, Summary

_SHOWN_SCALES = (2, 4, 8)
_CRITERIA = {"latency": "latency", "ttft_tpot": "TTFT and TPOT"}


def seconds_words(value: float | None) -> str:
    """`1.23 s`, `45.6 ms`, `-`."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def figure_words(value: float | None, digits: int) -> str:
    """A figure with so many significant digits; `-` for what was not measured."""
    return "-" if value is None else f"{value:.{digits}g}"


def _of(distribution: Distribution | None, name: str) -> str:
    return seconds_words(None if distribution is None else getattr(distribution, name))


def _attainment(summary: Summary, figures: Figures) -> list[tuple[str, str]]:
    rows = [(f"SLO {name} met", f"{share:.1%}") for name, share in figures.slo.items()]
    for criterion, shares in figures.attainment.items():
        words = _CRITERIA[criterion]
        for scale, share in zip(summary.slo_scales, shares, strict=True):
            if scale in _SHOWN_SCALES:
                rows.append((f"{words} within {scale:g} x alone", f"{share:.1%}"))
        kept = figures.scale_for_99[criterion]
        rows.append((f"scale that 99 % keep, {words}", "-" if kept is None else f"{kept:.3g}"))
    return rows


def figure_rows(summary: Summary) -> list[tuple[str, str]]:
    """Label and value of every figure of the whole run. Counts of what went wrong are left out where they are 0."""
    figures = summary.overall
    wrong = {
        "failed": figures.failed,
        "unfinished": figures.unfinished,
        "preemptions": figures.preemptions,
    }
    rows = [
        ("requests", str(figures.requests)),
        ("completed", str(figures.completed)),
        *((label, str(count)) for label, count in wrong.items() if count),
        *([("prompt tokens cached", _cached(figures))] if figures.cached_tokens else []),
        ("seconds", f"{figures.seconds:.4g}"),
        ("requests/s", figure_words(figures.requests_per_second, 4)),
        ("output tokens/s", figure_words(figures.output_tokens_per_second, 5)),
        ("all tokens/s", figure_words(figures.total_tokens_per_second, 5)),
        ("weighted requests/s", figure_words(summary.weighted_throughput, 4)),
        ("weighted requests/s, own spans", figure_words(summary.weighted_throughput_own_span, 4)),
    ]
    for label, values in (("TTFT", figures.ttft), ("TPOT", figures.tpot), ("latency", figures.latency)):
        rows += [(f"{label} {name}", _of(values, name)) for name in ("mean", "p50", "p90", "p99")]
    rows += _attainment(summary, figures)
    shown = {name: value for name, value in summary.extra.items() if isinstance(value, int | float)}
    return rows + [(name.replace("_", " "), f"{value:.5g}") for name, value in shown.items()]


def model_columns(summary: Summary) -> list[str]:
    """Headings of `model_rows`."""
    return [
        "model",
        "requests",
        *(["not completed"] if _any_lost(summary) else []),
        "requests/s",
        "tokens/s",
        *(f"{what} {at}" for what in ("TTFT", "TPOT", "latency") for at in ("p50", "p99")),
        *(["cached"] if summary.overall.cached_tokens else []),
        *(["SLO"] if "all" in summary.overall.slo else []),
    ]


def model_rows(summary: Summary) -> list[list[str]]:
    """A row for each model."""
    rows = []
    for name, of in summary.models.items():
        row = [name, str(of.requests), *([str(of.failed + of.unfinished)] if _any_lost(summary) else [])]
        row += [figure_words(of.requests_per_second, 3), figure_words(of.output_tokens_per_second, 4)]
        row += [_of(values, at) for values in (of.ttft, of.tpot, of.latency) for at in ("p50", "p99")]
        if summary.overall.cached_tokens:
            row.append(_cached(of))
        if "all" in summary.overall.slo:
            row.append(f"{of.slo['all']:.1%}" if "all" in of.slo else "-")
        rows.append(row)
    return rows


def _cached(figures: Figures) -> str:
    return f"{figures.cached_tokens / figures.prompt_tokens:.1%}" if figures.prompt_tokens else "-"


def _any_lost(summary: Summary) -> bool:
    return summary.overall.failed + summary.overall.unfinished > 0


def comparison(runs: Mapping[str, Summary]) -> list[list[str]]:
    """The runs side by side: rows of label and one value for each run."""
    columns = [dict(figure_rows(summary)) for summary in runs.values()]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [[label, *(column.get(label, "-") for column in columns)] for label in labels]


def comparison_table(runs: Mapping[str, Summary]) -> FigureTable:
    """`comparison` for a rich console."""
    return _table(["", *runs], comparison(runs))


def models_table(summary: Summary) -> FigureTable:
    """`model_rows` for a rich console."""
    return _table(model_columns(summary), model_rows(summary))


def _table(columns: list[str], rows: list[list[str]]) -> FigureTable:
    from rich.markup import escape

    table = FigureTable([escape(column) for column in columns])
    for row in rows:
        table.add_row(*map(escape, row))
    return table
