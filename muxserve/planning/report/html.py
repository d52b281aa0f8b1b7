"""A plan as one page: whether it is enough first, then where everything is placed, what each model gets, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from muxserve.metrics.colours import colours_of
from muxserve.metrics.page import (
    INK,
    Headline,
    Page,
    PageSection,
    PageTable,
    Strip,
    StripBox,
    StripPart,
    plot,
    share_axis,
)
from muxserve.planning.candidates.layouts import shape_words
from muxserve.planning.place.prediction import Prediction
from muxserve.planning.report.basis import Basis
from muxserve.planning.report.document import SweepPoint, needed, warnings_of
from muxserve.planning.report.sureness import gpus_are
from placement.cluster import PlacedUnit
from placement.estimator import UnitEstimate
from placement.format import format_seconds, format_size
from placement.planner import ClusterPlan, limits_in_words

_ASKED = "#c5cad2"


def plan_page(
    plan: ClusterPlan,
    about: str,
    basis: Basis,
    simulated: Prediction | None = None,
    sweep: Sequence[SweepPoint] = (),
    command: str = "",
) -> Page:
    """The page: the verdict and how sure it is, the placement, what each model gets by the estimate and in simulation,
    the sweep; units and notes are folded away. `command` is the command that made the page.
    """
    colours = colours_of(demand.name for demand in plan.demands)
    sections = [
        _placement(plan, colours),
        PageSection(
            "Models", [_models(plan, simulated, basis)], notes=[_MODELS_NOTE if simulated else "By the estimate."]
        ),
        *([_sweep(sweep)] if sweep else []),
        _throughput(plan, simulated, colours),
        PageSection("Units", [_units(plan)], collapsed=True),
        PageSection("Notes", notes=plan.placement.notes, collapsed=True),
    ]
    verdicts = [_verdict(plan, simulated, sweep)]
    verdicts += [Headline(f"{name} is placed nowhere: {why}", "bad") for name, why in plan.missing.items()]
    verdicts += [Headline(warning, "bad") for warning in warnings_of(plan, simulated, sweep)]
    verdicts += [Headline(words) for words in (basis.sureness.words if basis.sureness is not None else ())]
    return Page("Placement plan", verdicts, sections, about, command, colours)


_MODELS_NOTE = (
    "sim.: simulated under generated load, with all that works together in it; the other figures are estimates."
)


def _verdict(plan: ClusterPlan, simulated: Prediction | None, sweep: Sequence[SweepPoint]) -> Headline:
    met = simulated.summary.overall.slo.get("all") if simulated is not None else None
    enough = needed(sweep) if sweep else None
    words = "Rates and objectives are met" if plan.meets else "Rates or objectives are not met"
    if enough is not None:
        words = f"{gpus_are(enough)} enough"
    elif sweep:
        words = f"Not even {gpus_are(sweep[-1].gpus)} enough"
    figures = (
        f"{plan.throughput:.2f} of {plan.asked:.2f} requests/s served, {plan.attainment:.1%} within their objectives"
        f"{'' if met is None else f' ({met:.1%} in simulation)'}, "
        f"on {plan.devices} of {plan.placement.cluster.devices} devices"
    )
    good = plan.meets if not sweep else enough is not None
    return Headline(f"{words}: {figures}.", "good" if good else "bad")


def _placement(plan: ClusterPlan, colours: Mapping[str, str]) -> PageSection:
    """What each unit's devices are given to, as strips of their memory and of their compute."""
    boxes = []
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        heading = f"{unit.name}: {len(unit.devices)} x {unit.device}"
        boxes.append(StripBox(heading, [_memory(plan, estimate, colours), *_compute(plan, unit, estimate, colours)]))
    used = {model.member.model for estimate in plan.estimates for model in estimate.models}
    legend = {demand.name: colours[demand.name] for index, demand in enumerate(plan.demands) if index in used}
    note = (
        "Memory of each device: weights in full colour, pages in use pale, free pages grey. Compute: shares of the SMs."
    )
    return PageSection("Placement: memory per device, and compute", notes=[note], boxes=boxes, legend=legend)


def _memory(plan: ClusterPlan, estimate: UnitEstimate, colours: Mapping[str, str]) -> Strip:
    total = (estimate.own_bytes + estimate.pool_bytes) or 1
    parts = []
    for pale in (False, True):
        for model in estimate.models:
            name = plan.demands[model.member.model].name
            size = model.memory.kv if pale else model.memory.own
            words = f"{name}: {format_size(round(size))} of {'pages in use' if pale else 'weights and workspace'}"
            parts.append(StripPart(words, size / total, colours[name], pale))
    own = format_size(estimate.own_bytes)
    pool = format_size(estimate.pool_bytes)
    return Strip(f"memory: {own} for models, {pool} pool ({_used(estimate)} in use)", parts)


def _compute(plan: ClusterPlan, unit: PlacedUnit, estimate: UnitEstimate, colours: Mapping[str, str]) -> list[Strip]:
    if unit.alone:
        words = shape_words(unit, unit.models[0].model)
        name = plan.demands[estimate.models[0].member.model].name
        return [Strip(f"compute: {words}", [StripPart(f"{name}: {words}", 1.0, colours[name])])]
    whole = max(1.0, sum(model.decode_share for model in estimate.models))
    parts = []
    for model in estimate.models:
        name = plan.demands[model.member.model].name
        parts.append(
            StripPart(f"{name}: {model.decode_share:.0%} for decode", model.decode_share / whole, colours[name])
        )
    turns = ", which takes turns" if whole > 1.0 else ""
    return [Strip(f"compute: decode by model{turns}; a prefill job takes {estimate.prefill_share:.0%}", parts)]


