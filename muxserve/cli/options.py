"""Options of commands: stated once, and refused where they have no effect."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import typer

_Settings = TypeVar("_Settings")


class NoEffectError(ValueError):
    """An option was given that has no effect; the message names it and says why."""


def takes(settings: Callable[..., _Settings]) -> Callable[[Callable[[_Settings], int]], Callable[..., None]]:
    """Give a command the arguments and options that the fields of a dataclass are annotated with. The command gets one
    object and returns its exit code; a field `given` has `given_options`."""

    def decorate(command: Callable[[_Settings], int]) -> Callable[..., None]:
        hints = typing.get_type_hints(settings, include_extras=True)
        fields = [field for field in dataclasses.fields(settings) if field.name != "given"]  # type: ignore[arg-type]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
        for field in fields:
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            parameters.append(inspect.Parameter(field.name, keyword, default=default, annotation=hints[field.name]))

        def run(context: typer.Context, **values: Any) -> None:
            raise typer.Exit(command(settings(**values, given=given_options(context))))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def given_options(context: typer.Context) -> frozenset[str]:
    """The arguments and options on the command line, such as FLEET and --seconds; variables of the environment do not
    count."""
    sources = {each: context.get_parameter_source(each.name or "") for each in context.command.params}
    return frozenset(
        each.opts[0] if each.param_type_name == "option" else (each.name or "").upper()
        for each, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    )


def check_effect(given: Collection[str], names: Iterable[str], why: str) -> None:
    """Go on only if none of `names`, which have no effect, is among the options that were `given`.

    Raises:
        NoEffectError: one of them is.
    """
    for name in names:
        if name in given:
            raise NoEffectError(f"{name} has no effect {why}")
