"""`muxserve workload generate`, `convert` and `describe`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from muxserve.cli.output import console, errors, escape, print_error, print_problems
from muxserve.config import FleetError, load_fleet
from muxserve.metrics.figure_table import FigureTable
from muxserve.metrics.tables import figure_words
from muxserve.net.exit_codes import ExitCode
from muxserve.workload import TraceRequest, Workload, WorkloadError, open_workload, write_trace
from muxserve.workload import describe as figures_of
from muxserve.workload.describe import Description, WorkloadSummary
from muxserve.workload.spec import TraceSpec, is_generator, parse_spec


def generate(spec: str, out: Path, *, fleet: Path | None, models: str | None, about: str) -> int:
    """Write a generated workload; returns the exit code."""

    def run() -> None:
        if not is_generator(spec):
            raise WorkloadError(
                f"{spec!r} is no specification such as poisson:rate=8,duration=60; use `convert` for files"
            )
        _write(open_workload(spec, models_of(fleet, models)), out, about)

    return _guarded(run)


def convert(source: str, out: Path, *, fleet: Path | None, models: str | None, about: str) -> int:
    """Write a workload in our own format; returns the exit code."""

    def run() -> None:
        spec = parse_spec(source)
        if isinstance(spec, TraceSpec) and out.exists() and os.path.samefile(spec.path, out):
            raise WorkloadError(f"{out} would be overwritten while it is read; write to another file")
        _write(open_workload(source, models_of(fleet, models)), out, about)

    return _guarded(run)


def describe(source: str, *, fleet: Path | None, models: str | None, as_json: bool) -> int:
    """Print what a workload looks like; returns the exit code."""

    def run() -> None:
        workload = open_workload(source, models_of(fleet, models))
        with _counted(workload, "reading") as requests:
            described = figures_of(requests)
        described = msgspec.structs.replace(described, seconds=workload.duration or described.seconds)
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(described), indent=2).decode())
        else:
            console.print(f"{escape(workload.about)}: {described.seconds:.6g} s")
            console.print(_table(described))
        print_left_out(workload)

    return _guarded(run)


def models_of(fleet: Path | None, models: str | None) -> Mapping[str, float] | Sequence[str] | None:
    """The models that a command names.

    Raises:
        FleetError: the fleet file is wrong.
        WorkloadError: both are given, or `models` makes no sense.
    """
    if fleet is not None and models is not None:
        raise WorkloadError("--fleet and --models exclude each other")
    if fleet is not None:
        return {model.name: model.rate for model in load_fleet(fleet).models}
    if models is None:
        return None
    parts = [part.strip() for part in models.split(",") if part.strip()]
    names = [part.partition("=")[0].strip() for part in parts]
    if not names or len(set(names)) != len(names) or not all(names):
        raise WorkloadError(f"--models {models!r} must name at least one model, and none twice")
    if not any("=" in part for part in parts):
        return names
    try:
        rates = {name: float(part.partition("=")[2]) for name, part in zip(names, parts, strict=True)}
    except ValueError:
        rates = {}
    if not rates or not all(0 < rate < float("inf") for rate in rates.values()):
        raise WorkloadError(f"--models {models!r}: every model needs a positive rate, or none has one") from None
    return rates


def print_left_out(workload: Workload) -> None:
    """Say on stderr what reading it left out."""
    left = workload.left_out
    if left.bad:
        errors.print(f"[yellow]left out {left.bad} malformed:[/] {escape(left.first_bad)}" + (" ..." * (left.bad > 1)))
    for reason, count in left.dropped.items():
        errors.print(f"[yellow]left out {count}:[/] {escape(reason)}")


def _guarded(run: Callable[[], None]) -> int:
    try:
        run()
    except FleetError as error:
        print_problems(error, "nothing was done")
        return ExitCode.WRONG
    except WorkloadError as error:
        print_error(str(error))
        return ExitCode.WRONG
    except OSError as error:
        print_error(f"{error.filename or 'file'}: {error.strerror or error}")
        return ExitCode.WRONG
    return ExitCode.DONE


def _write(workload: Workload, out: Path, about: str) -> None:
    # A file that could not be finished must not be taken for a workload, nor replace the file before it.
    part = out.with_name(f".part-{out.name}")
    try:
        with _counted(workload, "writing") as requests:
            count = write_trace(
                part,
                workload.models,
                requests,
                duration=round(workload.duration, 6),
                about=about or workload.about,
                seed=workload.seed,
                parameters={"workload": workload.about},
            )
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    print_left_out(workload)
    console.print(f"{escape(workload.about)}: {count} requests over {workload.duration:.6g} s in {escape(str(out))}")


@contextlib.contextmanager
def _counted(workload: Workload, doing: str) -> Iterator[Iterable[TraceRequest]]:
    """The requests, counted on a terminal while they pass."""
    if not errors.is_terminal:
        yield workload
        return
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed:,} requests"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(doing, total=None)

        def passing() -> Iterator[TraceRequest]:
            count = 0
            for count, request in enumerate(workload, start=1):
                if count % 1000 == 0:
                    progress.update(task, completed=count)
                yield request
            progress.update(task, completed=count)

        yield passing()


def _table(described: Description) -> FigureTable:
    headings = ["model", "requests", "req/s", "CV", "peak"]
    headings += [f"{side} {of}" for side in ("prompt", "output") for of in ("mean", "p50", "p95", "p99", "max")]
    table = FigureTable(headings)
    for name, part in described.models.items():
        table.add_row(escape(name), *_cells(part))
    if described.overall and len(described.models) > 1:
        table.add_row("all", *_cells(described.overall), style="bold")
    return table


def _cells(part: WorkloadSummary) -> list[str]:
    cells = [str(part.requests), figure_words(part.rate, 4), figure_words(part.cv, 3), figure_words(part.peak, 3)]
    for side in (part.prompt, part.output):
        cells += [f"{value:.0f}" for value in (side.mean, side.p50, side.p95, side.p99, side.max)]
    return cells
