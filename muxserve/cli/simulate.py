"""`muxserve simulate`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muxserve.cli.options import NoEffectError, check_effect
from muxserve.cli.output import command_line, console, errors, escape, print_error, print_problems, working
from muxserve.cli.settings import SimulateSettings
from muxserve.cli.simulate_places import PlacementSearch, Places, PlacesError, places_of
from muxserve.cli.workload import print_left_out
from muxserve.config import FleetError
from muxserve.costs.latency import CostError
from muxserve.costs.measured import overheads_on
from muxserve.costs.sources import chosen_costs
from muxserve.metrics import Objectives
from muxserve.metrics.colours import colours_of
from muxserve.metrics.page import DASHES, INK, plot, share_axis
from muxserve.metrics.report import comparison_table, models_table, report_page, to_json, write_page
from muxserve.metrics.summary import Summary, summarise
from muxserve.metrics.tables import seconds_words
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.candidates.layouts import simulated_keys, simulated_words
from muxserve.planning.demand.demands import ClusterError, contexts_of
from muxserve.planning.place.prediction import Simulated
from muxserve.planning.report.basis import costs_used
from muxserve.planning.specs.unit_specs import levels_of
from muxserve.replicas.priorities import Levels, PriorityError
from muxserve.simulator import (
    AloneSimulation,
    FleetResult,
    Mode,
    Options,
    SimulationError,
    UnitResult,
    mode_of,
    simulate,
    write_timeline,
)
from muxserve.simulator.fleet import PriorityOf
from muxserve.workload import Workload, WorkloadError, check_fits, open_workload
from placement.format import enumerate_words, format_size


@dataclass(frozen=True, slots=True)
class Run:
    """One mode's outcome."""

    mode: Mode
    result: FleetResult
    summary: Summary
    placed: Simulated


def run(settings: SimulateSettings) -> int:
    """Simulate, print, and write the files that the settings name; returns the exit code."""
    try:
        return _run(settings)
    except FleetError as error:
        print_problems(error, "nothing was simulated")
    except (WorkloadError, SimulationError, CostError, ClusterError, NoEffectError, PlacesError) as error:
        print_error(str(error))
    except OSError as error:
        print_error(f"{error.filename or 'file'}: {error.strerror or error}")
    except KeyboardInterrupt:
        print_error("interrupted")
        return ExitCode.INTERRUPTED
    return ExitCode.WRONG


def _run(settings: SimulateSettings) -> int:
    modes = _modes(settings.mode)
    for path in filter(None, (settings.out, settings.html, settings.timeline)):
        if not path.parent.is_dir():
            raise PlacesError(f"{path} cannot be written: there is no directory {path.parent}")
    latency = chosen_costs(settings.costs, settings.fleet)
    with working("reading") as told:
        search = PlacementSearch(settings.seconds, settings.seed, told)
        places = places_of(
            settings.fleet, settings.gpus, settings.gpu_type, settings.nodes, settings.plan, latency, search
        )
        places.compares = len(modes) > 1
        _check_effects(settings, modes, places)
        workload = open_workload(
            settings.workload,
            {demand.name: demand.rate for demand in places.demands},
        )
        check_fits(workload, contexts_of(places.demands))
        levels = Levels(levels_of(places.fleet))
        priorities = _priorities(settings, levels)
        runs: dict[str, Run] = {}
        found = [(mode, placed := places.of(mode), placed.units(mode)) for mode in modes]
        # One yardstick for all modes: the devices that a model has in the first in which it has a place.
        alone = AloneSimulation([unit for *_, units in found for unit in units], latency)
        for mode, placed, units in found:
            overheads = overheads_on(latency, placed.placement.units[0].device)
            options = Options(overheads, timeline=settings.timeline is not None)
            result = simulate(
                units,
                workload,
                latency,
                options,
                placed.rules_of(mode),
                priorities,
                levels,
                _count(mode.name, told),
            )
            summary = _summary(result, places, alone, mode, placed)
            runs[mode.name] = Run(mode, result, summary, placed)
    for note in (*places.notes, places.baselines([mode.name for mode in modes if mode.placement != "muxserve"])):
        if note:
            errors.print(escape(note))
    print_left_out(workload)
    if not next(iter(runs.values())).result.records:
        raise WorkloadError(f"{workload.about} has no requests")
    _report(settings, workload, places, runs)
    failed = any(run.summary.overall.completed < run.summary.overall.requests for run in runs.values())
    return ExitCode.NO if failed else ExitCode.DONE


