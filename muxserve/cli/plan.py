"""`muxserve plan`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muxserve.cli.output import errors, escape, print_error, print_problems
from muxserve.cli.plan_tables import show_plan, show_spare
from muxserve.config import Fleet, FleetError, load_fleet
from muxserve.costs.latency import CostError, LatencyModel
from muxserve.planning.document import SweepPoint, document, point
from muxserve.planning.fleets import ClusterError, cluster_of, demands_of, equal_nodes, memory_of
from muxserve.planning.latency import latency_model, latency_words
from muxserve.planning.planfile import save_plan
from muxserve.planning.sweep import parse_sweep
from placement.cluster import Cluster
from placement.demand import Demand
from placement.exact import TooLargeError
from placement.improve import ImproveLimits
from placement.memory import MemoryRules
from placement.objective import OBJECTIVES, Objective
from placement.planner import MODES, ClusterPlan, PlanOptions, plan_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muxserve.planning.predict import Prediction
    from muxserve.planning.verified import Verified

EXIT_OK, EXIT_UNPLACED, EXIT_BAD = 0, 1, 2
_SIMULATED_REQUESTS, _SIMULATED_SECONDS = 5000, 300.0


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """What the command line says; see `muxserve plan --help`."""

    fleet: Path
    gpus: int | None = None
    gpu_type: str | None = None
    nodes: str | None = None
    objective: str = "auto"
    mode: str = "muxserve"
    attainment: float = 0.95
    sweep: str | None = None
    profile: Path | None = None
    seconds: float = 10.0
    exact: bool = False
    simulate: float | None = None
    seed: int = 0
    as_json: bool = False
    html: Path | None = None
    output: Path | None = None


class _UsageError(ValueError):
    """The command line is wrong."""


def plan(arguments: PlanArguments) -> int:
    """Plan, print, write what was asked for; returns the exit code."""
    try:
        return _plan(arguments)
    except FleetError as error:
        print_problems(error, "there is no plan")
    except (ClusterError, CostError, TooLargeError, _UsageError) as error:
        print_error(str(error))
    except OSError as error:
        print_error(f"{error.filename}: cannot be written: {error.strerror}")
    return EXIT_BAD


def _plan(arguments: PlanArguments) -> int:
    fleet = load_fleet(arguments.fleet, serving=False)
    options = _options(arguments, fleet)
    latency = latency_model(arguments.profile)
    sizes = _sweep(arguments.sweep)
    cluster = cluster_of(
        fleet, (arguments.gpus or sizes[-1]) if sizes else arguments.gpus, arguments.gpu_type, arguments.nodes
    )
    began = time.monotonic()
    points: list[SweepPoint] = []
    with _progress() as told:
        if cluster is None:
            made, demands, max_len = _on_cpu(fleet, arguments, latency, options.objective)
        else:
            demands, max_len = demands_of(fleet, arguments.fleet.parent), {}
            if sizes:
                made, points = _swept(demands, sizes, cluster, fleet, latency, options, arguments.seconds, told)
            else:
                made = _on_gpus(demands, cluster, latency, options, arguments.seconds, told)
        seconds = time.monotonic() - began
        simulated, why_not = _simulated(made, latency, arguments, max_len, told)
        spare: Mapping[str, float] = {}
        if simulated is not None and cluster is not None and not sizes and options.objective.name != "throughput":
            again = _verified(made, simulated, demands, cluster, latency, options, arguments, told)
            made, simulated, spare = again.plan, again.prediction, again.spare
            seconds = time.monotonic() - began
    about = f"{arguments.fleet.name}, objective {made.objective.name}, costs: {latency_words(arguments.profile)}"
    if arguments.as_json:
        data = document(made, str(arguments.fleet), latency_words(arguments.profile), seconds, simulated, points)
        print(json.dumps(data, indent=2))
    else:
        show_plan(made, simulated, points, seconds, about)
        show_spare(spare)
    if why_not:
        errors.print(f"not simulated: {escape(why_not)}")
    if arguments.output is not None and made.placement.units:
        save_plan(made.placement, arguments.output, about)
        errors.print(f"plan written to {escape(str(arguments.output))}")
    if arguments.html is not None:
        from muxserve.planning.html import write_plan_html

        write_plan_html(arguments.html, made, about, simulated, points)
        errors.print(f"page written to {escape(str(arguments.html))}")
    return EXIT_UNPLACED if made.missing else EXIT_OK


def _options(arguments: PlanArguments, fleet: Fleet) -> PlanOptions:
    wanted = arguments.objective
    if wanted == "auto":
        wanted = (
            "slo" if any(m.slo.ttft_ms is not None or m.slo.tpot_ms is not None for m in fleet.models) else "throughput"
        )
    objective = next((name for name in OBJECTIVES if name == wanted), None)
    if objective is None:
        raise _UsageError(f"--objective: must be auto, {', '.join(OBJECTIVES)}, not {arguments.objective!r}")
    mode = next((name for name in MODES if name == arguments.mode), None)
    if mode is None:
        raise _UsageError(f"--mode: must be one of {', '.join(MODES)}, not {arguments.mode!r}")
    if arguments.sweep is not None and arguments.nodes is not None:
        raise _UsageError("--sweep varies the number of equal machines; it does not go with --nodes")
    return PlanOptions(
        objective=Objective(objective, arguments.attainment),
        mode=mode,
        exact=arguments.exact,
        rules=MemoryRules.served(fleet.cluster.gpu_memory),
        local=ImproveLimits(seed=arguments.seed),
    )


def _sweep(text: str | None) -> list[int]:
    try:
        return parse_sweep(text) if text is not None else []
    except ValueError as error:
        raise _UsageError(f"--sweep: {error}") from None


def _on_gpus(
    demands: list[Demand],
    cluster: Cluster,
    latency: LatencyModel,
    options: PlanOptions,
    seconds: float,
    told: Callable[[str], None],
) -> ClusterPlan:
    until = time.monotonic() + seconds
    return plan_cluster(demands, cluster, latency, memory_of(cluster), options, lambda: time.monotonic() >= until, told)


def _verified(
    first: ClusterPlan,
    simulated: Prediction,
    demands: list[Demand],
    cluster: Cluster,
    latency: LatencyModel,
    options: PlanOptions,
    arguments: PlanArguments,
    told: Callable[[str], None],
) -> Verified:
    """The plan, or one with spare for models that fall short in its simulation."""
    from muxserve.planning.verified import verified

    known = {id(first): simulated}

    def plan(asked: Sequence[Demand]) -> ClusterPlan:
        if asked is demands:
            return first
        return _on_gpus(list(asked), cluster, latency, options, arguments.seconds, lambda text: told(f"again: {text}"))

    def simulate(made: ClusterPlan) -> Prediction:
        prediction = known.get(id(made)) or _simulated(made, latency, arguments, {}, told)[0]
        assert prediction is not None, "what could be simulated once can be simulated again"
        return prediction

    return verified(demands, plan, simulate)


def _swept(
    demands: list[Demand],
    sizes: list[int],
    cluster: Cluster,
    fleet: Fleet,
    latency: LatencyModel,
    options: PlanOptions,
    seconds: float,
    told: Callable[[str], None],
) -> tuple[ClusterPlan, list[SweepPoint]]:
    """A plan for every size; the first is returned that meets everything, else the last."""
    points: list[SweepPoint] = []
    chosen: ClusterPlan | None = None
    each = max(0.5, seconds / len(sizes))
    for size in sizes:
        here = equal_nodes(size, cluster.nodes[0].device, fleet.cluster.gpus_per_node)
        made = _on_gpus(demands, here, latency, options, each, lambda text, n=size: told(f"{n} GPUs: {text}"))  # type: ignore[misc]
        points.append(point(made))
        if chosen is None or not chosen.meets:
            chosen = made
    assert chosen is not None
    return chosen, points


def _on_cpu(
    fleet: Fleet, arguments: PlanArguments, latency: LatencyModel, objective: Objective
) -> tuple[ClusterPlan, list[Demand], dict[str, int]]:
    from muxserve.cluster.machine import this_machine
    from muxserve.cluster.plan import plan_fleet
    from muxserve.planning.cpu import plan_machine

    if arguments.sweep or arguments.exact or arguments.mode != "muxserve":
        raise _UsageError(
            "the fleet has no GPUs to choose among; give --gpus and --gpu-type, or gpus in the fleet file"
        )
    resolved = load_fleet(arguments.fleet)
    planned = plan_fleet(resolved.multiplexed(), this_machine())
    demands = demands_of(fleet, arguments.fleet.parent, gpu=False)
    demands = [replace(demand, dtype=model.dtype) for demand, model in zip(demands, planned.unit.models, strict=True)]
    try:
        made = plan_machine(planned, demands, latency, objective)
    except ValueError as error:
        raise _UsageError(str(error)) from None
    return made, demands, {model.name: model.max_len for model in planned.unit.models}


def _simulated(
    made: ClusterPlan,
    latency: LatencyModel,
    arguments: PlanArguments,
    max_len: dict[str, int],
    told: Callable[[str], None],
) -> tuple[Prediction | None, str]:
    """The simulation of the plan, or why there is none."""
    from muxserve.planning.predict import predict
    from muxserve.simulator import SimulationError

    seconds = arguments.simulate
    if seconds is None:
        # Long enough for the longest answers to come and go, unless that takes too long.
        seconds = min(_SIMULATED_SECONDS, _SIMULATED_REQUESTS / made.asked)
    if seconds <= 0 or not made.placement.units:
        return None, ""
    told("simulating")

    def count(done: int, total: int) -> None:
        told(f"simulating, {done} of {total} requests")

    try:
        return (
            predict(made.placement, made.demands, latency, seconds, arguments.seed, made.mode, max_len, progress=count),
            "",
        )
    except (SimulationError, CostError) as error:
        return None, str(error)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is going on; nothing elsewhere."""
    if not errors.is_terminal:
        yield lambda _: None
        return
    with errors.status("planning") as status:
        yield lambda text: status.update(escape(text))
