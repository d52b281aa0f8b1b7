"""The commands that need no running fleet of ours. What they do is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muxserve.cli.options import Command, refuse_given, takes
from muxserve.cli.settings import PlanSettings, ReplaySettings, SimulateSettings

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
def profile(
    context: typer.Context,
    fleet: Annotated[
        Path | None, typer.Argument(metavar="[FLEET]", help="The fleet file (YAML).", show_default=False)
    ] = None,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", "--output", help="The profile file; what it has already is not measured again."),
    ] = Path("profile.json"),
    threads: Annotated[
        str | None, typer.Option(help="Threads per engine, e.g. 1,2; by default those of the fleet and all cores.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Prompt tokens per sequence of prefill steps, e.g. 64,512.")
    ] = None,
    sequences: Annotated[str | None, typer.Option(help="Sequences of prefill steps, e.g. 1,4.")] = None,
    batches: Annotated[str | None, typer.Option(help="Sequences of decode steps, e.g. 1,8,32.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Tokens of context of decode steps, e.g. 64,512.")] = None,
    pairs: Annotated[bool, typer.Option(help="Measure pairs of engines beside each other, too.")] = True,
    from_fleet: Annotated[
        bool, typer.Option("--from-fleet", help="Start nothing: write what a fleet that serves has learnt.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            envvar="MUXSERVE_URL",
            help="With --from-fleet: its endpoint; else that of the fleet which runs on this machine.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--api-key", envvar="MUXSERVE_API_KEY", help="With --from-fleet: API key.")
    ] = None,
) -> None:
    """Measure what prefill and decode steps of a fleet cost on this machine.

    Starts the fleet's engines without an endpoint. Every measured cell is written at once; after Ctrl-C the same
    command goes on where it was. With --from-fleet it asks a fleet that serves instead, which corrects its predicted
    costs by the steps that it takes.
    """
    if from_fleet:
        measuring = ("fleet", "threads", "tokens", "sequences", "batches", "contexts", "pairs")
        refuse_given(context, measuring, "with --from-fleet, which measures nothing")
        from muxserve.cli.learnt_profile import learnt_profile

        raise typer.Exit(learnt_profile(url, key, out))
    refuse_given(context, ("url", "key"), "without --from-fleet")
    if fleet is None:
        raise typer.BadParameter("which fleet? Name its file, or give --from-fleet", param_hint="FLEET")
    from muxserve.cli.profile import profile as run

    raise typer.Exit(run(fleet, out, threads, tokens, sequences, batches, contexts, pairs))
