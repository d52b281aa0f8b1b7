"""`muxserve deploy` as a process of its own, over parts that only pretend."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
HOST = """
import muxserve.cli.deploy as deploy
from muxserve.cli.app import main
from tests.cluster.conftest import fake_commands, fake_fleet_commands
deploy.commands_for = fake_commands
deploy.fleet_commands_for = fake_fleet_commands
main()
"""


class Deploy:
    """A running command and what it prints."""

    def __init__(self, runtime: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.runtime = runtime
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", HOST, "deploy", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "XDG_RUNTIME_DIR": str(runtime),
                "FAKES": str(runtime),
                "PYTHONPATH": str(ROOT),
                **(env or {}),
            },
        )

    def until(self, words: str) -> str:
        """Read up to the line that has `words`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"it ended without {words!r}:\n{''.join(self.lines)}")

    def end(self) -> tuple[int, str]:
        assert self.process.stdout is not None
        self.lines += self.process.stdout
        return self.process.wait(), "".join(self.lines)

    def run_dirs(self) -> list[Path]:
        base = self.runtime / "muxserve"
        return list(base.iterdir()) if base.exists() else []


def refused(*args: str) -> str:
    """What `deploy` says that is refused with exit code 2, without a process of its own."""
    result = CliRunner().invoke(app, ["deploy", *args])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.fixture
def runtime() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mux", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def test_a_fleet_takes_over_from_the_one_at_its_port(fleet_file: Path, runtime: Path) -> None:
    assert (
        "--take-over: no fleet of yours listens at port 8000; running: none"
        in Deploy(runtime, str(fleet_file), "--take-over").end()[1]
    )
    first = Deploy(runtime, str(fleet_file), "--port", "0")
    port = first.until("serving at").split()[2].removesuffix("/v1").rpartition(":")[2]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(address := str(runtime / "notify"))
        service.settimeout(PATIENCE)
        second = Deploy(runtime, str(fleet_file), "--port", port, "--take-over", env={"NOTIFY_SOCKET": address})
        second.until("the fleet takes no more connections, and ends with its last request")
        assert service.recv(4096).decode().split() == ["READY=1", f"MAINPID={second.process.pid}"]
    code, text = first.end()
    assert code == 0, text
    assert "stopping (another fleet has taken over)" in text
    second.process.send_signal(signal.SIGINT)
    code, text = second.end()
    assert code == 0, text


def test_it_shows_everything_serves_and_drains(fleet_file: Path, runtime: Path) -> None:
    deploy = Deploy(runtime, str(fleet_file), "--port", "0", "--demo")
    url = deploy.until("serving at").split()[2].removesuffix("/v1")
    text = "".join(deploy.lines)
    assert re.search(r"engine two/both: up \(pid \d+", text)
    assert "ready after" in text
    assert re.search(r"two +float32 +2 x 2 \(head 64\) +pool0", text)
    # the demo's control character does not reach the terminal
    assert "one > What are you?\none was asked: What are you?\N{REPLACEMENT CHARACTER}\n" in text
    assert f"curl {url}/v1/chat/completions" in text
    assert f'OpenAI(base_url="{url}/v1", api_key="none")' in text
    with urllib.request.urlopen(f"{url}/health") as answer:
        assert answer.status == 200
    (run_dir,) = deploy.run_dirs()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    port = url.rpartition(":")[2]
    code, second = Deploy(runtime, str(fleet_file), "--port", port).end()
    assert code == 2
    assert (
        f"port {port} on 127.0.0.1 is taken by another fleet of yours, {run_dir.name} (port {port}: one, two)" in second
    )
    for file in ("fleet.json", "u0/unit.json"):
        assert (run_dir / file).stat().st_mode & 0o777 == 0o600
    deploy.process.send_signal(signal.SIGINT)
    code, text = deploy.end()
    assert code == 0, text
    assert "Ctrl-C: no new requests" in text
    assert "stopping (Ctrl-C)" in text
    assert "Traceback" not in text
    assert deploy.run_dirs() == []


