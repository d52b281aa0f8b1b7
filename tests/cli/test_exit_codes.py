"""What commands end with: each code that a command has is in its help and in docs/cli.md, and those of all hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from muxserve.cli import app as cli
from muxserve.cli import gpu_probes
from muxserve.cli.exit_codes import OF_ALL, OF_COMMANDS, ExitCode
from muxserve.gpu import findings, nvml
from tests.cli.conftest import Endpoint
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
# Those that commands have for themselves.
COLUMNS = (ExitCode.DONE, ExitCode.NO, ExitCode.WRONG, ExitCode.NOT_DONE, ExitCode.INTERRUPTED)

runner = CliRunner()


def commands(app: typer.Typer, prefix: str = "") -> list[str]:
    found = [prefix + (each.name or getattr(each.callback, "__name__", "")) for each in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        name = group.typer_instance.info.name
        found += commands(group.typer_instance, f"{name} " if isinstance(name, str) else prefix)
    return found


def test_every_command_has_exit_codes() -> None:
    assert set(OF_COMMANDS) == set(commands(cli.app))


@pytest.mark.parametrize("command", OF_COMMANDS)
def test_help_names_them(command: str) -> None:
    result = runner.invoke(cli.app, [*command.split(), "--help"])
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    for code, meaning in OF_COMMANDS[command].items():
        assert f"{int(code)} {meaning}" in words


def test_the_page_of_the_command_line_has_them() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    assert table() in page
    assert "\n".join(f"| {int(code)} | {meaning} |" for code, meaning in OF_ALL.items()) in page


def table() -> str:
    """A row for each command; those that have the same codes share one."""
    alike: dict[int, list[str]] = {}
    for command, codes in OF_COMMANDS.items():
        alike.setdefault(id(codes), []).append(f"`{command}`")
    lines = [f"| command | {' | '.join(str(int(code)) for code in COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for names in alike.values():
        codes = OF_COMMANDS[names[0].strip("`")]
        lines.append(f"| {', '.join(names)} | {' | '.join(codes.get(code, '') for code in COLUMNS)} |")
    return "\n".join(line.replace("|  ", "| ") for line in lines)


# ------------------------------------------------------------ those of all commands


def start(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "muxserve.cli.app", *arguments], cwd=ROOT, **more)


def test_a_reader_that_has_seen_enough() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start("schema", stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        said = process.communicate(timeout=PATIENCE)[1]
    assert (process.returncode, said) == (141, b"")


def test_a_defect_is_told_apart_from_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object, **__: object) -> int:
        raise RuntimeError("boom")

    monkeypatch.setattr("muxserve.cli.status.status", defect)
    result = runner.invoke(cli.app, ["status"])
    assert result.exit_code == 70
    assert "RuntimeError: boom" in result.stderr


def test_ctrl_c_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("muxserve.cli.status.status", interrupted)
    assert runner.invoke(cli.app, ["status"]).exit_code == 128 + signal.SIGINT


# ------------------------------------------------------------ what was not done, of one command each


def test_nothing_shown_is_not_shown(endpoint: Endpoint) -> None:
    endpoint.answers["/ui/events"] = 200, b""
    result = runner.invoke(cli.app, ["top", "--url", endpoint.url, "--once"])
    assert result.exit_code == 2
    assert "ended the connection before it showed anything" in result.stderr


def test_another_version_shows_nothing(endpoint: Endpoint) -> None:
    endpoint.answers["/ui/events"] = 200, b'data: {"time": "now"}\n\n'
    result = runner.invoke(cli.app, ["top", "--url", endpoint.url])
    assert result.exit_code == 2
    assert "is it of another version?" in result.stderr


def test_logs_that_cannot_be_kept_are_a_wrong_option(fleet_file: Path) -> None:
    result = runner.invoke(cli.app, ["deploy", str(fleet_file), "--port", "0", "--log-dir", str(fleet_file)])
    assert result.exit_code == 2
    assert "cannot write logs to" in result.stderr


def test_findings_that_are_not_kept_are_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = nvml.Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 << 30, 80 << 30)
    machine = nvml.GpuMachine((gpu,), driver_version="580", cuda_version="13.0")
    monkeypatch.setattr(nvml, "machine", lambda: machine)
    monkeypatch.setattr(gpu_probes.lab, "run", lambda *_: [])

    def no_room(_: findings.Findings) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gpu_probes, "remember", no_room)
    result = runner.invoke(cli.app, ["doctor", "--gpu"])
    assert result.exit_code == 3, result.output
    assert "`muxserve deploy` cannot follow them" in result.stderr
    as_json = runner.invoke(cli.app, ["doctor", "--gpu", "--json"])
    assert as_json.exit_code == 3
    report = json.loads(as_json.stdout)
    assert (report["ok"], report["gpus"], report["probes"]) == (True, ["NVIDIA H100 80GB HBM3 GPU-0"], [])


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--ray", "auto", "--gpu"],
        ["profile", "fleet.yaml", "--from-fleet"],
        ["profile", "--from-fleet", "--threads", "2"],
        ["profile", "fleet.yaml", "--url", "http://127.0.0.1:8000"],
        ["profile", "fleet.yaml", "--api-key", "k"],
    ],
)
def test_an_option_without_an_effect_is_wrong(arguments: list[str]) -> None:
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "has no effect" in result.stderr or "goes without --ray" in result.stderr


def test_variables_of_the_environment_are_for_whoever_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUXSERVE_URL", "http://127.0.0.1:1")
    result = runner.invoke(cli.app, ["profile", "nowhere.yaml"])
    assert "nowhere.yaml: there is no such file" in result.stderr
