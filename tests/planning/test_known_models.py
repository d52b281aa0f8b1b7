"""Models by name: ours, those that come with the kernel tables, the hub's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import load_fleet
from muxserve.costs.kernels import package_version
from muxserve.planning.demand import known_models
from muxserve.planning.demand.checkpoints import CheckpointError
from muxserve.planning.demand.demands import demands_of
from muxserve.planning.demand.known_models import BUILT_IN, known_config, known_names, planned_architecture

BESIDE = Path(__file__).resolve().parents[2] / "build/plan"


class OneModel:
    """A hub with one repository."""

    def __init__(self, folder: Path, name: str = "", layers: int = 3) -> None:
        self.asked: list[str] = []
        self._name, self._file = name, folder / "config.json"
        config = {"architectures": ["LlamaForCausalLM"], **BUILT_IN["llama-7b"], "num_hidden_layers": layers}
        self._file.write_text(json.dumps(config))

    def config(self, repo: str, revision: str | None) -> Path:
        self.asked.append(repo)
        if repo != self._name:
            raise CheckpointError(f"cannot get {repo} from the hub: there is no such repository")
        return self._file

    def snapshot(self, repo: str, revision: str | None) -> Path:
        raise AssertionError("no plan needs weights")


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B", "LLAMA_3.1_8B"]
)
def test_neither_the_publisher_nor_the_training_counts(name: str) -> None:
    assert planned_architecture(name, Path()) == planned_architecture("llama-3.1-8b", Path())


def test_a_file_comes_before_a_name(tmp_path: Path) -> None:
    (tmp_path / "llama-7b").mkdir()
    OneModel(tmp_path / "llama-7b", layers=5)
    assert planned_architecture("llama-7b", tmp_path).layers == 5


def test_hubs_are_asked_in_turn_for_repositories_that_are_not_known(tmp_path: Path) -> None:
    empty, full = OneModel(tmp_path), OneModel(tmp_path, "somebody/new-model", layers=7)
    assert planned_architecture("somebody/new-model", tmp_path / "fleet", (empty, full)).layers == 7
    assert planned_architecture("meta-llama/Llama-2-7b-hf", tmp_path / "fleet", (empty, full)).layers == 32
    assert (empty.asked, full.asked) == (["somebody/new-model"], ["somebody/new-model"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-3-8b", 'neither a config.json nor a known model; did you mean "llama-3.1-8b"?'),
        ("whatever", "nor a known model; `muxserve plan --list models` has the known names"),
        ("somebody/other", "cannot get somebody/other from the hub: there is no such repository"),
    ],
)
def test_what_is_not_known_is_answered_with_what_is(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match="known model") as error:
        planned_architecture(name, tmp_path / "fleet", (OneModel(tmp_path),))
    assert message in str(error.value)


def test_a_known_model_that_the_hub_does_not_give_is_planned_with_a_note(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("models: [{ name: a, hub: Qwen/Qwen2.5-7B-Instruct }, { name: b, architecture: llama-7b }]")
    first, second = demands_of(load_fleet(fleet, serving=False), tmp_path, OneModel(tmp_path))
    assert first.architecture.layers == 28
    assert first.architecture.estimated.endswith("for Qwen/Qwen2.5-7B-Instruct, which the hub did not give")
    assert not second.architecture.estimated


class TestPublished:
    """The config.json files that come with the kernel tables."""

    @pytest.fixture(autouse=True)
    def tables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not package_version():
            monkeypatch.syspath_prepend(str(BESIDE))
        if not package_version():
            pytest.skip("needs aiconfigurator-core: pip install --no-deps --target build/plan -r requirements/plan.txt")

    def test_names_that_people_know(self) -> None:
        for name, layers in (("Qwen/Qwen3-32B", 64), ("openai/gpt-oss-20b", 24), ("deepseek-ai/DeepSeek-V3", 61)):
            assert planned_architecture(name, Path()).layers == layers

    def test_nearly_all_of_them_can_be_planned(self) -> None:
        names = [name for name, source in known_names() if source != "muxserve"]
        assert len(names) > 80
        lost = [name for name in names if not _readable(name)]
        assert not lost

    def test_an_exact_name_comes_before_one_that_is_alike(self) -> None:
        found = known_config("nvidia/Llama-3.1-70B-Instruct-FP8")
        assert found is not None
        assert found["quantization_config"]


def _readable(name: str) -> bool:
    try:
        return planned_architecture(name, Path()).layers > 0
    except ValueError:
        return False


class TestLists:
    def test_models(self) -> None:
        result = CliRunner().invoke(app, ["plan", "--list", "models"])
        assert result.exit_code == 0
        assert "llama-3.1-8b" in result.stdout

    def test_gpus(self) -> None:
        result = CliRunner().invoke(app, ["plan", "--list", "gpus"])
        rows = {line.split()[0]: line.split()[1] for line in result.stdout.splitlines() if line}
        assert (rows["H100-80GB"], rows["L20-48GB"]) == ("measured", "-")

    def test_other_words_are_refused(self) -> None:
        result = CliRunner().invoke(app, ["plan", "--list", "cpus"])
        assert result.exit_code == 2
        assert "--list: must be models or gpus, not 'cpus'" in result.stderr


def test_without_the_package_only_ours_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_models, "package_version", lambda: "")
    assert [name for name, _ in known_names()] == list(BUILT_IN)
