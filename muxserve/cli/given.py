"""Options that would have no effect are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import typer


class NoEffectError(ValueError):
    """An option was given that has no effect; the message names it and says why."""


def given_options(context: typer.Context) -> frozenset[str]:
    """Names of the parameters that were given on the command line; variables of the environment do not count."""
    sources = ((each.name or "", context.get_parameter_source(each.name or "")) for each in context.command.params)
    return frozenset(name for name, source in sources if source is not None and source.name == "COMMANDLINE")


def refuse_given(context: typer.Context, parameters: Iterable[str], why: str) -> None:
    """Go on only if none of `parameters` was given on the command line.

    Raises:
        typer.BadParameter: one was; it names that one, and says why it has no effect.
    """
    given = given_options(context) & frozenset(parameters)
    for parameter in context.command.params:
        if parameter.name in given:
            # Of typer's parameters each is one of those that it takes, whatever its base class says.
            raise typer.BadParameter(f"has no effect {why}", ctx=context, param=parameter)  # type: ignore[arg-type]


def check_effect(given: Collection[str], parameters: Iterable[str], why: str) -> None:
    """The same where only the command's own code knows what has an effect.

    Raises:
        NoEffectError: one of `parameters` is among those `given`.
    """
    for name in parameters:
        if name in given:
            raise NoEffectError(f"--{name.replace('_', '-')} has no effect {why}")