def _used(estimate: UnitEstimate) -> str:
    return f"{estimate.kv_bytes / estimate.pool_bytes:.0%}" if estimate.pool_bytes else "-"


def _throughput(plan: ClusterPlan, simulated: Prediction | None, colours: Mapping[str, str]) -> PageSection:
    import plotly.graph_objects as go

    names = [demand.name for demand in plan.demands]
    served = [0.0] * len(names)
    for unit in plan.estimates:
        for model in unit.models:
            served[model.member.model] += model.throughput
    own = [colours[name] for name in names]
    bars = [go.Bar(name="asked", x=names, y=[demand.rate for demand in plan.demands], marker_color=_ASKED)]
    # What is estimated is pale, as on the placement; the legend has no colour of a model.
    bars.append(go.Bar(name="estimated", x=names, y=served, marker={"color": own, "opacity": 0.45}))
    if simulated is not None:
        made = [simulated.sustained(name) for name in names]
        bars.append(go.Bar(name="simulated", x=names, y=made, marker_color=own))
    axis = {"title": "requests per second", "rangemode": "tozero"}
    words = "For each model: asked (grey), estimated (pale)" + (", simulated (full)." if simulated is not None else ".")
    figure = plot(bars, barmode="group", yaxis=axis, showlegend=False)
    return PageSection("Throughput per model", figures=[figure], notes=[words])


def _sweep(points: Sequence[SweepPoint]) -> PageSection:
    import plotly.graph_objects as go

    x = [p.gpus for p in points]
    seen = [p for p in points if p.simulated is not None]
    met = {"title": "within objectives", "overlaying": "y", "side": "right", "showgrid": False}
    lines = [
        go.Scatter(name="requests/s served", x=x, y=[p.plan.throughput for p in points], line={"color": INK[0]}),
        go.Scatter(
            name="within objectives",
            x=x,
            y=[p.plan.attainment for p in points],
            yaxis="y2",
            line={"color": INK[1], "dash": "dash"},
        ),
    ]
    if seen:
        lines.append(
            go.Scatter(
                name="within objectives, simulated",
                x=[p.gpus for p in seen],
                y=[p.simulated for p in seen],
                yaxis="y2",
                mode="markers",
                marker={"color": INK[1], "size": 9},
            )
        )
    figure = plot(
        lines,
        xaxis={"title": "GPUs", "tickvals": x},
        yaxis={"title": "requests per second", "rangemode": "tozero"},
        yaxis2={**share_axis("within objectives"), **met},
    )
    enough = needed(points)
    if enough is not None:
        figure.add_vline(
            x=enough, line_dash="dot", annotation_text=f"{enough} are enough", annotation_position="bottom right"
        )
    return PageSection("How many GPUs?", figures=[figure])


def _units(plan: ClusterPlan) -> PageTable:
    rows = [
        [
            unit.name,
            f"{len(unit.devices)} x {unit.device}",
            ", ".join(m.model for m in unit.models),
            f"{estimate.throughput:.2f}/s",
            format_size(estimate.pool_bytes),
            _used(estimate),
            limits_in_words(plan, estimate),
        ]
        for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True)
    ]
    return PageTable(["unit", "devices", "models", "served", "pool", "used", "limit"], rows)


def _models(plan: ClusterPlan, simulated: Prediction | None, basis: Basis) -> PageTable:
    columns = ["model", "unit", "rate", "objectives TTFT / TPOT"]
    if simulated is not None:
        columns += ["sim. req/s", "sim. TTFT", "sim. TTFT p99", "sim. TPOT", "sim. SLO"]
    columns += ["served", "TTFT", "TPOT", "SLO", "engines, or SMs", "waits for", "costs"]
    rows = []
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        for model in estimate.models:
            demand = plan.demands[model.member.model]
            objectives = ["-" if of is None else format_seconds(of) for of in (demand.slo_ttft, demand.slo_tpot)]
            rows.append(
                [
                    demand.name,
                    unit.name,
                    f"{model.rate:.2f}",
                    " / ".join(objectives),
                    *(_in_simulation(simulated, demand.name) if simulated is not None else ()),
                    f"{model.throughput:.2f}",
                    "grows" if math.isinf(model.level.ttft) else format_seconds(model.level.ttft),
                    format_seconds(model.level.tpot),
                    f"{model.level.attainment:.1%}",
                    shape_words(unit, demand.name) or f"{estimate.prefill_share:.0%} / {model.decode_share:.0%}",
                    basis.bottlenecks[unit.name, demand.name],
                    basis.costs.of(demand.name, unit.device),
                ]
            )
    return PageTable(columns, rows)


def _in_simulation(simulated: Prediction, name: str) -> list[str]:
    figures = simulated.summary.models.get(name)
    if figures is None:
        return ["-"] * 5
    met, sustained = figures.slo.get("all"), simulated.sustained(name)
    grows = simulated.unbounded(name)
    return [
        "-" if sustained is None else f"{sustained:.2f}",
        "grows" if grows else format_seconds(figures.ttft.mean) if figures.ttft else "-",
        "grows" if grows else format_seconds(figures.ttft.p99) if figures.ttft else "-",
        format_seconds(figures.tpot.mean) if figures.tpot else "-",
        "-" if met is None else f"{met:.1%}",
    ]
