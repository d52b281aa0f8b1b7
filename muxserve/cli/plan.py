"""`muxserve plan`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muxserve.cli.given import NoEffectError, check_effect
from muxserve.cli.output import command_line, errors, escape, print_error, print_problems, working
from muxserve.cli.plan_tables import show_plan, show_policies, show_residency, show_rivals, show_sleeping, show_spare
from muxserve.config import Fleet, FleetError, load_fleet
from muxserve.costs.latency import CostError
from muxserve.costs.measured import latency_model
from muxserve.metrics.plotly_library import DEFAULT
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.arrangements import may_be_dedicated
from muxserve.planning.demands import ClusterError, cluster_of, format_latency
from muxserve.planning.document import document, parse_sweep, residency_document, sleeping_document
from muxserve.planning.plan_file import save_plan
from muxserve.planning.planner import (
    ATTAINMENT,
    NO_SLEEPING,
    SEARCH_SECONDS,
    PlannedFleet,
    Planner,
    UsageError,
    options_of,
)
from muxserve.simulator import SimulationError
from muxserve.workload import Workload, WorkloadError, WorkloadOptions, open_workload
from placement.exact import TooLargeError
from placement.planner import PlanOptions

# The options that say how a workload is read.
_READING = (
    "format",
    "map",
    "start",
    "duration",
    "limit",
    "rate",
    "max_prompt",
    "max_output",
    "time_unit",
    "block_tokens",
)
# Of a fleet with `memory` on GPUs, where none is named: at the rates of its models.
_ANY_WORKLOAD = "bursty-groups:duration=120"


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """What the command line says; see `muxserve plan --help`. `given` are the names of the options that it has."""

    fleet: Path
    gpus: int | None = None
    gpu_type: str | None = None
    nodes: str | None = None
    objective: str = "auto"
    mode: str = "muxserve"
    attainment: float = ATTAINMENT
    sweep: str | None = None
    profile: Path | None = None
    seconds: float = SEARCH_SECONDS
    exact: bool = False
    simulate: float | None = None
    seed: int = 0
    as_json: bool = False
    html: Path | None = None
    plotly: str = DEFAULT
    output: Path | None = None
    network: float | None = None
    robust: bool = True
    workload: str | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()


def plan(arguments: PlanArguments) -> int:
    """Plan, print, write what was asked for; returns the exit code."""
    try:
        return _plan(arguments)
    except FleetError as error:
        print_problems(error, "there is no plan")
    except (ClusterError, CostError, NoEffectError, SimulationError, TooLargeError, UsageError, WorkloadError) as error:
        print_error(str(error))
    except OSError as error:
        print_error(f"{error.filename}: cannot be written: {error.strerror}")
    return ExitCode.WRONG


def _plan(arguments: PlanArguments) -> int:
    fleet = load_fleet(arguments.fleet, serving=False)
    options = _options(arguments, fleet)
    latency = latency_model(arguments.profile)
    sizes = _sweep(arguments.sweep)
    workload = _workload(arguments, fleet)
    cluster = cluster_of(
        fleet, (arguments.gpus or sizes[-1]) if sizes else arguments.gpus, arguments.gpu_type, arguments.nodes
    )
    _check_effects(arguments, cluster is not None, bool(sizes))
    began = time.monotonic()
    with working("planning") as told:
        planner = Planner(
            file=arguments.fleet,
            fleet=fleet,
            latency=latency,
            options=options,
            seconds=arguments.seconds,
            simulate=arguments.simulate,
            network=None if arguments.network is None else arguments.network * 1e9 / 8,
            told=told,
            robust=arguments.robust,
        )
        if cluster is None:
            _check_cpu(arguments, fleet)
            made = planner.on_cpu(workload)
        else:
            every = workload is not None  # plans are compared of every size
            made = planner.swept(sizes, cluster, every) if sizes else planner.on_gpus(cluster)
            if workload is not None:
                made.sleeping = planner.with_sleeping_models(made, workload)
    _tell(arguments, fleet, made, time.monotonic() - began)
    if any(map(may_be_dedicated, fleet.models)) and (sizes or options.mode != "muxserve"):
        why = "a sweep" if sizes else f"--mode {options.mode}"
        errors.print(f"{why} plans all models as multiplexed, whatever `phases` says")
    return ExitCode.NO if made.plan.missing else ExitCode.DONE


def _tell(arguments: PlanArguments, fleet: Fleet, made: PlannedFleet, seconds: float) -> None:
    """Print the plan, and write it where it was asked for."""
    costs = format_latency(arguments.profile)
    about = f"{arguments.fleet.name}, objective {made.plan.objective.name}, costs: {costs}"
    if arguments.as_json:
        data = document(made.plan, str(arguments.fleet), costs, seconds, made.simulated, made.points, made.rivals)
        data["search"]["robust_seconds"] = made.robust_seconds
        if made.residency is not None:
            data["residency"] = residency_document(made.residency)
        if made.sleeping is not None:
            data["sleeping"] = sleeping_document(made.sleeping)
        print(json.dumps(data, indent=2))
    else:
        show_plan(made.plan, made.simulated, made.points, seconds, about)
        show_policies(fleet, made.plan)
        if made.residency is not None:
            show_residency(made.residency)
        if made.sleeping is not None:
            show_sleeping(made.sleeping)
        show_spare(made.spare)
        show_rivals(made.rivals, made.robust_seconds)
    for note in made.notes:
        errors.print(escape(note))
    if made.why_not:
        errors.print(f"not simulated: {escape(made.why_not)}")
    if arguments.output is not None and made.plan.placement.units:
        save_plan(made.plan.placement, arguments.output, about)
        errors.print(f"plan written to {escape(str(arguments.output))}")
    elif arguments.output is not None:
        errors.print(f"{escape(str(arguments.output))} is not written: no model has a place")
    if arguments.html is not None:
        from muxserve.metrics.page import write_page
        from muxserve.planning.html import plan_page

        page = plan_page(made.plan, about, made.simulated, made.points, command_line())
        write_page(arguments.html, page, arguments.plotly)
        errors.print(f"page written to {escape(str(arguments.html))}")


def _workload(arguments: PlanArguments, fleet: Fleet) -> Workload | None:
    """That by which models that sleep are compared with models that are all awake; where the fleet file has `memory`,
    one on GPUs needs none to be named."""
    own = fleet.cluster
    on_gpus = bool(own.gpus or own.gpu_ids or arguments.gpus)
    searched = not arguments.exact and arguments.mode == "muxserve"
    named = arguments.workload
    if named is None and fleet.memory is not None and on_gpus and searched:
        named = _ANY_WORKLOAD
    if named is None:
        check_effect(arguments.given, _READING, "without --workload")
        return None
    if arguments.exact or arguments.mode != "muxserve":
        raise UsageError("--workload goes neither with --exact nor with --mode")
    rates = {model.name: model.rate for model in fleet.models}
    try:
        found = open_workload(named, rates, WorkloadOptions(**arguments.reading))
        # Read to its end before anything is planned: a trace may be wrong at its last line.
        if not sum(1 for _ in found):
            raise WorkloadError(f"{found.about} has no requests")
    except OSError as error:
        raise UsageError(f"--workload: {error.filename} cannot be read: {error.strerror}") from None
    return found


def _check_effects(arguments: PlanArguments, on_gpus: bool, sweeps: bool) -> None:
    """
    Raises:
        NoEffectError: an option is given that changes nothing.
    """
    given, simulated = arguments.given, arguments.simulate is None or arguments.simulate > 0
    if not on_gpus:
        check_effect(given, ["seconds"], "on a CPU, where no placement is searched for")
        check_effect(given, ["robust"], "on a CPU, where one way to serve is planned")
    if sweeps:
        check_effect(given, ["gpus"], "with --sweep, which says how many there are")
        check_effect(given, ["robust"], "with --sweep, which compares sizes and no other ways to serve")
    if arguments.exact or arguments.mode != "muxserve":
        check_effect(given, ["robust"], "where no other way to serve is compared")
    if not simulated:
        check_effect(given, ["robust"], "if nothing is simulated")


def _check_cpu(arguments: PlanArguments, fleet: Fleet) -> None:
    if arguments.workload is not None and fleet.memory is None:
        raise UsageError(NO_SLEEPING)
    if arguments.sweep or arguments.exact or arguments.mode != "muxserve":
        raise UsageError("the fleet has no GPUs to choose among; give --gpus and --gpu-type, or gpus in the fleet file")


def _options(arguments: PlanArguments, fleet: Fleet) -> PlanOptions:
    if arguments.sweep is not None and arguments.nodes is not None:
        raise UsageError("--sweep varies the number of equal machines; it does not go with --nodes")
    return options_of(fleet, arguments.mode, arguments.seed, arguments.objective, arguments.attainment, arguments.exact)


def _sweep(text: str | None) -> list[int]:
    try:
        return parse_sweep(text) if text is not None else []
    except ValueError as error:
        raise UsageError(f"--sweep: {error}") from None
