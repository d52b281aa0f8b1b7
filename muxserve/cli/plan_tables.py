"""A plan as tables and words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from muxserve.cli.output import console, escape
from muxserve.config import Fleet
from muxserve.metrics.figure_table import FigureTable
from muxserve.metrics.summary import Summary
from muxserve.planning.candidates.device_pool import CPU
from muxserve.planning.candidates.layouts import shape_words
from muxserve.planning.candidates.ways import SIMPLEST, WAYS
from muxserve.planning.place.contest import Rival, why
from muxserve.planning.place.prediction import Prediction, ResidencyForecast, shares_per_lease
from muxserve.planning.place.sleeping import SleepingForecast
from muxserve.planning.report.basis import Basis
from muxserve.planning.report.document import SweepPoint, needed, warnings_of
from muxserve.planning.report.sureness import gpus_are
from muxserve.planning.report.what_if import ScalePoint, most_met
from placement.format import enumerate_words, format_part, format_seconds, format_size
from placement.planner import ClusterPlan

ALL_AWAKE, WITH_MEMORY = "all awake", "with memory:"


def plan_table(plan: ClusterPlan, simulated: Prediction | None) -> FigureTable:
    """One row per replica, grouped by unit."""
    columns = [
        "unit",
        "devices",
        "model",
        "engines, or SMs",
        "rate",
        "served",
        "TTFT",
        "TPOT",
        "SLO",
        "batch",
        "weights",
    ]
    if simulated:
        columns += ["sim. req/s", "sim. TTFT", "sim. TPOT", "sim. SLO"]
    table = FigureTable(columns, words=3, keys=(0, 2))
    for unit, estimate in zip(plan.placement.units, plan.estimates, strict=True):
        for index, model in enumerate(estimate.models):
            demand = plan.demands[model.member.model]
            replicas = f" (1 of {model.member.replicas})" if model.member.replicas > 1 else ""
            served = f"{model.throughput:.2f}"
            row = [
                escape(unit.name) if index == 0 else "",
                f"{len(unit.devices)} x {unit.device} ({_range(unit.devices)})" if index == 0 else "",
                escape(demand.name) + replicas,
                shape_words(unit, demand.name) or f"{estimate.prefill_share:.0%} / {model.decode_share:.0%}",
                f"{model.rate:.2f}/s",
                served if model.meets_rate else f"[red]{served}[/]",
                "grows" if math.isinf(model.level.ttft) else format_seconds(model.level.ttft),
                format_seconds(model.level.tpot),
                attainment_words(model.level.attainment, plan.objective.attainment),
                f"{model.batch:.1f}",
                format_size(model.memory.own),
            ]
            if simulated:
                row += _simulated(simulated, demand.name)
            table.add_row(*row)
    return table


def units_table(plan: ClusterPlan) -> FigureTable:
    """One row per unit: memory, load, and what limits it."""
    table = FigureTable(["unit", "limit", "models", "pool", "pool used", "headroom"], words=2)
    for unit, estimate, note in zip(plan.placement.units, plan.estimates, plan.placement.notes, strict=False):
        table.add_row(
            escape(unit.name),
            escape(note.partition(": ")[2]),
            format_size(estimate.own_bytes),
            format_size(estimate.pool_bytes),
            f"{estimate.kv_bytes / estimate.pool_bytes:.0%}" if estimate.pool_bytes else "-",
            f"{estimate.headroom:.1f}x" if estimate.next_limit else "-",
        )
    return table


def sweep_table(points: Sequence[SweepPoint]) -> FigureTable:
    """One row per size of the cluster."""
    table = FigureTable(["GPUs", "used", "served/s", "rate-weighted", "SLO", "simulated", "rates and SLOs"], words=0)
    enough = needed(points)
    for p in points:
        verdict = (
            "[green]met[/]" if p.enough else (f"no place for {len(p.plan.missing)}" if p.plan.missing else "not met")
        )
        mark = "[bold]" if p.gpus == enough else ""
        end = "[/]" if mark else ""
        table.add_row(
            f"{mark}{p.gpus}{end}",
            str(p.plan.devices),
            f"{p.plan.throughput:.2f}",
            f"{p.plan.weighted_throughput:.2f}",
            f"{p.plan.attainment:.1%}",
            "-" if p.simulated is None else f"{p.simulated:.1%}",
            verdict,
        )
    return table


def totals_words(plan: ClusterPlan) -> str:
    """The plan in a sentence."""
    cluster = plan.placement.cluster
    met = "rates and objectives are met" if plan.meets else "rates or objectives are [red]not met[/]"
    return (
        f"{plan.throughput:.2f} of {plan.asked:.2f} requests/s served, {plan.attainment:.1%} within their objectives, "
        f"on {plan.devices} of {cluster.devices} devices; {met}"
    )


def attainment_words(part: float, target: float) -> str:
    """A part of requests, marked if below the target."""
    return format_part(part) if part >= target else f"[red]{format_part(part)}[/]"


def _simulated(simulated: Prediction, name: str) -> list[str]:
    figures = simulated.summary.models.get(name)
    if figures is None:
        return ["-"] * 4
    slo, sustained = figures.slo.get("all"), simulated.sustained(name)
    return [
        "-" if sustained is None else f"{sustained:.2f}",
        "grows" if simulated.unbounded(name) else format_seconds(figures.ttft.mean) if figures.ttft else "-",
        format_seconds(figures.tpot.mean) if figures.tpot else "-",
        "-" if slo is None else f"{slo:.0%}",
    ]


def _range(numbers: Sequence[int]) -> str:
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def show_plan(
    made: ClusterPlan, simulated: Prediction | None, points: list[SweepPoint], seconds: float, about: str
) -> None:
    """Print a plan, what its simulation shows, and how it was found."""
    console.print(escape(about))
    if points:
        console.print(sweep_table(points))
        enough = needed(points)
        if enough is None:
            most = made.placement.cluster.devices
            console.print(f"not even {points[-1].gpus} GPUs meet all rates and objectives; the plan for {most}:")
        else:
            by = "" if simulated is not None else " by the estimate"
            console.print(f"[bold]{gpus_are(enough)}[/] enough{by}; the plan for that many:")
    console.print(plan_table(made, simulated))
    console.print()
    console.print(units_table(made))
    for note in made.placement.notes[len(made.placement.units) :]:
        console.print(f"- {escape(note)}")
    console.print(totals_words(made))
    if simulated is not None:
        overall = simulated.summary.overall
        slo = overall.slo.get("all")
        longest = max((window.seconds for window in simulated.windows.values()), default=0.0)
        over = f" over up to {longest:.0f} s" if longest > simulated.seconds else ""
        figures = [] if simulated.throughput is None else [f"{simulated.throughput:.2f} requests/s{over}"]
        figures += [] if slo is None else [f"{slo:.1%} within their objectives"]
        console.print(
            f"simulated {overall.requests} requests in {simulated.seconds:.0f} s of virtual time"
            f"{': ' if figures else ''}{', '.join(figures)}"
        )
    for warning in warnings_of(made, simulated, points):
        console.print(f"[red]{escape(warning)}[/]")
    search = f"{made.search.evaluations} units estimated in {seconds:.1f} s"
    console.print(search)


def show_scales(points: Sequence[ScalePoint]) -> None:
    """Print a sweep over rates, one row per scale, and how far they are met."""
    if not points:
        return
    table = FigureTable(["rates", "used", "served/s", "SLO", "simulated", "rates and SLOs"], words=0)
    met = most_met(points)
    for each in points:
        plan, simulated = each.point.plan, each.point.simulated
        table.add_row(
            f"{each.scale:g}x",
            str(plan.devices),
            f"{plan.throughput:.2f}",
            f"{plan.attainment:.1%}",
            "-" if simulated is None else f"{simulated:.1%}",
            "[green]met[/]" if each.point.enough else "not met",
        )
    console.print(table)
    devices = points[0].point.plan.placement.cluster.devices
    if met is None:
        console.print(f"{devices} devices do not meet {points[0].scale:g} times the rates; the plan for that:")
    else:
        words = f"{devices} devices meet [bold]{met:g} times[/] the rates, and no larger scale of these"
        console.print(f"{words}; the plan for that:")


def show_basis(basis: Basis) -> None:
    """Print what models wait for, how far predictions of this kind were off, and what that would do to the plan."""
    if basis.bottlenecks:
        waiting = "; ".join(f"{what} for {enumerate_words(models)}" for what, models in basis.waiting.items())
        console.print(escape(f"bottleneck: {waiting}"))
    for words in basis.sureness.words if basis.sureness is not None else ():
        console.print(escape(words))


def show_residency(forecast: ResidencyForecast) -> None:
    """Print what it costs that not all models are awake."""
    told = forecast.resident.residency
    assert told is not None, "memory decides"
    table = FigureTable([escape(forecast.about), "memory", "wakes", "waited", "TTFT p50", "p99", "SLO"], words=1)
    for name, run, size, wakes, waited in (
        (ALL_AWAKE, forecast.awake, forecast.awake_bytes, "-", "-"),
        (WITH_MEMORY, forecast.resident, forecast.limit, str(told.wakes), str(told.waited)),
    ):
        table.add_row(name, format_size(size), wakes, waited, *_first_tokens(run.summary))
    console.print(table)


def _first_tokens(summary: Summary) -> list[str]:
    """Cells of a row: the median and the 99th percentile of TTFT, and the part of the requests within objectives."""
    ttft, slo = summary.overall.ttft, summary.overall.slo.get("all")
    times = ["-", "-"] if ttft is None else [format_seconds(ttft.p50), format_seconds(ttft.p99)]
    return [*times, "-" if slo is None else f"{slo:.1%}"]


def show_sleeping(forecast: SleepingForecast) -> None:
    """Print what models that sleep would bring on GPUs."""
    console.print(f"models that sleep, simulated on {escape(forecast.about)}")
    columns = ["GPUs", "models", "without a place", "wakes", "waited", "turns", "TTFT p50", "p99", "SLO"]
    table = FigureTable(columns, words=2, keys=(0, 1))
    for point in forecast.points:
        awake = point.awake
        table.add_row(
            str(point.gpus), ALL_AWAKE, str(len(awake.without_place)), "-", "-", "-", *_first_tokens(awake.summary)
        )
        if point.asleep is None or (told := point.asleep.residency) is None:
            table.add_row(str(point.gpus), WITH_MEMORY, *["-"] * 7)
            continue
        counts = map(str, (told.wakes, told.waited, told.switches))
        table.add_row(str(point.gpus), WITH_MEMORY, "0", *counts, *_first_tokens(point.asleep.summary))
    console.print(table)
    for point in forecast.points:
        if point.why_not:
            console.print(f"- {point.gpus} GPUs, {WITH_MEMORY.rstrip(':')}: {escape(point.why_not)}")
    if len(forecast.points) > 1:
        needed = ((ALL_AWAKE, forecast.awake_gpus), (WITH_MEMORY, forecast.asleep_gpus))
        enough = ", ".join(f"{'more' if gpus is None else gpus} {name}" for name, gpus in needed)
        console.print(f"GPUs for {forecast.attainment:.0%} of these requests within their objectives: {enough}")
    console.print(f"{WITH_MEMORY} as `muxserve deploy` serves the fleet with `memory:` in its file")


def show_policies(fleet: Fleet, plan: ClusterPlan) -> None:
    """Print what decides in units whose models share compute, and whether their engines' shares can change."""
    policies = dict.fromkeys(unit.policy or fleet.policy for unit in plan.placement.units if not unit.alone)
    if not policies:
        return
    on_gpus = [unit for unit in plan.placement.units if unit.device != CPU and not unit.alone]
    green = shares_per_lease(fleet, plan.placement)
    shares = ""
    # Other policies give engines in green contexts one share for their life.
    if green and "slack" in policies:
        shares = "; engines have their shares from lease to lease"
    elif not on_gpus or any(unit.has_shares for unit in on_gpus):
        shares = "; engines have their shares for their life"
    console.print(f"policy {escape(enumerate_words(list(policies)))}{shares}")
    beside = any((unit.policy or fleet.policy) == "free" or unit.has_shares for unit in on_gpus)
    if beside and fleet.cluster.mps != "off":
        what = "MPS and green contexts" if green else "MPS"
        console.print(f"`muxserve deploy` needs {what} for that; `muxserve doctor --gpu` tries it on the machine")
    elif on_gpus:
        console.print("jobs take turns on all SMs, for which `muxserve deploy` needs nothing of the GPUs")


