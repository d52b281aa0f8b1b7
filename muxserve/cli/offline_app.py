"""The commands that need no running fleet of ours. What they do is imported when one runs."""

from __future__ import annotations

import typer

from muxserve.cli.options import Command, takes
from muxserve.cli.settings import PlanSettings, ProfileSettings, ReplaySettings, SimulateSettings

app = typer.Typer(rich_markup_mode=None)


@app.command(cls=Command)
@takes(PlanSettings)
def plan(settings: PlanSettings) -> int:
    """Plan which models share which GPUs, and predict what they will deliver."""
    from muxserve.cli.plan import plan as run

    return run(settings)


@app.command(cls=Command)
@takes(SimulateSettings)
def simulate(settings: SimulateSettings) -> int:
    """Simulate a fleet on a workload, under the scheduler that serves, in one or several modes side by side."""
    from muxserve.cli.simulate import run

    return run(settings)


@app.command(cls=Command)
@takes(ReplaySettings)
def replay(settings: ReplaySettings) -> int:
    """Send a workload to an endpoint at its own pace and report what clients see.

    Open loop: every request leaves at its time, whatever became of the others. The first Ctrl-C sends nothing more and
    waits for what is under way, the second gives that up; both report what was done.
    """
    from muxserve.cli.replay import replay as run

    return run(settings)


@app.command(cls=Command)
@takes(ProfileSettings)
def profile(settings: ProfileSettings) -> int:
    """Measure what prefill and decode steps of a fleet cost on this machine.

    Starts the fleet's engines without an endpoint. Every measured cell is written at once; after Ctrl-C the same
    command goes on where it was. With --from-fleet it asks a fleet that serves instead, which corrects its predicted
    costs by the steps that it takes.
    """
    if settings.from_fleet:
        from muxserve.cli.learnt_profile import learnt_profile

        return learnt_profile(settings)
    from muxserve.cli.profile import profile as run

    return run(settings)
