"""`muxserve scale`, `drain`, `add`, `remove`, `apply`, `adapter`: change a running fleet, and show what happens."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from muxserve.cli.output import console, errors, escape, print_error
from muxserve.config import FleetError
from muxserve.config.include import files_of
from muxserve.config.source import read_text
from muxserve.control import messages
from muxserve.control.client import ControlClient, FleetEndedError, NoFleetError, find
from muxserve.net.exit_codes import ExitCode


@dataclass
class _Report:
    """What `--json` prints."""

    result: messages.Result | Literal["unknown"] = "done"
    text: str = ""
    steps: list[str] = field(default_factory=list)
    fleet: messages.Here | None = None

    def print(self) -> None:
        units = None
        if self.fleet is not None:
            units = [{"name": unit.name, "serves": unit.serves} for unit in self.fleet.units]
        fleet = self.fleet and {"url": self.fleet.url, "models": self.fleet.models, "units": units}
        print(json.dumps({"result": self.result, "text": self.text, "steps": self.steps, "fleet": fleet}, indent=2))


def scale(targets: Sequence[str], fleet: str | None, as_json: bool) -> int:
    """Set the number of replicas of models, each given as MODEL=N; returns the exit code."""
    replicas: dict[str, int] = {}
    for target in targets:
        match = re.fullmatch(r"([^=]+)=(\d+)", target)
        if match is None:
            return _wrong(f"{target!r} is not MODEL=N, such as chat=2", as_json)
        if match[1] in replicas:
            return _wrong(f"{match[1]} is named twice", as_json)
        replicas[match[1]] = int(match[2])
    return change(messages.Scale(replicas), fleet, as_json)


def add(file: Path, unit: str, fleet: str | None, as_json: bool) -> int:
    """Serve the model of a fleet file, in a running unit if one is named; returns the exit code."""
    try:
        text = read_text(file, "fleet file")
    except FleetError as error:
        return _wrong(str(error), as_json)
    return change(messages.Add(text, str(file), str(file.parent.absolute()), unit), fleet, as_json)


def apply(file: Path, fleet: str | None, dry_run: bool, in_place: bool, as_json: bool) -> int:
    """Have a fleet become what a fleet file says, or only say what that takes; returns the exit code."""
    try:
        text = read_text(file, "fleet file")
    except FleetError as error:
        return _wrong(str(error), as_json)
    # The fleet may have been started where these are not set, or are others.
    texts = [text, *(part.read_text(errors="replace") for part in files_of(file, os.environ).read if part.is_file())]
    named = re.findall(r"env:(\w+)", "\n".join(texts))
    environ = {name: os.environ[name] for name in named if name in os.environ}
    command = messages.Apply(text, str(file), str(file.parent.absolute()), environ, dry_run, in_place)
    return change(command, fleet, as_json)


def change(command: messages.Command, fleet: str | None, as_json: bool) -> int:
    """Ask a fleet for a change and show its steps; returns the exit code."""
    report = _Report()
    try:
        with ControlClient(find(fleet)) as client, _showing(as_json, report) as told:
            answer = client.do(command, told)
            with contextlib.suppress(NoFleetError):
                report.fleet = client.who()
    except FleetEndedError as error:
        report.result, report.text = "failed", str(error)
        _end(report, as_json, failed=True)
        return ExitCode.NO
    except NoFleetError as error:
        return _wrong(str(error), as_json, report)
    except KeyboardInterrupt:
        report.result, report.text = "unknown", "not waited for; the change goes on in the fleet"
        _end(report, as_json, failed=True)
        return ExitCode.INTERRUPTED
    report.text, report.result = answer.text, messages.result_of(command, answer)
    if isinstance(answer, messages.Done):
        _end(report, as_json)
        return ExitCode.NOT_DONE if report.result == "left" else ExitCode.DONE
    _end(report, as_json, failed=True)
    if not as_json:
        errors.print(escape(answer.after))
    return ExitCode.WRONG if answer.mistake else ExitCode.NO


@contextlib.contextmanager
def _showing(as_json: bool, report: _Report) -> Iterator[Callable[[str], None]]:
    """What is called with every step: on a terminal the last one is beside a spinner, elsewhere each is a line."""
    if as_json or not console.is_terminal:

        def line(text: str) -> None:
            report.steps.append(text)
            if not as_json:
                console.print(escape(text))

        yield line
        return
    with console.status("asking the fleet") as status:

        def turn(text: str) -> None:
            if report.steps:
                console.print(f"[dim]{escape(report.steps[-1])}[/]")
            report.steps.append(text)
            status.update(escape(text))

        yield turn
        if report.steps:
            console.print(f"[dim]{escape(report.steps[-1])}[/]")


def _end(report: _Report, as_json: bool, failed: bool = False) -> None:
    if as_json:
        report.print()
    elif not failed:
        words = {"done": "[green]done:[/] ", "left": "[yellow]not done:[/] "}
        console.print(f"{words.get(report.result, '')}{escape(report.text)}")
    elif report.result == "unknown":
        errors.print(f"[yellow]{escape(report.text)}[/]; `muxserve status` shows how it stands")
    else:
        print_error(report.text)


def _wrong(message: str, as_json: bool, report: _Report | None = None) -> int:
    if as_json:
        report = report or _Report()
        report.result, report.text = "refused", message
        report.print()
    else:
        print_error(message)
    return ExitCode.WRONG
