"""The commands that need no running fleet of ours. What they do is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muxserve.cli.options import takes
from muxserve.cli.settings import (
    SOURCE_HELP,
    FleetModels,
    Models,
    PlanSettings,
    ProfileSettings,
    ReplaySettings,
    SimulateSettings,
)

app = typer.Typer(rich_markup_mode=None)
workload = typer.Typer(
    name="workload",
    help="Make, convert and describe request workloads.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(workload)
Source = Annotated[str, typer.Argument(metavar="WORKLOAD", help=SOURCE_HELP, show_default=False)]
Out = Annotated[
    Path, typer.Option("-o", "--out", "--output", help="File to write: .jsonl or .jsonl.gz.", show_default=False)
]


@app.command()
@takes(PlanSettings)
def plan(settings: PlanSettings) -> int:
    """Plan which models share which GPUs, and predict what they will deliver."""
    from muxserve.cli.plan import plan as run

    return run(settings)


@app.command()
@takes(SimulateSettings)
def simulate(settings: SimulateSettings) -> int:
    """Simulate a fleet on a workload, under the scheduler that serves, in one or several modes side by side."""
    from muxserve.cli.simulate import run

    return run(settings)


@app.command()
@takes(ReplaySettings)
def replay(settings: ReplaySettings) -> int:
    """Send a workload to an endpoint at its own pace and report what clients see.

    Open loop: every request leaves at its time, whatever became of the others. The first Ctrl-C sends nothing more and
    waits for what is under way, the second gives that up; both report how far it came.
    """
    from muxserve.cli.replay import replay as run

    return run(settings)


@app.command()
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


@app.command("import")
def import_file(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A llama-swap or LiteLLM configuration file.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("-o", "--out", "--output", help="Fleet file to write.")] = Path("fleet.yaml"),
) -> None:
    """Write a fleet file of a llama-swap or LiteLLM file, and say of each of its keys whether it was taken."""
    from muxserve.cli.import_file import run

    raise typer.Exit(run(file, out))


@workload.command()
def generate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SPEC", help="Such as poisson:rate=8,alpha=0.9,duration=60,lengths=sharegpt.", show_default=False
        ),
    ],
    out: Out,
    fleet: FleetModels = None,
    models: Models = None,
    about: Annotated[str, typer.Option(help="Words for the header.")] = "",
) -> None:
    """Draw a workload from a specification and write it as a trace."""
    from muxserve.cli.workload import generate as run

    raise typer.Exit(run(source, out, fleet=fleet, models=models, about=about))


@workload.command()
def convert(
    source: Source,
    out: Out,
    fleet: FleetModels = None,
    models: Models = None,
    about: Annotated[str, typer.Option(help="Words for the header.")] = "",
) -> None:
    """Read a workload in any known format, cut, rescale and map it, and write it as a trace."""
    from muxserve.cli.workload import convert as run

    raise typer.Exit(run(source, out, fleet=fleet, models=models, about=about))


@workload.command()
def describe(
    source: Source,
    fleet: FleetModels = None,
    models: Models = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show what a workload looks like: rates, burstiness, lengths."""
    from muxserve.cli.workload import describe as run

    raise typer.Exit(run(source, fleet=fleet, models=models, as_json=json))