def test_logs_are_kept_where_they_are_wanted(fleet_file: Path, runtime: Path, tmp_path: Path) -> None:
    nowhere = {"XDG_RUNTIME_DIR": str(runtime / "nowhere"), "TMPDIR": str(runtime)}
    deploy = Deploy(runtime, str(fleet_file), "--port", "0", "--log-dir", str(tmp_path / "logs"), env=nowhere)
    deploy.until("serving at")
    (run_dir,) = (runtime / f"muxserve-{os.getuid()}").iterdir()
    deploy.process.terminate()
    code, text = deploy.end()
    assert code == 0, text
    assert f"XDG_RUNTIME_DIR is no directory; sockets and logs are below {run_dir.parent} instead" in text
    assert not run_dir.exists()
    (kept,) = (tmp_path / "logs").iterdir()
    assert f"logs are kept in {kept}" in text
    assert (kept / "u0/unit.log").exists()


def test_sigterm_drains_too_and_a_second_signal_ends_at_once(fleet_file: Path, runtime: Path) -> None:
    (runtime / "slow-gateway").touch()
    deploy = Deploy(runtime, str(fleet_file), "--port", "0")
    deploy.until("serving at")
    deploy.process.terminate()
    deploy.until("no new requests")
    deploy.process.send_signal(signal.SIGINT)
    code, text = deploy.end()
    assert code == 130, text
    assert deploy.run_dirs() == []


def test_a_model_that_cannot_start_is_said_and_the_others_serve(fleet_file: Path, runtime: Path) -> None:
    (runtime / "fail-two-both").write_text("")
    deploy = Deploy(runtime, str(fleet_file), "--port", "0")
    deploy.until("the weights are of cheese")
    deploy.until("ready after")
    deploy.process.terminate()
    code, text = deploy.end()
    assert code == 0, text
    assert "Traceback" not in text


def test_the_logs_of_a_failure_are_kept_until_the_next_start(fleet_file: Path, runtime: Path) -> None:
    (runtime / "die-unit").write_text("")
    deploy = Deploy(runtime, str(fleet_file), "--port", "0")
    code, text = deploy.end()
    assert code == 3
    assert "unit dies because the test says so" in text
    (run_dir,) = deploy.run_dirs()
    assert f"logs are kept below {run_dir}" in text
    (runtime / "die-unit").unlink()
    again = Deploy(runtime, str(fleet_file), "--port", "0")
    again.until("ready after")
    again.process.terminate()
    assert again.end()[0] == 0
    assert not run_dir.exists()


def test_a_port_that_is_taken_is_told_before_anything_starts(fleet_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refused(str(fleet_file), "--port", str(port))
    assert f"port {port} on 127.0.0.1 is taken by another program" in text
    assert "--port" in text
    assert deploy_started_nothing(text)


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
def test_a_host_that_is_not_here(host: str, fleet_file: Path) -> None:
    text = refused(str(fleet_file), "--host", host, "--port", "0")
    assert "is no address of this machine" in text
    assert deploy_started_nothing(text)


def test_a_wrong_fleet_starts_nothing(fleet_file: Path, runtime: Path) -> None:
    fleet_file.write_text("models: []\n")
    deploy = Deploy(runtime, str(fleet_file))
    code, text = deploy.end()
    assert code == 2
    assert ":1: models: needs at least one entry" in text
    assert deploy_started_nothing(text)
    assert deploy.run_dirs() == []


def test_what_cannot_be_simulated_starts_nothing(fleet_file: Path) -> None:
    for options in ([], ["--simulated"]):
        assert "--profile: " in refused(str(fleet_file), *options, "--profile", str(fleet_file))
    fleet_file.write_text(f"cluster: {{gpus: 1}}\n{fleet_file.read_text()}")
    text = refused(str(fleet_file), "--simulated")
    assert ":1: cluster.gpu_type: say what the GPUs are that are pretended" in " ".join(text.split())
    assert deploy_started_nothing(text)


def test_keys_are_asked_for_and_not_shown(fleet_file: Path, runtime: Path) -> None:
    fleet_file.write_text(fleet_file.read_text().replace("drain_seconds: 5", "api_keys: [env:FLEET_KEY]"))
    deploy = Deploy(runtime, str(fleet_file), "--port", "0", "--demo", env={"FLEET_KEY": "sesame"})
    deploy.until("serving at")
    deploy.process.terminate()
    code, text = deploy.end()
    assert code == 0
    assert "sesame" not in text
    assert "$MUXSERVE_API_KEY" in text


def deploy_started_nothing(text: str) -> bool:
    return "starting" not in text
