"""`muxserve plan`."""

from __future__ import annotations

import json
import time

from muxserve.cli.options import NoEffectError, check_effect
from muxserve.cli.output import command_line, errors, escape, print_error, print_problems, working
from muxserve.cli.plan_tables import (
    show_basis,
    show_plan,
    show_policies,
    show_residency,
    show_rivals,
    show_scales,
    show_sleeping,
    show_spare,
)
from muxserve.cli.settings import PlanSettings
from muxserve.config import Fleet, FleetError, load_fleet
from muxserve.costs.latency import CostError
from muxserve.costs.sources import chosen_costs
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.candidates.layouts import asks_for_choice
from muxserve.planning.demand.demands import ClusterError, cluster_of
from muxserve.planning.planner import (
    NO_SLEEPING,
    PlannedFleet,
    Planner,
    UsageError,
    options_of,
)
from muxserve.planning.report.basis import Basis, bottlenecks, costs_used
from muxserve.planning.report.document import document, parse_sweep, residency_document, sleeping_document
from muxserve.planning.report.what_if import check_beside, most_met, parse_scales, save_fleet, with_rates
from muxserve.planning.specs.plan_file import save_plan
from muxserve.planning.specs.unit_demands import estimated_in_words
from muxserve.simulator import SimulationError
from muxserve.workload import Workload, WorkloadError, open_workload
from placement.planner import PlanOptions

# The workload of a fleet with `memory` on GPUs, where none is named: at the rates of its models.
_ANY_WORKLOAD = "bursty-groups:duration=120"


def plan(settings: PlanSettings) -> int:
    """Plan, print, and write the files that the settings name; returns the exit code."""
    try:
        return _plan(settings)
    except FleetError as error:
        print_problems(error, "there is no plan")
    except (ClusterError, CostError, NoEffectError, SimulationError, UsageError, WorkloadError) as error:
        print_error(str(error))
    except OSError as error:
        print_error(f"{error.filename}: cannot be written: {error.strerror}")
    return ExitCode.WRONG


def _plan(settings: PlanSettings) -> int:
    fleet = with_rates(load_fleet(settings.fleet, serving=False), settings.scale)
    options = _options(settings, fleet)
    latency = chosen_costs(settings.costs, settings.fleet)
    sizes, scales = _sweep(settings.sweep)
    for path in filter(None, (settings.output, settings.html)):
        if not path.parent.is_dir():
            raise UsageError(f"{path}: cannot be written: there is no directory {path.parent}")
    if settings.save is not None:
        try:
            check_beside(settings.fleet, settings.save)
        except ValueError as error:
            raise UsageError(f"--save: {error}") from None
    cluster = cluster_of(
        fleet, (settings.gpus or sizes[-1]) if sizes else settings.gpus, settings.gpu_type, settings.nodes
    )
    workload = _workload(settings, fleet, on_gpus=cluster is not None and not scales)
    _check_effects(settings, cluster is not None, bool(sizes), bool(scales))
    began = time.monotonic()
    with working("planning") as told:
        planner = Planner(
            file=settings.fleet,
            fleet=fleet,
            latency=latency,
            options=options,
            seconds=settings.seconds,
            simulate=settings.simulate,
            told=told,
            robust=settings.robust,
        )
        if cluster is None:
            _check_cpu(settings, fleet)
            made = planner.on_cpu(workload)
        else:
            every = workload is not None  # plans are compared of every size
            if scales:
                made = planner.scaled(scales, cluster)
                fleet = with_rates(fleet, most_met(made.scales) or scales[0])
            else:
                made = planner.swept(sizes, cluster, every) if sizes else planner.on_gpus(cluster)
            made.sureness = planner.how_sure(made, sizes)
            if workload is not None:
                made.sleeping = planner.with_sleeping_models(made, workload)
    costs = costs_used(latency, made.plan.demands, made.plan.placement)
    basis = Basis(costs, bottlenecks(made.plan), made.sureness)
    _tell(settings, fleet, made, basis, time.monotonic() - began)
    if settings.save is not None:
        save_fleet(settings.fleet, settings.save, made.plan.placement.cluster if cluster is not None else None, fleet)
        errors.print(f"fleet file written to {escape(str(settings.save))}")
    if options.mode != "muxserve" and any(model.has_own_unit for model in fleet.models):
        errors.print(f"--mode {options.mode} plans no stages and no rolling prefill, whatever the file says")
    if any(map(asks_for_choice, fleet.models)) and (sizes or scales or options.mode != "muxserve"):
        why = "a sweep" if sizes or scales else f"--mode {options.mode}"
        errors.print(f"{why} plans two engines where `engines: auto` leaves a choice")
    return ExitCode.NO if made.plan.missing else ExitCode.DONE


