"""The commands that change a running fleet. What they do is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muxserve.cli import completion
from muxserve.cli.settings import Json, Which

app = typer.Typer(rich_markup_mode=None)

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model's name.", show_default=False, autocompletion=completion.models)
]
UnitName = Annotated[
    str,
    typer.Argument(metavar="UNIT", help="The unit, such as u1.", show_default=False, autocompletion=completion.units),
]


@app.command()
def scale(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL=N...", help="Models and how many replicas each.", autocompletion=completion.scales
        ),
    ],
    fleet: Which = None,
    json: Json = False,
) -> None:
    """Set the number of replicas of models of the running fleet."""
    from muxserve.cli.change import scale as run

    raise typer.Exit(run(targets, fleet, json))


@app.command()
def drain(
    unit: UnitName,
    fleet: Which = None,
    json: Json = False,
) -> None:
    """Empty a unit of the running fleet and end it: its requests move to other units, or are finished."""
    from muxserve.cli.change import change
    from muxserve.control.messages import DrainUnit

    raise typer.Exit(change(DrainUnit(unit), fleet, json))


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FLEETFILE", help="A fleet file with one model.", show_default=False)],
    unit: Annotated[
        str,
        typer.Option(
            metavar="UNIT",
            help="A running unit that it joins, with its pool; else it gets a unit of its own.",
            show_default=False,
            autocompletion=completion.units,
        ),
    ] = "",
    fleet: Which = None,
    json: Json = False,
) -> None:
    """Serve one model more in the running fleet."""
    from muxserve.cli.change import add as run

    raise typer.Exit(run(file, unit, fleet, json))


@app.command()
def remove(
    model: ModelName,
    fleet: Which = None,
    json: Json = False,
) -> None:
    """Take a model out of the running fleet, after the requests that it has."""
    from muxserve.cli.change import change
    from muxserve.control.messages import Remove

    raise typer.Exit(change(Remove(model), fleet, json))


@app.command()
def apply(
    file: Annotated[Path, typer.Argument(metavar="FLEETFILE", help="The fleet file.", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be changed.")] = False,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help="Where memory has no room for both versions of a model, end the old one before the new one is loaded.",
        ),
    ] = False,
    fleet: Which = None,
    json: Json = False,
) -> None:
    """Have the running fleet become what a fleet file says, and interrupt nothing: models come, go and get other
    versions; names, keys, tenants, limits, objectives and numbers of replicas change. What needs a start of the fleet
    is named with a ! and left as it is. If a step fails, those before it stay; apply again goes on from there."""
    from muxserve.cli.change import apply as run

    raise typer.Exit(run(file, fleet, dry_run, in_place, json))


@app.command()
def adapter(
    model: ModelName,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="What requests call the adapter.",
            show_default=False,
            autocompletion=completion.adapters,
        ),
    ],
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[DIRECTORY]", help="Where it is; without, it is served no longer.", show_default=False),
    ] = None,
    fleet: Which = None,
    json: Json = False,
) -> None:
    """Serve a LoRA adapter of a model of the running fleet, or no longer."""
    from muxserve.cli.change import change
    from muxserve.control.messages import SetAdapter

    raise typer.Exit(change(SetAdapter(model, name, str(path.absolute()) if path else ""), fleet, json))


@app.command()
def stop(
    fleet: Which = None,
    now: Annotated[bool, typer.Option("--now", help="Do not let running requests finish.")] = False,
) -> None:
    """Stop a fleet that runs on this machine, as Ctrl-C does where it was deployed, and wait for its end."""
    from muxserve.cli.stop import stop as run

    raise typer.Exit(run(fleet, now))


@app.command("list")
def list_fleets(json: Json = False) -> None:
    """List the fleets that you run on this machine."""
    from muxserve.cli.fleets import list_fleets as run

    raise typer.Exit(run(json))
