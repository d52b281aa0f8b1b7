"""The commands about teams: what was used, and API keys. What they do is imported when one runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from muxserve.cli.settings import EndpointKey, Json, Which

app = typer.Typer(rich_markup_mode=None)
keys = typer.Typer(
    name="keys", help="Make, list and revoke API keys of a running fleet.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(keys)


class By(StrEnum):
    """What a row of usage is of."""

    MODEL = "model"
    KEY = "key"


@app.command()
def usage(
    since: Annotated[
        str, typer.Option(metavar="DAY", help="First day (UTC), such as 2026-05-01; else the first of this month.")
    ] = "",
    until: Annotated[str, typer.Option(metavar="DAY", help="Last day; else today.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Of one tenant; else of all.")] = "",
    by: Annotated[By, typer.Option(help="A row for each model, or for each key and model.")] = By.MODEL,
    csv: Annotated[bool, typer.Option("--csv", help="Print a row for each day as CSV, for a spreadsheet.")] = False,
    json: Json = False,
    url: Which = None,
    key: EndpointKey = None,
) -> None:
    """Show what tenants have used, and what is left of their budgets."""
    from muxserve.cli.usage import UsageQuery
    from muxserve.cli.usage import usage as run

    if csv and json:
        raise typer.BadParameter("goes without --json: choose one", param_hint="--csv")
    raise typer.Exit(
        run(url, key, UsageQuery(since, until, tenant, by.value), "csv" if csv else "json" if json else "")
    )


@keys.command()
def create(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is.", show_default=False)],
    name: Annotated[str, typer.Option(metavar="TEXT", help="What it is for, as the list shows it.")] = "",
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="How long it is good, such as 12h or 30d; else until it is revoked.")
    ] = "",
    json: Json = False,
    url: Which = None,
    key: EndpointKey = None,
) -> None:
    """Make a key of a tenant, and print it: it is shown this once."""
    from muxserve.cli.keys import create as run

    raise typer.Exit(run(url, key, tenant, name, expires, json))


@keys.command("list")
def list_keys(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Of one tenant; else of all.")] = "",
    json: Json = False,
    url: Which = None,
    key: EndpointKey = None,
) -> None:
    """List the keys that were made, without their text."""
    from muxserve.cli.keys import listed as run

    raise typer.Exit(run(url, key, tenant, json))


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="ID", help="As `muxserve keys list` has it.", show_default=False)],
    json: Json = False,
    url: Which = None,
    key: EndpointKey = None,
) -> None:
    """Have a key open nothing any more. Requests that run with it are finished."""
    from muxserve.cli.keys import revoke as run

    raise typer.Exit(run(url, key, name, json))
