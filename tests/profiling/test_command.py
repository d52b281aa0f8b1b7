"""`muxserve profile` with input that is wrong: it says so and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.costs.profile import MeasuredMachine, Profile, save_profile

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
runner = CliRunner()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "many"], "--tokens must be whole numbers of at least 1"),
        (["--threads", "4096"], "--threads: 4096 are more than the"),
        (["--contexts", "0"], "--contexts must be whole numbers of at least 1"),
    ],
)
def test_options_that_are_wrong(tmp_path: Path, options: list[str], message: str) -> None:
    out = tmp_path / "profile.json"
    result = runner.invoke(app, ["profile", QUICKSTART, "-o", str(out), *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not out.exists()


def test_a_file_that_is_no_profile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "notes.json"
    out.write_text('{"dear": "diary"}')
    result = runner.invoke(app, ["profile", QUICKSTART, "-o", str(out)])
    assert result.exit_code == 2
    assert "is not a profile as `muxserve profile` writes it" in result.stderr
    assert out.read_text() == '{"dear": "diary"}'


def test_a_profile_of_another_machine_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    save_profile(Profile(machines={"CPU": MeasuredMachine("Zilog Z80, 1 of 1 cores", 1e6, {"float32": 1e5}, 1)}), out)
    result = runner.invoke(app, ["profile", QUICKSTART, "-o", str(out)])
    assert result.exit_code == 2
    assert "was measured on another machine (Zilog Z80, 1 of 1 cores); give another file with -o" in result.stderr


def test_problems_of_the_fleet_file_come_with_their_line(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("models:\n  - {name: a, path: nowhere}\n")
    result = runner.invoke(app, ["profile", str(fleet), "-o", str(tmp_path / "p.json")])
    assert result.exit_code == 2
    assert "fleet.yaml:2" in result.stderr
    assert "nothing was measured" in result.stderr