def _check_effects(settings: SimulateSettings, modes: Sequence[Mode], places: Places) -> None:
    """
    Raises:
        NoEffectError: an option is given that changes nothing.
    """
    planned = [mode for mode in modes if mode.placement == "muxserve"]
    if not planned:
        check_effect(settings.given, ["--plan"], "on modes whose placement is another, which is planned now")
    if places.cluster is None:
        check_effect(settings.given, ["--seconds"], "on a CPU, where no placement is searched for")
    if settings.plan is not None and len(planned) == len(modes):
        check_effect(settings.given, ["--seconds"], "with --plan, where no placement is searched for")


def _priorities(settings: SimulateSettings, levels: Levels) -> PriorityOf | None:
    """The levels of requests, drawn by the parts that the command line gives; all others have the default one."""
    if not settings.priorities:
        return None
    parts: dict[str, float] = {}
    for each in settings.priorities.split(","):
        name, _, part = each.partition("=")
        try:
            parts[levels[name.strip()].name] = float(part)
        except ValueError as error:
            why = str(error) if isinstance(error, PriorityError) else f"{part!r} is not a number"
            raise PlacesError(f"--priorities {each}: {why}") from None
    if not (min(parts.values()) >= 0.0 and sum(parts.values()) <= 1.0):  # also not a number
        raise PlacesError("--priorities: give parts of at least 0 that are at most 1 together, e.g. high=0.1")
    names = [*parts, levels.default]
    weights = [*parts.values(), 1.0 - sum(parts.values())]

    def level(number: int) -> tuple[str, str]:
        (name,) = random.Random(f"{settings.seed}/{number}").choices(names, weights)
        return name, name

    return level


def _modes(text: str) -> list[Mode]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise PlacesError("--mode: at least one is needed, e.g. muxserve,spatial,temporal")
    return [mode_of(name) for name in dict.fromkeys(names)]


def _summary(result: FleetResult, places: Places, alone: AloneSimulation, mode: Mode, placed: Simulated) -> Summary:
    return summarise(
        result.records,
        rates={demand.name: demand.rate for demand in places.demands},
        reference=alone,
        objectives={demand.name: Objectives(demand.slo_ttft, demand.slo_tpot) for demand in places.demands},
        extra=_extra(result, mode, placed),
    )


def _extra(result: FleetResult, mode: Mode, placed: Simulated) -> dict[str, object]:
    """The simulator's own figures, in the report's `extra`."""
    return {
        "mode": {"name": mode.name, "about": mode.about},
        "placement": placed.about,
        "devices": result.devices,
        "device_seconds": result.gpu_seconds,
        "busy_device_seconds": result.busy_gpu_seconds,
        "engine_steps": result.jobs,
        "units": [
            {
                "name": unit.unit,
                "device": unit.device,
                "devices": unit.devices,
                "engines_of": dict(zip(unit.models, unit.shapes, strict=True)),
                "busy_seconds": unit.busy_seconds,
                "pool_pages": unit.pool_pages,
                "peak_pages": dict(zip(unit.models, unit.peak_pages, strict=True)),
                "engines": [
                    {
                        "model": engine.model,
                        "phase": engine.phase,
                        "steps": engine.jobs,
                        "tokens": engine.tokens,
                        "busy_seconds": engine.busy_seconds,
                    }
                    for engine in unit.engines
                ],
                **({} if unit.residency is None else {"residency": asdict(unit.residency)}),
                "pages": {
                    "seconds": [time for time, _ in unit.pages],
                    **{name: [held[i] for _, held in unit.pages] for i, name in enumerate(unit.models)},
                },
                **simulated_keys(unit),
            }
            for unit in result.units
        ],
        "replicas": [
            {
                "model": each.model,
                "average": each.average,
                "peak": each.peak,
                "started": each.started,
                "moved": each.migrations,
                "moves_aborted": each.aborted,
                "downtime": each.downtime,
            }
            for each in result.replicas
        ],
    }


