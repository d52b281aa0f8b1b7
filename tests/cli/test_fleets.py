"""`muxserve list` and `stop`, of controllers without a fleet and of processes that end as they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from muxserve.cli.app import app
from tests.cli.conftest import Endpoint
from tests.control.fakes import running
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
# Has a run directory as a controller has, says so, and ends with the second signal if `stubborn`.
PROCESS = """
import signal, sys
from pathlib import Path
from muxserve.spec import save_fleet
from muxserve.spec.run_dir import RunDir
from tests.control.fakes import fleet_of
wait = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
directory = RunDir(Path(sys.argv[1]))
save_fleet(fleet_of(str(directory.path), {"u0": ["chat"]}))
print(directory.path.name, flush=True)
got = [signal.sigwait({signal.SIGTERM, signal.SIGINT}).name for _ in range(int(sys.argv[2]))]
directory.remove()
print(*got, flush=True)
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mx") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield Path(runtime) / "muxserve"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, [*words])


def test_nothing_runs(base: Path) -> None:
    listed = run("list")
    assert (listed.exit_code, json.loads(run("list", "--json").stdout)) == (0, [])
    assert "no fleet of yours runs here" in listed.stdout
    stopped = run("stop")
    assert stopped.exit_code == 2
    assert "no fleet runs here" in stopped.stderr


def test_fleets_are_listed_with_what_they_say(base: Path, endpoint: Endpoint) -> None:
    endpoint.answers["/health"] = 200, {"status": "degraded", "models": {}}
    with (
        running(base, {"u0": ["chat", "code"]}, port=endpoint.server.server_port) as one,
        running(base, {"u0": ["other"]}, port=9) as two,
    ):
        listed = {each["id"]: each for each in json.loads(run("list", "--json").stdout)}
        assert set(listed) == {one.name, two.name}
        first, second = listed[one.name], listed[two.name]
        assert (first["url"], first["status"], first["models"]) == (endpoint.url, "degraded", ["chat", "code"])
        assert (first["pid"], second["status"], second["models"]) == (os.getpid(), "starting", ["other"])
        rows = {line.split()[0]: line.split() for line in run("list").stdout.splitlines()}
        assert rows[one.name][1:5] == ["degraded", endpoint.url, "chat,", "code"]


@pytest.mark.parametrize(("words", "signals"), [([], {"SIGTERM"}), (["--now"], {"SIGTERM", "SIGINT"})])
def test_stop_waits_for_the_end(base: Path, words: list[str], signals: set[str]) -> None:
    command = [sys.executable, "-c", PROCESS, str(base), str(len(signals))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        stopped = run("stop", "--url", name, *words)
        assert stopped.exit_code == 0, stopped.output
        assert stopped.stdout.splitlines()[-1] == f"{name} has ended"
        assert set(process.stdout.readline().split()) == signals
        assert process.wait(PATIENCE) == 0


def test_ctrl_c_ends_the_wait_alone(base: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(base), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        line = [sys.executable, "-m", "muxserve.cli.app", "stop"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT) as stopping:
            assert stopping.stdout is not None
            assert "running requests have" in stopping.stdout.readline()
            stopping.send_signal(signal.SIGINT)
            assert "`muxserve stop --now` ends it at once" in stopping.stdout.read()
            assert stopping.wait(PATIENCE) == 130
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_a_fleet_that_does_not_say_its_process(base: Path) -> None:
    """As those of earlier versions."""
    with running(base, {"u0": ["chat"]}) as controller:
        (controller.run_dir.path / "lock").write_text("")
        stopped = run("stop")
        assert stopped.exit_code == 2
        assert f"{controller.name} does not say which process it is; stop it where it was deployed" in stopped.stderr
        assert json.loads(run("list", "--json").stdout)[0]["pid"] is None
