"""A plan as one page: no request leaves it when it is opened."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muxserve.metrics.plotly_library import DEFAULT, provide, script
from muxserve.planning.arrangements import arrangement
from muxserve.planning.comparison import COLUMNS, Comparison, cells
from muxserve.planning.document import SweepPoint, needed, warnings_of
from muxserve.planning.prediction import Prediction
from placement.format import format_size
from placement.planner import ClusterPlan, limits_in_words

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; } .about { color: #555; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.warning { color: #b00020; font-weight: 600; }
"""
_PREFILL, _SERVED, _SHORT, _USED = "#d55e00", "#009e73", "#cccccc", "#0072b2"


def write_plan_html(
    path: str | os.PathLike[str],
    plan: ClusterPlan,
    about: str,
    simulated: Prediction | None = None,
    sweep: Sequence[SweepPoint] = (),
    comparisons: Sequence[Comparison] = (),
    plotly: str = DEFAULT,
) -> None:
    """Write the page: totals, throughput per model, SM shares and memory per unit, the sweep, arrangements compared.
    `plotly` says where the page has the plotting library from.

    Raises:
        OSError: it cannot be written.
        ValueError: `plotly` is none of what there is.
    """
    figures = [_throughput(plan, simulated), _shares(plan), _memory(plan)]
    if sweep:
        figures.insert(0, _sweep(sweep))
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Placement plan</title>',
        f'<style>{_STYLE}</style></head><body><h1>Placement plan</h1><p class="about">{html.escape(about)}</p>',
        f"<p>{html.escape(_totals(plan, simulated))}</p>",
        *(f'<p class="warning">{html.escape(warning)}</p>' for warning in warnings_of(plan, simulated, sweep)),
    ]
    for number, (heading, figure) in enumerate(figures):
        parts.append(f"<h2>{html.escape(heading)}</h2>")
        library = script(plotly) if number == 0 else False
        parts.append(figure.to_html(full_html=False, include_plotlyjs=library, default_height="420px"))
    parts += ["<h2>Units</h2>", _units(plan), "<h2>Models</h2>", _models(plan), *map(_compared, comparisons)]
    parts.append("<h2>Notes</h2><ul>")
    parts += [f"<li>{html.escape(note)}</li>" for note in plan.placement.notes]
    parts.append("</ul></body></html>\n")
    Path(path).write_text("\n".join(parts), encoding="utf-8")
    provide(plotly, path)


def _totals(plan: ClusterPlan, simulated: Prediction | None) -> str:
    met = simulated.summary.overall.slo.get("all") if simulated is not None else None
    return (
        f"{plan.throughput:.2f} of {plan.asked:.2f} requests/s served, {plan.attainment:.1%} within their objectives"
        f"{'' if met is None else f' ({met:.1%} in simulation)'}, "
        f"on {plan.devices} of {plan.placement.cluster.devices} devices; objective {plan.objective.name}."
    )


def _figure(**layout: Any) -> Any:
    import plotly.graph_objects as go

    return go.Figure(layout={"template": "plotly_white", "margin": {"t": 20}, **layout})


def _throughput(plan: ClusterPlan, simulated: Prediction | None) -> tuple[str, Any]:
    names = [demand.name for demand in plan.demands]
    served = [0.0] * len(names)
    for unit in plan.estimates:
        for model in unit.models:
            served[model.member.model] += model.throughput
    figure = _figure(barmode="group", yaxis={"title": "requests per second"})
    figure.add_bar(name="asked", x=names, y=[demand.rate for demand in plan.demands], marker_color=_SHORT)
    figure.add_bar(name="estimated", x=names, y=served, marker_color=_SERVED)
    if simulated is not None:
        made = [simulated.sustained.get(name, 0.0) for name in names]
        figure.add_bar(name="simulated", x=names, y=made, marker_color=_USED)
    return "Throughput per model", figure


def _shares(plan: ClusterPlan) -> tuple[str, Any]:
    figure = _figure(barmode="stack", yaxis={"title": "SM share of decode, %"}, legend={"title": "model"})
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        where = f"{unit.name}<br>{len(unit.devices)} x {unit.device}"
        for model in estimate.models:
            name = plan.demands[model.member.model].name
            figure.add_bar(name=name, x=[where], y=[100 * model.decode_share], hovertemplate=f"{name}: %{{y}} %")
        figure.add_scatter(
            x=[where],
            y=[100 * estimate.prefill_share],
            mode="markers",
            marker={"symbol": "line-ew-open", "size": 30, "color": _PREFILL, "line": {"width": 3}},
            name="prefill",
            showlegend=unit is plan.placement.units[0],
        )
    return "SM shares per unit (bars: decode; line: what a prefill job takes)", figure


