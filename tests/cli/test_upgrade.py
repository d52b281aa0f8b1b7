"""`muxserve upgrade` starts a deploy that takes over, and waits for the fleet before it to end."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli import upgrade
from muxserve.cli.app import app
from muxserve.net.exit_codes import ExitCode
from tests.control.fakes import Controller, running


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    with tempfile.TemporaryDirectory(prefix="mx") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        with running(Path(directory) / "muxserve", {"u0": ["chat"]}) as each:
            yield each


def started(monkeypatch: pytest.MonkeyPatch, poll: Callable[[], int | None]) -> list[list[str]]:
    """The commands that are started in place of processes, whose exit code is what `poll` says."""
    commands: list[list[str]] = []

    class Process:
        pid = 7

        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)

        def poll(self) -> int | None:
            return poll()

    monkeypatch.setattr(upgrade.subprocess, "Popen", Process)
    return commands


def test_it_is_done_when_the_fleet_before_has_ended_and_the_new_one_serves(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--in-place` the new one still has a unit to start by then."""
    looks: list[int] = []
    with contextlib.ExitStack() as new:

        def poll() -> None:
            looks.append(1)
            if len(looks) == 1:
                controller.stop()
            elif len(looks) == 3:
                new.enter_context(running(controller.run_dir.base, {"u0": ["chat"]}, port=controller.port))

        commands = started(monkeypatch, poll)
        done = CliRunner().invoke(app, ["upgrade", "next.yaml", "--log-dir", "logs"])
    assert len(looks) == 3
    assert done.exit_code == ExitCode.DONE, done.output
    assert f"{controller.name} has ended; process 7 serves the fleet" in done.output
    options = ["--host", "127.0.0.1", "--port", str(controller.port), "--log-dir", "logs"]
    assert [command[3:] for command in commands] == [["deploy", "next.yaml", "--take-over", *options]]


def test_a_fleet_that_cannot_start_leaves_the_one_before(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, lambda: ExitCode.WRONG)
    failed = CliRunner().invoke(app, ["upgrade", "next.yaml"])
    assert failed.exit_code == ExitCode.WRONG
    assert f"{controller.name} serves on" in failed.output
    controller.stop()
    nothing = CliRunner().invoke(app, ["upgrade", "next.yaml"])
    assert nothing.exit_code == ExitCode.WRONG
    assert "no fleet runs here" in nothing.output
