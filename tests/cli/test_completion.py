"""What shells complete, as they ask for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.costs.devices import DEVICES
from tests.control.fakes import Controller, running


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    with tempfile.TemporaryDirectory(prefix="mx") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with running(Path(runtime) / "muxserve", {"u0": ["chat", "code"], "u1": ["chat"]}) as controller:
            yield controller


def completed(line: str) -> list[str]:
    """What bash would offer behind `line`."""
    words = line.split(" ")
    environment = {
        "_MUXSERVE_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    return CliRunner().invoke(app, [], prog_name="muxserve", env=environment).stdout.split()


def test_models_units_and_fleets(controller: Controller) -> None:
    assert completed("muxserve scale c") == ["chat=1", "chat=3", "code=0", "code=2"]
    assert completed("muxserve remove co") == ["code"]
    assert completed("muxserve drain ") == ["u0", "u1"]
    assert completed("muxserve add one.yaml --unit u") == ["u0", "u1"]
    assert completed("muxserve adapter ch") == ["chat"]
    for option in ("--url", "--fleet"):
        assert completed(f"muxserve status {option} ") == [controller.name, str(controller.port)]
    assert completed("muxserve remove --url 9 ") == []
    logs = controller.run_dir.path / "logs"
    (logs / "gateway-0.log").write_text("")
    assert completed("muxserve logs gate") == ["gateway-0"]


def test_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for line in ("muxserve scale ", "muxserve drain ", "muxserve logs ", "muxserve status --url "):
        assert completed(line) == []


def test_values_of_options() -> None:
    assert completed("muxserve plan fleet.yaml --objective ") == ["auto", "throughput", "slo", "gpus"]
    assert completed("muxserve simulate fleet.yaml --mode a") == ["adbs"]
    assert completed("muxserve plan fleet.yaml --costs m") == ["measured"]
    assert completed("muxserve plan fleet.yaml --gpu-type H200") == [
        each for each in DEVICES if each.startswith("H200")
    ]
    assert completed("muxserve plan --list ") == ["models", "gpus"]