def show_spare(spare: Mapping[str, float]) -> None:
    """Print for which models there is spare."""
    if spare:
        models = ", ".join(f"{name} {factor:.2f}x" for name, factor in spare.items())
        console.print(
            f"planned with spare for models whose simulation fell short at first: {escape(models)} of the rate"
        )


def show_rivals(rivals: Sequence[Rival]) -> None:
    """Print which way to serve was chosen, why the runner-up and the simplest way were not, and what each does under
    every workload."""
    if len(rivals) < 2:
        return
    first, second = rivals[:2]
    console.print(f"chosen by simulation: [bold]{first.words}[/] ({WAYS[first.way].about})")
    console.print(f"runner-up: {second.words} ({WAYS[second.way].about}): {why(first, second)}")
    simplest = next((each for each in rivals[2:] if each.is_way(SIMPLEST)), None)
    same = next((each.way for each in rivals[:2] if each.is_way(SIMPLEST) and each.way != SIMPLEST), None)
    if same is not None:
        console.print(f"simplest: the same plan as {same} ({WAYS[SIMPLEST].about})")
    if simplest is not None:
        # Under its own name, since another plan of the same way may be there with spare.
        simplest = replace(simplest, way=SIMPLEST)
        console.print(f"simplest: {simplest.words} ({WAYS[SIMPLEST].about}): {why(first, simplest)}")
    shown = [first, second, *([] if simplest is None else [simplest])]
    table = FigureTable(["requests that count", *(each.way for each in shown)], words=1)
    for name in first.kept:
        table.add_row(name, *(f"{each.kept[name]:.1%}" if name in each.kept else "-" for each in shown))
    table.add_row("mean", *(f"{each.mean:.1%}" for each in shown))
    console.print(table)
