"""scale, drain, add, remove: what the user sees, against a controller without a fleet."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from muxserve.cli.app import app
from tests.cli.conftest import Endpoint
from tests.control.fakes import Controller, broken, running
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

UNITS = {"u0": ["chat", "code"], "u1": ["chat"]}


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    with tempfile.TemporaryDirectory(prefix="mx") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with running(Path(runtime) / "muxserve", UNITS) as controller:
            yield controller


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_scale(controller: Controller) -> None:
    result = run("scale", "code=2", "chat=2")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "code: to 2\ndone: code has 2 replicas (u0 and u1)\nchat has 2 replicas already (u0 and u1)\n"
    )
    assert controller.control.calls == [("scale", "code", 2)]


def test_apply(controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fleet.yaml"
    one = "models: [{name: chat, hub: org/chat, replicas: 2, limits: {max_queue: 3}}, {name: code, hub: org/code}]"
    file.write_text(f"tenants: {{team: {{keys: [env:TEAM_KEY]}}}}\n{one}")
    wrong = run("apply", str(file))
    assert wrong.exit_code == 2
    assert "the environment variable TEAM_KEY is not set" in wrong.output
    monkeypatch.setenv("TEAM_KEY", "s3cret")
    planned = run("apply", str(file), "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "~ models.chat.limits.max_queue: 1024 -> 3" in planned.stdout
    assert "s3cret" not in planned.stdout
    assert controller.control.calls == []
    assert json.loads(run("apply", str(file), "--dry-run", "--json").stdout)["result"] == "planned"
    done = run("apply", str(file))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "done: 2 changes made"
    assert controller.control.adopted[0].tenants["team"].keys == ["s3cret"]
    controller.control.fails["remove", "code"] = broken("it stays")
    file.write_text("models: [{name: chat, hub: org/chat, replicas: 2}]")
    failed = run("apply", str(file))
    assert failed.exit_code == 1
    assert "what was done before stays" in failed.output


def test_drain_add_and_remove(controller: Controller, fleet_file: Path) -> None:
    result = run("drain", "u1")
    assert (result.exit_code, result.stdout) == (0, "draining u1\ndone: u1 is empty and has ended\n")
    # Paths are those of the file, whatever the working directory of the controller is.
    one = fleet_file.parent / "one.yaml"
    one.write_text("models: [{name: new, path: two}]")
    result = run("add", str(one))
    assert (result.exit_code, result.stdout) == (0, "loading weights\ndone: new is served (u0)\n")
    assert controller.control.calls[-1] == ("add", "new", str(fleet_file.parent / "two"))
    result = run("remove", "code", "--fleet", controller.name)
    assert (result.exit_code, result.stdout) == (0, "done: code is served no longer\n")


@pytest.mark.parametrize("which", ["{port}", "localhost:{port}", "http://127.0.0.1:{port}/v1"])
@pytest.mark.parametrize("option", ["--url", "--fleet"])
def test_a_fleet_is_named_by_port_or_url(controller: Controller, option: str, which: str) -> None:
    assert run("scale", "code=2", option, which.format(port=controller.port)).exit_code == 0
    assert controller.control.calls == [("scale", "code", 2)]


@pytest.mark.parametrize(
    "which", ["{other}", "http://127.0.0.1:{other}", "http://elsewhere.example:{port}", "http://[:1"]
)
def test_a_fleet_elsewhere_is_not_changed(controller: Controller, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which = which.format(port=controller.port, other=free_port())
    monkeypatch.setenv("MUXSERVE_URL", which)
    result = run("scale", "code=2")
    assert result.exit_code == 2
    assert (
        f"there is no fleet {which} on this machine; running: {controller.name} (port {controller.port}"
        in result.stderr
    )
    assert controller.control.calls == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scale", "chat"], "'chat' is not MODEL=N, such as chat=2"),
        (["scale", "chat=two"], "'chat=two' is not MODEL=N"),
        (["scale", "chat=-1"], "'chat=-1' is not MODEL=N"),
        (["scale", "chat=1", "chat=2"], "chat is named twice"),
        (["scale", "chta=2"], 'the fleet has no model chta; did you mean "chat"?'),
        (["remove", "nothing"], "the fleet has no model nothing; known here: chat, code"),
        (["add", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["scale", "chat=2", "--fleet", "other"], "there is no fleet other on this machine; running: "),
    ],
)
def test_a_wrong_command(controller: Controller, arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"error: {said}" in result.stderr
    assert result.stdout == ""
    assert controller.control.calls == []
    answer = json.loads(run(*arguments, "--json").stdout)
    assert answer["result"] == "refused"
    assert said in answer["text"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["drain", "u0"], "u0 has the only replica of code; start another one first: muxserve scale code=2"),
        (["scale", "code=0"], "code needs at least 1 replica"),
    ],
)
def test_what_the_fleet_refuses(controller: Controller, arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert f"error: {said}" in result.stderr
    assert result.stderr.endswith("nothing was changed\n")
    assert controller.control.calls == []
    assert json.loads(run(*arguments, "--json").stdout)["result"] == "failed"


def test_the_only_model_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="mx") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with running(Path(runtime) / "muxserve", {"u0": ["chat"]}):
            assert run("remove", "chat").exit_code == 1


def test_a_change_that_needs_a_start_is_not_done(controller: Controller, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    models = "models: [{name: chat, hub: org/chat, replicas: REPLICAS}, {name: code, hub: org/code}]\n"
    file.write_text(f"kv_pool: {{size: 64MiB}}\n{models.replace('REPLICAS', '2')}")
    line = "! kv_pool.size: auto -> 64 MiB; needs the fleet deployed again"
    assert run("apply", str(file), "--dry-run").exit_code == 0
    result = run("apply", str(file))
    assert result.exit_code == 3
    assert result.stdout.splitlines() == [line, "not done: 1 change marked ! not made"]
    assert controller.control.calls == []
    answer = run("apply", str(file), "--json")
    assert answer.exit_code == 3
    assert json.loads(answer.stdout)["result"] == "left"
    file.write_text(file.read_text().replace("replicas: 2", "replicas: 1"))
    partly = run("apply", str(file))
    assert partly.exit_code == 3
    assert partly.stdout.splitlines()[-1] == "not done: 1 change made; 1 change marked ! not made"
    assert controller.control.calls == [("scale", "chat", 1)]


def test_what_went_wrong_unforeseen_claims_nothing(controller: Controller) -> None:
    controller.control.fails["drain", "u1"] = RuntimeError("boom")
    result = run("drain", "u1")
    assert result.exit_code == 1
    assert result.stderr.endswith("`muxserve status` says how the fleet stands\n")


def test_what_could_not_be_done(controller: Controller) -> None:
    controller.control.fails["scale", "code", 2] = broken("there is no room for a unit with code more")
    result = run("scale", "code=2")
    assert result.exit_code == 1
    assert result.stderr == "error: there is no room for a unit with code more\nnothing was changed\n"
    answer = run("scale", "code=2", "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.stdout) == {
        "result": "failed",
        "text": "there is no room for a unit with code more",
        "steps": ["code: to 2"],
        "fleet": {
            "url": controller.url,
            "models": ["chat", "code"],
            "units": [{"name": "u0", "serves": ["chat", "code"]}, {"name": "u1", "serves": ["chat"]}],
        },
    }


def test_status_asks_the_fleet_that_runs_here(controller: Controller, endpoint: Endpoint) -> None:
    result = run("status")
    assert result.exit_code == 2
    assert f"no answer from {controller.url}" in result.stderr
    endpoint.answers = {"/health": (503, {"status": "starting", "models": {}}), "/fleet": (200, {})}
    assert run("status", "--url", endpoint.url).exit_code == 1
    with running(controller.run_dir.base, {"u0": ["other"]}):
        result = run("status")
    assert result.exit_code == 2
    assert f"(port {controller.port}: chat, code)" in result.stderr
    assert "several fleets run here; say which with --fleet: " in result.stderr


def test_without_a_fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = run("drain", "u0")
    assert result.exit_code == 2
    assert "no fleet runs here" in result.stderr
    assert "muxserve deploy" in result.stderr
    assert "http://127.0.0.1:8000" in run("status").stderr


def test_ctrl_c_leaves_the_change_to_the_fleet(controller: Controller) -> None:
    control = controller.control
    control.hold = threading.Event()
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "muxserve.cli.app", "drain", "u1"]
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=subprocess.PIPE, env=os.environ.copy()
    ) as process:
        os.close(inside)
        assert control.began.wait(PATIENCE)
        seen = b""
        while b"draining u1" not in seen:
            seen += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert b"the change goes on in the fleet" in process.stderr.read()
        assert process.wait(PATIENCE) == 130
    os.close(terminal)
    control.hold.set()
    # Before, there may be a line that it waits for the other change.
    assert run("scale", "chat=1").stdout.splitlines()[-1] == "done: chat has 1 replica already (u0)"
    assert [unit.name for unit in control.fleet.units] == ["u0"]
