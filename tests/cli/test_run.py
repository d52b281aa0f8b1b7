"""`muxserve run`: what names become, and what is refused before anything starts. tests/e2e/test_run.py serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.cli.run import NoModelError, models_of
from muxserve.config import load_fleet
from tests.cli.conftest import CONFIG
from tests.support.checkpoint_files import write_checkpoint
from tests.support.hub import hub_of

ROOT = Path(__file__).resolve().parents[2]


def test_names_become_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    assert models_of(["Qwen/Qwen3-0.6B", "gpt2", "my model"]) == [
        {"name": "Qwen3-0.6B", "hub": "Qwen/Qwen3-0.6B", "aliases": ["Qwen/Qwen3-0.6B"]},
        {"name": "gpt2", "hub": "gpt2"},
        {"name": "my-model", "path": str(tmp_path / "my model")},
    ]
    # Models of one name have their organisations' before it.
    assert [model["name"] for model in models_of(["a/x", "b/x", "c"])] == ["a-x", "b-x", "c"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["./nowhere"],
            "./nowhere: there is no such directory, and a name of the Hugging Face hub is organisation/name",
        ),
        (["a/b/c"], "a/b/c: there is no such directory"),
        (["file.yaml"], "file.yaml is a file; give the directory of a checkpoint"),
        (["a/x", "a/x"], "a/x stands twice"),
    ],
)
def test_what_is_no_model(words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_text("models: []")
    with pytest.raises(NoModelError, match=says):
        models_of(words)
    result = CliRunner().invoke(app, ["run", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def ran(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`muxserve run` as a process, since the hub's library reads its variables once."""
    command = [sys.executable, "-m", "muxserve.cli.app", "run", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment}
    )


def test_without_a_network(tmp_path: Path) -> None:
    """The hub's address takes no connections."""
    ended = ran("org/a", "configs/models/atlas", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert ended.returncode == 2
    assert "127.0.0.1:9 does not answer; checkpoints are taken from the local cache" in ended.stderr
    assert "error: org/a: cannot get org/a from the hub: it is not in the local cache, and the hub" in ended.stderr
    assert "look at the network (HTTPS_PROXY names a proxy), or give a directory with the checkpoint" in ended.stderr
    assert "nothing was started" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_cannot_be_served_is_not_downloaded(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "odd", {**CONFIG, "num_key_value_heads": 3})
    with hub_of({"tiny/odd": checkpoint}) as hub:
        written = tmp_path / "fleet.yaml"
        ended = ran("tiny/odd", "--write", str(written), HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"))
        assert ended.returncode == 2
        assert "error: tiny/odd: cannot be served: LlamaForCausalLM" in ended.stderr
        assert not [path for path in hub.paths if path.endswith(".safetensors")]
    # It is there all the same, to be changed and deployed.
    assert yaml.safe_load(written.read_text())["models"][0]["hub"] == "tiny/odd"
    assert load_fleet(written).models[0].aliases == ["tiny/odd"]
    again = ran("tiny/odd", "--write", str(written))
    assert again.returncode == 2
    assert f"--write: {written} cannot be written: File exists; nothing was started" in again.stderr
