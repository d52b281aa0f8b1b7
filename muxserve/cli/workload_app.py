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
Out = Annotated[Path, typer.Option("-o", "--out", help="File to write: .jsonl or .jsonl.gz.", show_default=False)]


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
    """Draw a workload from a specification and write it as a trace.

    Exit codes: 0 written, 2 the specification or the file makes no sense.
    """
    from muxserve.cli.workload import generate as run

    raise typer.Exit(run(source, out, fleet=fleet, models=models, about=about))


@app.command()
def convert(
    source: Source,
    out: Out,
    fleet: args.Fleet = None,
    models: args.Models = None,
    format: args.Format = None,
    map: args.Map = "auto",
    start: args.Start = 0.0,
    duration: args.Duration = None,
    limit: args.Limit = None,
    speed: args.Speed = 1.0,
    rate: args.Rate = None,
    max_prompt: args.MaxPrompt = None,
    max_output: args.MaxOutput = None,
    tokenizer: args.Tokenizer = None,
    all_turns: args.AllTurns = False,
    skip_bad: args.SkipBad = False,
    seed: args.Seed = 0,
    about: Annotated[str, typer.Option(help="Words for the header.")] = "",
) -> None:
    """Read a workload in any known format, cut, rescale and map it, and write it as a trace.

    Exit codes: 0 written, 2 the file cannot be read or written, or an option makes no sense.
    """
    from muxserve.cli.workload import convert as run

    options = {
        "format": format, "mapping": map, "seed": seed, "start": start, "duration": duration, "limit": limit,
        "speed": speed, "rate": rate, "max_prompt": max_prompt, "max_output": max_output, "tokenizer": tokenizer,
        "all_turns": all_turns, "skip_bad": skip_bad,
    }  # fmt: skip
    raise typer.Exit(run(source, out, fleet=fleet, models=models, options=options, about=about))


@app.command()
def describe(
    source: Source,
    fleet: args.Fleet = None,
    models: args.Models = None,
    format: args.Format = None,
    tokenizer: args.Tokenizer = None,
    all_turns: args.AllTurns = False,
    skip_bad: args.SkipBad = False,
    rate: args.Rate = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show what a workload looks like: rates, burstiness, lengths.

    Exit codes: 0 shown, 2 it cannot be read.
    """
    from muxserve.cli.workload import describe as run

    options = {
        "format": format, "tokenizer": tokenizer, "all_turns": all_turns, "skip_bad": skip_bad, "rate": rate
    }  # fmt: skip
    raise typer.Exit(run(source, fleet=fleet, models=models, options=options, as_json=json))
