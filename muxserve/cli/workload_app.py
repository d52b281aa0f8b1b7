"""`muxserve workload`: its commands' options. What they do is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muxserve.cli.options import Command
from muxserve.cli.settings import SOURCE_HELP, FleetModels, Models

app = typer.Typer(
    name="workload",
    help="Make, convert and describe request workloads.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Source = Annotated[str, typer.Argument(metavar="WORKLOAD", help=SOURCE_HELP, show_default=False)]
Out = Annotated[
    Path, typer.Option("-o", "--out", "--output", help="File to write: .jsonl or .jsonl.gz.", show_default=False)
]


@app.command(cls=Command)
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


@app.command(cls=Command)
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


@app.command(cls=Command)
def describe(
    source: Source,
    fleet: FleetModels = None,
    models: Models = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show what a workload looks like: rates, burstiness, lengths."""
    from muxserve.cli.workload import describe as run

    raise typer.Exit(run(source, fleet=fleet, models=models, as_json=json))