def _tell(settings: PlanSettings, fleet: Fleet, made: PlannedFleet, basis: Basis, seconds: float) -> None:
    """Print the plan, and write it where it was asked for."""
    about = f"{settings.fleet.name}, objective {made.plan.objective.name}, costs: {basis.costs}"
    if settings.as_json:
        data = document(made.plan, str(settings.fleet), basis, seconds, made.simulated, made.points, made.rivals)
        data["search"]["contest_seconds"] = made.contest_seconds
        if made.residency is not None:
            data["residency"] = residency_document(made.residency)
        if made.sleeping is not None:
            data["sleeping"] = sleeping_document(made.sleeping)
        if made.scales:
            data |= {"scales": [each.as_dict() for each in made.scales], "scale_met": most_met(made.scales)}
        if made.sureness is not None:
            data["sureness"] = made.sureness.as_dict()
        print(json.dumps(data, indent=2))
    else:
        show_scales(made.scales)
        show_plan(made.plan, made.simulated, made.points, seconds, about)
        show_basis(basis)
        show_policies(fleet, made.plan)
        if made.residency is not None:
            show_residency(made.residency)
        if made.sleeping is not None:
            show_sleeping(made.sleeping)
        show_spare(made.spare)
        show_rivals(made.rivals)
    for note in (*made.notes, *estimated_in_words(made.plan.demands)):
        errors.print(escape(note))
    if made.why_not:
        errors.print(f"not simulated: {escape(made.why_not)}")
    if settings.output is not None and made.plan.placement.units:
        save_plan(made.plan.placement, settings.output, about)
        errors.print(f"plan written to {escape(str(settings.output))}")
    elif settings.output is not None:
        errors.print(f"{escape(str(settings.output))} is not written: no model has a place")
    if settings.html is not None:
        from muxserve.metrics.page import write_page
        from muxserve.planning.report.html import plan_page

        page = plan_page(made.plan, about, basis, made.simulated, made.points, command_line())
        write_page(settings.html, page)
        errors.print(f"page written to {escape(str(settings.html))}")


def _workload(settings: PlanSettings, fleet: Fleet, on_gpus: bool) -> Workload | None:
    """That by which models that sleep are compared with models that are all awake; where the fleet file has `memory`,
    one `on_gpus` at the file's rates needs none to be named."""
    named = settings.workload
    if named is None and fleet.memory is not None and on_gpus and settings.mode == "muxserve":
        named = _ANY_WORKLOAD
    if named is None:
        return None
    if settings.mode != "muxserve":
        raise UsageError("--workload does not go with --mode")
    rates = {model.name: model.rate for model in fleet.models}
    try:
        found = open_workload(named, rates)
        # Read to its end before anything is planned: a trace may be wrong at its last line.
        if not sum(1 for _ in found):
            raise WorkloadError(f"{found.about} has no requests")
    except OSError as error:
        raise UsageError(f"--workload: {error.filename} cannot be read: {error.strerror}") from None
    return found


def _check_effects(settings: PlanSettings, on_gpus: bool, sweeps: bool, scales: bool) -> None:
    """
    Raises:
        NoEffectError: an option is given that changes nothing.
    """
    given, simulated = settings.given, settings.simulate is None or settings.simulate > 0
    if not on_gpus:
        check_effect(given, ["--seconds"], "on a CPU, where no placement is searched for")
        check_effect(given, ["--robust"], "on a CPU, where one way to serve is planned")
    if sweeps:
        check_effect(given, ["--gpus"], "with --sweep, which says how many there are")
        check_effect(given, ["--robust"], "with --sweep, which compares sizes and no other ways to serve")
    if scales:
        check_effect(given, ["--robust"], "with --sweep, which compares rates and no other ways to serve")
        check_effect(given, ["--workload"], "with a sweep over rates")
    if settings.mode != "muxserve":
        check_effect(given, ["--robust"], "where no other way to serve is compared")
    if not simulated:
        check_effect(given, ["--robust"], "if nothing is simulated")


def _check_cpu(settings: PlanSettings, fleet: Fleet) -> None:
    if settings.workload is not None and fleet.memory is None:
        raise UsageError(NO_SLEEPING)
    if settings.sweep or settings.mode != "muxserve":
        raise UsageError("the fleet has no GPUs to choose among; give --gpus and --gpu-type, or gpus in the fleet file")


def _options(settings: PlanSettings, fleet: Fleet) -> PlanOptions:
    over_rates = settings.sweep is not None and settings.sweep.lstrip().startswith("scale")
    if settings.sweep is not None and settings.nodes is not None and not over_rates:
        raise UsageError("--sweep varies the number of equal machines; it does not go with --nodes")
    return options_of(fleet, settings.mode, settings.seed, settings.objective, settings.attainment)


def _sweep(text: str | None) -> tuple[list[int], list[float]]:
    """The sizes of a sweep, or its scales."""
    try:
        if text is None:
            return [], []
        return ([], parse_scales(text)) if text.lstrip().startswith("scale") else (parse_sweep(text), [])
    except ValueError as error:
        raise UsageError(f"--sweep: {error}") from None
