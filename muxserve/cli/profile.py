"""`muxserve profile`: measure what steps of a fleet's engines cost."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from muxserve.cli.options import check_effect
from muxserve.cli.output import console, errors, escape, print_error, print_problems
from muxserve.cli.progress import downloads
from muxserve.cli.settings import ProfileSettings
from muxserve.cluster.machine import this_machine
from muxserve.config import FleetError, load_fleet
from muxserve.costs.latency import CostError
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import Profile, load_profile
from muxserve.costs.sources import profile_of
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.demand.checkpoints import HuggingFaceHub, fetch
from muxserve.planning.specs.unit_plan import ResolvedUnit, resolve_unit
from muxserve.planning.specs.unit_specs import unit_spec_of
from muxserve.profiling.contention import disturbance
from muxserve.profiling.family import StartError
from muxserve.profiling.grid import Grid, parse_counts
from muxserve.profiling.machine import measure_machine
from muxserve.profiling.measure import DEVICE, Scope, Session
from muxserve.spec.run_dir import RunDir, RunDirError

_BUSY = 0.1


def profile(settings: ProfileSettings) -> int:
    """Measure a fleet and write the profile; returns the exit code."""
    out = settings.out or profile_of(settings.fleet or Path("fleet.yaml"))
    try:
        check_effect(settings.given, ("--url", "--api-key"), "without --from-fleet")
        if settings.fleet is None:
            raise ValueError("which fleet? Name its file, or give --from-fleet")
        # What is measured are prefills and decodes by themselves, however the fleet mixes them.
        plan = resolve_unit(load_fleet(settings.fleet).as_split(), this_machine())
        pooling = [demand.name for demand in plan.demands if demand.architecture.pooling]
        if pooling:
            raise ValueError(
                f"only models that generate text can be measured, and {', '.join(pooling)} answers with vectors; "
                "leave it out of the file. What is not measured is planned with the roofline"
            )
        grid = _grid(settings)
        counts = _threads(plan, settings.threads)
        known = load_profile(out) if out.exists() else None
        _check(known, out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with downloads() as on_bytes:
            fetched = fetch(plan.fleet, lambda text: console.print(escape(text)), HuggingFaceHub(on_bytes=on_bytes))
            plan = plan.with_fleet(fetched)
    except FleetError as error:
        print_problems(error, "nothing was measured")
        return ExitCode.WRONG
    except OSError as error:
        print_error(f"{error.filename or out}: {error.strerror or error}")
        return ExitCode.WRONG
    except (CostError, ValueError) as error:
        print_error(str(error))
        return ExitCode.WRONG
    try:
        run_dir = RunDir()
    except RunDirError as error:
        print_error(str(error))
        return ExitCode.NOT_DONE
    try:
        return _measure(plan, run_dir, known, out, Scope(counts, grid))
    finally:
        run_dir.remove()


def _measure(plan: ResolvedUnit, run_dir: RunDir, known: Profile | None, out: Path, scope: Scope) -> int:
    from muxserve.memory import server

    unit_spec = unit_spec_of(plan, str(run_dir.path))
    if known is None:
        known = Profile(about=f"steps of {', '.join(model.name for model in unit_spec.models)}")
    if DEVICE not in known.machines:
        known.machines[DEVICE] = measure_machine(plan.unit.cores)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def progress(text: str) -> None:
            bar.update(task, description=escape(text))
            if not console.is_terminal:
                console.print(escape(text))

        session = Session(
            unit_spec,
            plan.architectures,
            scope,
            known,
            out,
            progress,
            lambda cells: bar.update(task, advance=cells),
        )
        total = sum(session.outstanding(count) for count in scope.threads)
        bar.update(task, total=total)
        if not total:
            console.print(f"{escape(str(out))} has everything already")
        try:
            asyncio.run(_until_stopped(session))
        except (KeyboardInterrupt, asyncio.CancelledError):
            if out.exists():
                errors.print(
                    f"stopped; {escape(str(out))} has all measurements so far, and the same command goes on from there"
                )
            else:
                errors.print("stopped before anything was measured")
            return ExitCode.INTERRUPTED
        except StartError as error:
            print_error(str(error))
            return ExitCode.NOT_DONE
        finally:
            server.remove_segments(unit_spec)
    _summary(session.profile, out)
    _busy(session)
    return ExitCode.DONE


async def _until_stopped(session: Session) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await session.run()


def _summary(profile: Profile, out: Path) -> None:
    model = ProfileModel(profile)
    for engine in profile.engines:
        if engine.prefill and engine.decode:
            best = max(cell.total / cell.seconds for cell in engine.prefill)
            fastest = max(cell.batch / cell.seconds for cell in engine.decode)
            console.print(
                f"{escape(str(engine))}: {len(engine.prefill)} prefill and {len(engine.decode)} decode cells, "
                f"up to {best:,.0f} prompt and {fastest:,.0f} output tokens/s"
            )
    for outlier in model.outliers:
        console.print(f"left out: {escape(str(outlier))}")
    console.print(f"written to {escape(str(out))}")


def _busy(session: Session) -> None:
    waited = disturbance(session.samples)
    if waited > _BUSY:
        errors.print(
            f"[yellow]the machine was busy with other work:[/] engines waited {waited:.0%} of the time for a core. "
            "Step times were corrected for that, but measure on an idle machine if you can"
        )


def _grid(settings: ProfileSettings) -> Grid:
    given = {name: getattr(settings, name) for name in ("tokens", "sequences", "batches", "contexts")}
    values = {name: parse_counts(text, f"--{name}") for name, text in given.items() if text is not None}
    return Grid(**values)  # type: ignore[arg-type]


def _threads(plan: ResolvedUnit, text: str | None) -> list[int]:
    cores = plan.unit.cores
    if text is None:
        return sorted({model.threads for model in plan.unit.models} | {cores})
    counts = sorted(parse_counts(text, "--threads"))
    if counts[-1] > cores:
        raise ValueError(f"--threads: {counts[-1]} are more than the {cores} cores of the fleet")
    return counts


def _check(known: Profile | None, out: Path) -> None:
    """A file from another machine must not get cells of this one."""
    if known is None or DEVICE not in known.machines:
        return
    from muxserve.profiling.machine import cpu_name

    name = known.machines[DEVICE].name
    if not name.startswith(cpu_name()):
        raise CostError(f"{out} was measured on another machine ({name}); give another file with -o")
