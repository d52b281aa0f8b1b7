"""`muxserve validate`."""

from __future__ import annotations

from pathlib import Path

from muxserve.cli.output import console, escape, models_table, print_problems
from muxserve.cluster.machine import this_machine
from muxserve.cluster.plan import deployment_of, plan_fleet
from muxserve.config import FleetError, load_fleet

EXIT_OK, EXIT_BAD = 0, 2


def validate(file: Path, file_only: bool) -> int:
    """Check `file`, print the plan; returns the exit code."""
    try:
        fleet = load_fleet(file)
        if file_only:
            console.print(f"{escape(str(file))}: {len(fleet.models)} models, no problem found in the file")
            return EXIT_OK
        plan = plan_fleet(fleet, this_machine())
    except FleetError as error:
        print_problems(error, "this fleet cannot be deployed")
        return EXIT_BAD
    # Hub models have no local directory before they are deployed; their id stands for it here.
    models = [m.model_copy(update={"path": m.path or m.hub}) for m in fleet.models]
    local = plan.with_fleet(fleet.model_copy(update={"models": models}))
    console.print(models_table(deployment_of(local, run_dir="")))
    for note in plan.unit.notes:
        console.print(f"- {escape(note)}")
    console.print(f"{escape(str(file))} can be deployed here on {plan.unit.cores} cores with {fleet.policy}")
    return EXIT_OK
