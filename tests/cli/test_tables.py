"""No table of any command cuts a figure, however narrow the terminal and long the names: at 80 and at 100 columns."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from muxserve.cli import doctor
from muxserve.cli.app import app
from muxserve.cli.output import budget_table, console
from muxserve.cli.progress import Lines, LiveTable
from muxserve.cluster.events import Expected, PartId, Progress, Starting, Up
from muxserve.gpu.budget import Budget, Line
from tests.cli.conftest import Endpoint

WIDTHS = (80, 100)
NAMES = ("the-largest-model-of-the-customer-support-team-in-europe-v3.2", "org/another.long-name_with-70b-instruct-fp8")
FIGURE = re.compile(r"\d+(?:[.,:x]\d+)*")


def figures(text: str) -> set[str]:
    return set(FIGURE.findall(text))


def rendered(what: RenderableType, width: int) -> str:
    """As the command line's own console prints it on a terminal of that width."""
    out = StringIO()
    Console(file=out, highlight=False, soft_wrap=True, width=width).print(what)
    return out.getvalue()


def check(what: RenderableType, width: int) -> None:
    narrow, whole = rendered(what, width), rendered(what, 1000)
    assert "…" not in narrow
    # A name may be folded, and the figures in it with it.
    of_names = figures(" ".join(NAMES))
    lost = figures(whole) - figures(narrow) - of_names
    assert not lost, f"{lost} of\n{whole}\nin\n{narrow}"
    if not isinstance(what, str):
        assert max(map(len, narrow.splitlines()), default=0) <= width, narrow


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RenderableType]]:
    """What a command gives the console to print."""

    def run(*words: object) -> list[RenderableType]:
        seen: list[RenderableType] = []
        with monkeypatch.context() as patch:
            patch.setattr(console, "print", lambda *what, **_: seen.extend(what))
            result = CliRunner().invoke(app, [*map(str, words)])
        assert result.exit_code == 0, result.output
        assert any(not isinstance(what, str) for what in seen), "a table"
        return seen

    return run


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """A fleet of large figures on GPUs, which need not be here."""
    models = [
        {
            "name": name.replace("/", "-"),
            "architecture": "llama-7b",
            "dtype": "float16",
            "rate": rate,
            "workload": {"prompt_tokens": 12345, "output_tokens": 678},
            "slo": {"ttft_ms": 123456.789, "tpot_ms": 1234.5},
            "max_len": 16384,
        }
        for name, rate in zip(NAMES, (0.123456, 0.0987654), strict=True)
    ]
    file = tmp_path / "planned.json"
    file.write_text(json.dumps({"cluster": {"gpus": 2, "gpu_type": "A100-80GB"}, "models": models}))
    return file


@pytest.fixture
def served(fleet_file: Path) -> Path:
    """A fleet of this machine whose models have long names."""
    names = iter(NAMES)
    text = re.sub(r"name: \w+", lambda _: f"name: {next(names).replace('/', '-')}", fleet_file.read_text())
    fleet_file.write_text(text)
    return fleet_file


def all_fit(printed: list[RenderableType]) -> None:
    for what in printed:
        for width in WIDTHS:
            check(what, width)


def test_plan_and_its_sweep(planned: Path, printed: Callable[..., list[RenderableType]]) -> None:
    all_fit(printed("plan", planned, "--seconds", 0.5, "--simulate", 10))
    all_fit(printed("plan", planned, "--sweep", "gpus=1..2", "--seconds", 0.5, "--simulate", 10))


def test_simulate(planned: Path, printed: Callable[..., list[RenderableType]]) -> None:
    all_fit(printed("simulate", planned, "--workload", "poisson:duration=30", "--mode", "muxserve,spatial"))


def test_validate(served: Path, printed: Callable[..., list[RenderableType]]) -> None:
    all_fit(printed("validate", served))


def test_workload(printed: Callable[..., list[RenderableType]]) -> None:
    spec = "poisson:rate=40,duration=60,prompt=2000..98765,output=1600..64000,seed=1"
    all_fit(printed("workload", "describe", spec, "--models", ",".join(NAMES)))


def test_status(endpoint: Endpoint, printed: Callable[..., list[RenderableType]]) -> None:
    counts = ("queued", "prefilling", "decoding", "used_pages", "quota_pages", "cached_pages", "moved_in", "moved_out")
    models = {
        name: {key: 987654321 + 1000 * k + n for n, key in enumerate(counts)} | {"phases": {}}
        for k, name in enumerate(NAMES)
    }
    engines = {"prefill": "restarting", "decode": "restarting"}
    health: dict[str, Any] = {
        "status": "degraded",
        "units": {"u1234": "up"},
        "scheduler": "up",
        "models": {
            name: {"status": "restarting", "engines": engines, "running": 123456, "waiting": 7654321} for name in NAMES
        },
    }
    pools = {"pool0": {"total_pages": 987654321, "free_pages": 123456789}}
    state = {"policy": "slack", "models": models, "pools": pools}
    unit = {"name": "u1234", "status": "up", "serves": [*NAMES], "state": state}
    endpoint.answers = {"/health": (200, health), "/fleet": (200, {"units": [unit]})}
    all_fit(printed("status", "--url", endpoint.url))


def test_what_only_a_gpu_machine_prints() -> None:
    lines = tuple(Line(f"weights of {name}", 14 << 30) for name in NAMES)
    budgets = [Budget(f"NVIDIA H200 NVL {n}", 143771 << 20, lines, 9 << 30, tables=2) for n in range(4)]
    for width in WIDTHS:
        check(budget_table(budgets), width)


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RenderableType] = []
    monkeypatch.setattr(console, "print", lambda *what, **_: seen.extend(what))
    long = "/".join(["a-directory-with-a-long-name"] * 6)
    doctor.print_checks([doctor.Check("memory", "missing", f"{long}: 123456789 MiB of 987654321", f"remove {long}")])
    all_fit(seen)


def test_progress_of_a_start() -> None:
    quiet = Console(file=StringIO())
    table = LiveTable(quiet, Lines(quiet))
    parts = [PartId("engine", name, phase) for name in NAMES for phase in ("prefill", "decode")]
    try:
        table(Expected(tuple(parts)))
        for part in parts:
            table(Starting(part))
        table(Progress(parts[0], "downloading 123456.7 MiB of 987654.3 MiB"))
        table(Up(parts[1], 1234567, 98765.4))
        shown = table._table()
    finally:
        table.close()
    for width in WIDTHS:
        narrow = rendered(shown, width)
        assert "…" not in narrow
        for figure in ("123456.7", "987654.3", "1234567", "98765.4"):
            assert figure in narrow


@pytest.mark.parametrize("columns", WIDTHS)
def test_in_a_terminal(served: Path, columns: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-m", "muxserve.cli.app", "validate", str(served)]
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=subprocess.DEVNULL, env={**environment, "TERM": "xterm"}
    ) as process:
        os.close(inside)
        seen = b""
        while chunk := _read(terminal):
            seen += chunk
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
    assert process.returncode == 0, text
    wide = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert "…" not in text
    assert figures(wide) - figures(text) - figures(" ".join(NAMES)) == set()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""
