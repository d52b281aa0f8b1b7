"""`muxserve validate`."""

from __future__ import annotations

from pathlib import Path

from muxserve.cli.output import budget_table, console, escape, models_table, print_problems
from muxserve.cluster.machine import this_machine, this_machines_gpus
from muxserve.cluster.plan import deployment_of
from muxserve.config import FleetError, load_fleet
from muxserve.planning.serving import plan_to_serve

EXIT_OK, EXIT_BAD = 0, 2


def validate(file: Path, file_only: bool) -> int:
    """Check `file`, print the plan; returns the exit code."""
    try:
        fleet = load_fleet(file)
        if file_only:
            console.print(f"{escape(str(file))}: {len(fleet.models)} models, no problem found in the file")
            return EXIT_OK
        plan = plan_to_serve(fleet, this_machine(), this_machines_gpus)
    except FleetError as error:
        print_problems(error, "this fleet cannot be deployed")
        return EXIT_BAD
    # Hub models have no local directory before they are deployed; their id stands for it here.
    models = [m.model_copy(update={"path": m.path or m.hub}) for m in fleet.models]
    local = plan.with_fleet(fleet.model_copy(update={"models": models}))
    console.print(models_table(deployment_of(local, run_dir="")))
    for note in plan.notes:
        console.print(f"- {escape(note)}")
    if plan.gpu is not None:
        console.print(budget_table(plan.gpu.budgets(plan.demands)))
    gpus = plan.gpu.ranks if plan.gpu else 0
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else f"{plan.unit.cores} cores"
    console.print(f"{escape(str(file))} can be deployed here on {where} with {fleet.policy}")
    return EXIT_OK
