"""The exit codes of every command, for their help and for docs/cli.md, and what ends commands with those of all."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import typer

from muxserve.net.exit_codes import ExitCode

_NO_FLEET_THERE = "there is no fleet at that URL"
_CHANGES = {
    ExitCode.DONE: "done",
    ExitCode.NO: "the fleet refused it or it failed, and nothing was changed; or the fleet ended meanwhile",
    ExitCode.WRONG: "the command or the file is wrong, or no fleet runs here",
    ExitCode.INTERRUPTED: "Ctrl-C; the change goes on in the fleet, and is not waited for",
}
_WORKLOADS = {
    ExitCode.DONE: "written, or shown",
    ExitCode.WRONG: "the workload, a file or an option is wrong",
}
_KEYS = {
    ExitCode.DONE: "done",
    ExitCode.NO: "there is no such key",
    ExitCode.WRONG: f"the command line is wrong, {_NO_FLEET_THERE}, or it refused the API key",
}
# Exit codes of each command, beside those of all commands, which `OF_ALL` has.
OF_COMMANDS: Mapping[str, Mapping[ExitCode, str]] = {
    "deploy": {
        ExitCode.DONE: "stopped as asked",
        ExitCode.WRONG: "the fleet file or the command line is wrong, or the port is taken; nothing was started",
        ExitCode.NOT_DONE: "something could not start",
        ExitCode.INTERRUPTED: "ended by a second Ctrl-C",
    },
    "run": {
        ExitCode.DONE: "stopped as asked",
        ExitCode.WRONG: "a model cannot be served here, the command line is wrong, or the port is taken; nothing was "
        "started",
        ExitCode.NOT_DONE: "something could not start",
        ExitCode.INTERRUPTED: "ended by a second Ctrl-C",
    },
    "upgrade": {
        ExitCode.DONE: "the new fleet serves, and the one before has ended",
        ExitCode.WRONG: "the fleet file or an option is wrong, or no fleet runs here; the fleet serves on",
        ExitCode.NOT_DONE: "the new fleet could not start, and the one before serves on",
        ExitCode.INTERRUPTED: "Ctrl-C; the new fleet is stopped",
    },
    "validate": {
        ExitCode.DONE: "the fleet can be deployed",
        ExitCode.WRONG: "it cannot",
    },
    "status": {
        ExitCode.DONE: "it serves",
        ExitCode.NO: "it does not serve yet, or drains",
        ExitCode.WRONG: f"{_NO_FLEET_THERE}, or it refused the API key",
    },
    "top": {
        ExitCode.DONE: "ended",
        ExitCode.WRONG: f"{_NO_FLEET_THERE}, it refused the API key, or it shows nothing",
    },
    "usage": {
        ExitCode.DONE: "printed",
        ExitCode.WRONG: f"a day is none, {_NO_FLEET_THERE}, or it refused the API key",
    },
    "keys create": _KEYS,
    "keys list": _KEYS,
    "keys revoke": _KEYS,
    "logs": {
        ExitCode.DONE: "printed",
        ExitCode.WRONG: "there is no such log, or no fleet runs here",
    },
    "scale": _CHANGES,
    "drain": _CHANGES,
    "add": _CHANGES,
    "remove": _CHANGES,
    "apply": {
        ExitCode.DONE: "the fleet is as the file says; with --dry-run: the changes were listed",
        ExitCode.NO: "a step failed, and those before it stay; or the fleet ended meanwhile",
        ExitCode.WRONG: "the command or the file is wrong, or no fleet runs here; nothing was changed",
        ExitCode.NOT_DONE: "all changes were made but those marked !",
        ExitCode.INTERRUPTED: "Ctrl-C; the change goes on in the fleet, and is not waited for",
    },
    "adapter": _CHANGES,
    "stop": {
        ExitCode.DONE: "the fleet has ended",
        ExitCode.WRONG: "no such fleet runs here",
        ExitCode.INTERRUPTED: "Ctrl-C; the fleet goes on ending, and is not waited for",
    },
    "list": {
        ExitCode.DONE: "listed, also if there is none",
    },
    "doctor": {
        ExitCode.DONE: "a fleet can be served here; with --ray: on all nodes; with --gpu: on the GPUs",
        ExitCode.NO: "something needed is missing; with --ray also: no cluster or node answers",
        ExitCode.WRONG: "the command line is wrong",
        ExitCode.NOT_DONE: "with --gpu: the results cannot be stored",
    },
    "schema": {
        ExitCode.DONE: "printed",
    },
    "import": {
        ExitCode.DONE: "the fleet file is written",
        ExitCode.NO: "it is written, and has mistakes that were named",
        ExitCode.WRONG: "nothing was written: the file or an option is wrong, or none of its models can be served",
    },
    "plan": {
        ExitCode.DONE: "every model has a place",
        ExitCode.NO: "some model has none",
        ExitCode.WRONG: "the fleet file or the command line is wrong",
    },
    "simulate": {
        ExitCode.DONE: "all requests were answered in every mode",
        ExitCode.NO: "some were not",
        ExitCode.WRONG: "the fleet, the workload or the command line is wrong",
    },
    "profile": {
        ExitCode.DONE: "everything was measured",
        ExitCode.WRONG: "the fleet file or the command line is wrong, or there is no fleet at that URL",
        ExitCode.NOT_DONE: "engines could not start, or the fleet has not measured anything yet",
        ExitCode.INTERRUPTED: "Ctrl-C; the file has all measurements so far",
    },
    "replay": {
        ExitCode.DONE: "all requests were answered",
        ExitCode.NO: "some failed",
        ExitCode.WRONG: "nothing was sent: the workload, an option, the URL or the key is wrong",
        ExitCode.INTERRUPTED: "ended early",
    },
    "workload generate": _WORKLOADS,
    "workload convert": _WORKLOADS,
    "workload describe": _WORKLOADS,
}
OF_ALL: Mapping[ExitCode, str] = {
    ExitCode.WRONG: "the command line is wrong",
    ExitCode.BUG: "a defect of muxserve, with a traceback",
    ExitCode.INTERRUPTED: "Ctrl-C",
    ExitCode.NO_READER: "what read the output has ended",
}


def add_exit_codes(app: typer.Typer, prefix: str = "") -> None:
    """Have the commands of `app` name their exit codes in their help, and end with those of all commands."""
    for command in app.registered_commands:
        if (callback := command.callback) is not None:
            codes = OF_COMMANDS[f"{prefix}{command.name or callback.__name__}"]
            command.callback = _ended_well(callback)
            command.callback.__doc__ = f"{inspect.cleandoc(callback.__doc__ or '')}\n\n{_paragraph(codes)}"
    for group in app.registered_groups:
        if group.typer_instance is not None:
            name = group.typer_instance.info.name
            add_exit_codes(group.typer_instance, f"{name} " if isinstance(name, str) else prefix)


def _paragraph(codes: Mapping[ExitCode, str]) -> str:
    """For a help text, whose lines stay as they are behind a `\\b`."""
    lines = ["\b", "Exit codes:"]
    for code, meaning in codes.items():
        lines += textwrap.wrap(meaning, 72, initial_indent=f"{int(code):5}  ", subsequent_indent=" " * 7)
    return "\n".join(lines)


def _ended_well(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return command(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # `muxserve schema | head`: nothing is left that could be written at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(ExitCode.NO_READER) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception:
            traceback.print_exc()
            raise typer.Exit(ExitCode.BUG) from None

    return run
