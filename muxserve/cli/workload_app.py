"""`muxserve workload`: its commands' options. What they do is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muxserve.cli import workload_args as args

app = typer.Typer(
    name="workload",
    help="Make, convert and describe request workloads.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Source = Annotated[str, typer.Argument(metavar="WORKLOAD", help=args.SOURCE_HELP, show_default=False)]
Out = Annotated[
    Path, typer.Option("-o", "--out", "--output", help="File to write: .jsonl or .jsonl.gz.", show_default=False)
]


@app.command()
def generate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SPEC", help="Such as poisson:rate=8,alpha=0.9,duration=60,lengths=sharegpt.", show_default=False
        ),
    ],
    out: Out,
    fleet: args.Fleet = None,
    models: args.Models = None,
    about: Annotated[str, typer.Option(help="Words for the header.")] = "",
) -> None:
    """Draw a workload from a specification and write it as a trace."""
    from muxserve.cli.workload import generate as run

    raise typer.Exit(run(source, out, fleet=fleet, models=models, about=about))


@app.command()
@args.reads_a_workload()
def convert(
    context: typer.Context,
    source: Source,
    out: Out,
    fleet: args.Fleet = None,
    models: args.Models = None,
    about: Annotated[str, typer.Option(help="Words for the header.")] = "",
    *,
    reading: args.Reading,
) -> None:
    """Read a workload in any known format, cut, rescale and map it, and write it as a trace."""
    args.refuse_seed(context, source)
    from muxserve.cli.workload import convert as run

    raise typer.Exit(run(source, out, fleet=fleet, models=models, options=reading, about=about))


@app.command()
@args.reads_a_workload("format", "tokenizer", "all_turns", "skip_bad", "rate", "time_unit", "block_tokens")
def describe(
    source: Source,
    fleet: args.Fleet = None,
    models: args.Models = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    *,
    reading: args.Reading,
) -> None:
    """Show what a workload looks like: rates, burstiness, lengths."""
    from muxserve.cli.workload import describe as run

    raise typer.Exit(run(source, fleet=fleet, models=models, options=reading, as_json=json))