def _memory(plan: ClusterPlan) -> tuple[str, Any]:
    gib = 1 << 30
    names = [f"{unit.name}<br>{len(unit.devices)} x {unit.device}" for unit in plan.placement.units]
    figure = _figure(barmode="stack", yaxis={"title": "GiB on each device"})
    weights = [sum(model.own_bytes for model in unit.models) / gib for unit in plan.estimates]
    figure.add_bar(name="models", x=names, y=weights, marker_color=_PREFILL)
    figure.add_bar(name="pages in use", x=names, y=[u.kv_bytes / gib for u in plan.estimates], marker_color=_USED)
    free = [(unit.pool_bytes - unit.kv_bytes) / gib for unit in plan.estimates]
    figure.add_bar(name="pages free", x=names, y=free, marker_color=_SHORT)
    return "Memory per device", figure


def _sweep(points: Sequence[SweepPoint]) -> tuple[str, Any]:
    x = [p.gpus for p in points]
    figure = _figure(
        xaxis={"title": "GPUs"},
        yaxis={"title": "requests per second", "rangemode": "tozero"},
        yaxis2={"title": "within objectives, %", "overlaying": "y", "side": "right", "range": [0, 101]},
    )
    figure.add_scatter(name="served", x=x, y=[p.throughput for p in points], line={"color": _SERVED})
    figure.add_scatter(
        name="within objectives", x=x, y=[100 * p.attainment for p in points], yaxis="y2", line={"color": _USED}
    )
    seen = [p for p in points if p.simulated is not None]
    if seen:
        y = [100 * p.simulated for p in seen if p.simulated is not None]
        figure.add_scatter(
            name="within objectives, simulated",
            x=[p.gpus for p in seen],
            y=y,
            yaxis="y2",
            mode="markers",
            marker={"color": _PREFILL, "size": 9},
        )
    enough = needed(points)
    if enough is not None:
        figure.add_vline(x=enough, line_dash="dot", annotation_text=f"{enough} are enough")
    return "How many GPUs?", figure


def _units(plan: ClusterPlan) -> str:
    rows = [
        [
            unit.name,
            f"{len(unit.devices)} x {unit.device}",
            ", ".join(m.model for m in unit.models),
            f"{estimate.throughput:.2f}/s",
            format_size(estimate.pool_bytes),
            f"{estimate.kv_bytes / estimate.pool_bytes:.0%}",
            limits_in_words(plan, estimate),
        ]
        for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True)
    ]
    return _table(["unit", "devices", "models", "served", "pool", "used", "limit"], rows)


def _models(plan: ClusterPlan) -> str:
    rows = []
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        for model in estimate.models:
            rows.append(
                [
                    plan.demands[model.member.model].name,
                    unit.name,
                    arrangement(unit.phases).unit_words(unit)
                    or f"{estimate.prefill_share:.0%} / {model.decode_share:.0%}",
                    f"{model.rate:.2f}",
                    f"{model.throughput:.2f}",
                    "grows" if math.isinf(model.ttft) else f"{model.ttft:.3f} s",
                    f"{model.tpot * 1000:.1f} ms",
                    f"{model.attainment:.1%}",
                ]
            )
    return _table(["model", "unit", "phases, or SMs", "rate", "served", "TTFT", "TPOT", "SLO"], rows)


def _compared(comparison: Comparison) -> str:
    """The arrangements of one model."""
    heading = f"Arrangements of {comparison.model}, {comparison.rate:g} requests/s on {comparison.devices}"
    impossible = [f"{each.phases}: {each.why_not}" for each in comparison.arrangements if each.figures is None]
    words = [f"Recommended: {comparison.recommended}; {comparison.reason}", *comparison.notes, *impossible]
    table = _table(COLUMNS, [cells(each) for each in comparison.arrangements])
    return f"<h2>{html.escape(heading)}</h2>{table}" + "".join(f"<p>{html.escape(each)}</p>" for each in words)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