def _report(settings: SimulateSettings, workload: Workload, places: Places, runs: Mapping[str, Run]) -> None:
    summaries = {name: run.summary for name, run in runs.items()}
    costs = costs_used(places.latency, places.demands, next(iter(runs.values())).placed.placement)
    about = f"{workload.about}; {places.about}; costs: {costs}"
    parameters: dict[str, object] = {
        "fleet": str(settings.fleet),
        "workload": settings.workload,
        "modes": list(runs),
        "seed": settings.seed,
    }
    document = to_json(summaries, about=about, parameters=parameters)
    if settings.as_json:
        sys.stdout.write(document.decode())
    else:
        console.print(escape(about))
        console.print(comparison_table(summaries))
        for name, run in runs.items():
            words = f"\n[bold]{escape(name)}[/]: {escape(run.mode.about)}; {run.result.devices} devices"
            if run.result.gpu_seconds:
                words += f", a job runs {run.result.busy_gpu_seconds / run.result.gpu_seconds:.0%} of the time"
            console.print(words)
            console.print(escape(run.placed.about))
            console.print(models_table(run.summary))
            for words in (*_engine_words(run.result), *_replicas_words(run.result), *_residency_words(run.result)):
                console.print(f"- {escape(words)}")
            for text, count in run.summary.errors.items():
                console.print(f"[red]{count} x[/] {escape(text)}")
    written = [*_timelines(settings.timeline, runs)]
    if settings.out is not None:
        settings.out.write_bytes(document)
        written.append(settings.out)
    if settings.html is not None:
        names = [model.name for model in places.fleet.models]
        title, figures = "MuxServe simulation", _plots(summaries, names)
        page = report_page(summaries, title=title, about=about, extra=figures, command=command_line(), models=names)
        write_page(settings.html, page)
        written.append(settings.html)
    for path in written:
        errors.print(f"written to {escape(str(path))}")


def _plots(runs: Mapping[str, Summary], models: Iterable[str]) -> list[tuple[str, Any]]:
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


def _timelines(path: Path | None, runs: Mapping[str, Run]) -> Iterator[Path]:
    """One file per mode: devices and times of different modes do not go together."""
    if path is None:
        return
    for name, run in runs.items():
        target = path if len(runs) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}")
        write_timeline(target, run.result.timelines)
        yield target


def _count(mode: str, told: Callable[[str], None]) -> Callable[[int, int], None]:
    return lambda done, total: told(f"{mode}: {done} of {total} requests")


def _engine_words(result: FleetResult) -> Iterator[str]:
    """A sentence on the models with one engine, and one on each that has stages or rolls."""
    units: dict[str, list[UnitResult]] = {}
    one = []
    for unit in result.units:
        for model, shape in zip(unit.models, unit.shapes, strict=True):
            units.setdefault(model, []).append(unit)
            if shape == "one" and model not in one:
                one.append(model)
    special = {model: words for model, mine in units.items() if (words := simulated_words(model, mine))}
    plain = [model for model in one if model not in special]
    if plain:
        yield f"{enumerate_words(plain)} {'has' if len(plain) == 1 else 'have'} one engine of both phases"
    yield from special.values()


def _residency_words(result: FleetResult) -> Iterator[str]:
    """A sentence for each unit in which memory decides who is awake."""
    for unit in result.units:
        if unit.residency is not None:
            seen = unit.residency
            stops = f"; {seen.switches} times a model stopped to have its next turn later" if seen.switches else ""
            yield (
                f"{seen.wakes} wakes, {seen.sleeps} times a model was put to sleep, {seen.waited} requests waited for "
                f"a wake; at most {format_size(seen.peak_bytes)} were set aside{stops}"
            )


def _replicas_words(result: FleetResult) -> Iterator[str]:
    """A sentence for each model whose requests moved, or whose replicas came or went."""
    for each in result.replicas:
        found = []
        if each.counts[1:]:
            found.append(f"up to {each.peak} replicas, {each.average:.1f} on average")
        if each.downtime is not None:
            paused = seconds_words(each.downtime)
            found.append(f"{each.migrations} moves of requests, each in no batch for {paused} on average")
        if found:
            yield f"{each.model}: {'; '.join(found)}"
