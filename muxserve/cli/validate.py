"""`muxserve validate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from muxserve.cli.output import budget_table, console, escape, models_table, print_problems
from muxserve.cluster.machine import this_machine
from muxserve.cluster.ray.cluster import gpus_for
from muxserve.config import FleetError, load_fleet
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.specs.fleet_planner import FleetPlanner, notes_of
from muxserve.planning.specs.residency import residency_of
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.planning.specs.unit_specs import unit_spec_of
from muxserve.spec import UnitSpec
from placement.format import enumerate_words


def validate(file: Path, file_only: bool) -> int:
    """Check `file`, print the plan; returns the exit code."""
    try:
        fleet = load_fleet(file)
        if file_only:
            console.print(f"{escape(str(file))}: {len(fleet.models)} models, no problem found in the file")
            return ExitCode.DONE
        planner = FleetPlanner(fleet, this_machine(), gpus_for(fleet))
        plans = planner.at_start()
        residency_of(planner.fleet, plans, planner.machine)
    except FleetError as error:
        print_problems(error, "this fleet cannot be deployed")
        return ExitCode.WRONG
    # Hub models have no local directory before they are deployed; their id stands for it here.
    local = planner.fleet.with_models([m.model_copy(update={"path": m.path or m.hub}) for m in planner.fleet.models])
    alike: dict[bytes, list[UnitSpec]] = {}
    for plan in plans:
        unit_spec = unit_spec_of(plan.with_paths(local), run_dir="")
        alike.setdefault(msgspec.json.encode(unit_spec.models), []).append(unit_spec)
    for units in alike.values():
        if len(plans) > 1:
            console.print(f"[bold]{enumerate_words([unit.unit for unit in units])}[/]")
        console.print(models_table(units[0]))
    for note in [*planner.reasons, *notes_of(plans), *_scaling(plans)]:
        console.print(f"- {escape(note)}")
    for plan in plans:
        if plan.gpu is not None:
            console.print(budget_table(plan.gpu.budgets(plan.demands)))
            for words in plan.gpu.memory_words(plan.demands):
                console.print(f"- {escape(words)}")
    gpus = sum(plan.gpu.ranks for plan in plans if plan.gpu is not None)
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else f"{plans[0].unit.cores} cores"
    how = f", in {len(plans)} units" if len(plans) > 1 else ""
    policies = enumerate_words(list(dict.fromkeys(plan.policy for plan in plans)))
    console.print(f"{escape(str(file))} can be deployed here on {where} with {policies}{how}")
    return ExitCode.DONE


def _scaling(plans: Sequence[ResolvedUnit]) -> Iterator[str]:
    """How many replicas there are and may be, where that is not one for good."""
    seen = set()
    for model in (model for plan in plans for model in plan.fleet.models):
        bounds = model.replicas
        if model.name in seen or not bounds.scales:
            continue
        seen.add(model.name)
        count = sum(model.name in plan.served for plan in plans)
        replicas = f"{count} replica{'' if count == 1 else 's'}"
        if plans[0].fleet.memory is not None:
            yield f"{model.name} sleeps until somebody asks for it, and when another model needs its memory"
            continue
        yield f"{model.name} begins with {replicas} and has {bounds.min} to {bounds.max}, as its load wants it"
