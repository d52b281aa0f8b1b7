"""Options that would have no effect are refused."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def refuse_given(context: typer.Context, parameters: Iterable[str], why: str) -> None:
    """Go on only if none of `parameters` was given on the command line; variables of the environment do not count.

    Raises:
        typer.BadParameter: one was; it names that one, and says why it has no effect.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in parameters and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"has no effect {why}", ctx=context, param=parameter)
