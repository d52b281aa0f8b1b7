"""Checkpoints that pass every check and still cannot be served: each is degraded alone, with its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.fleet import Fleet, running
from tests.support import preloaded
from tests.support.patience import PATIENCE
from tests.support.tiny_checkpoint import tiny_checkpoint


def spoiled(directory: Path, name: str, file: str, **changes: object) -> Path:
    """A copy of a tiny checkpoint, one of whose JSON files says something else."""
    path = directory / name
    shutil.copytree(tiny_checkpoint(), path)
    said: dict[str, Any] = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**said, **changes}))
    return path


def without_groups(directory: Path) -> Path:
    """A DeepSeek V2 as Transformers writes one whose experts are in no groups."""
    path = directory / "mla"
    shutil.copytree(tiny_checkpoint("deepseek_v2", max_len=8192), path)
    config = json.loads((path / "config.json").read_text())
    config |= {"n_group": None, "topk_group": None, "topk_method": "greedy"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def declared_in(directory: Path, **more: object) -> Path:
    models = {
        "good": tiny_checkpoint(),
        # Its weights are of another shape.
        "shapes": spoiled(directory, "shapes", "config.json", intermediate_size=768),
        # No such kind of tokenizer, which only the front end finds.
        "words": spoiled(directory, "words", "tokenizer.json", model={"type": "cheese"}),
        "mla": without_groups(directory),
        "gemma": tiny_checkpoint("gemma3"),
    }
    file = directory / "fleet.yaml"
    declared = [{"name": name, "path": str(path), "dtype": "float32"} for name, path in models.items()]
    file.write_text(yaml.safe_dump({"kv_pool": {"size": "128MiB"}, "models": declared, **more}))
    return file


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    path = declared_in(tmp_path_factory.mktemp("degraded"))
    with running(path, start=preloaded.start) as deployed:
        yield deployed


def complete(fleet: Fleet, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "some text", "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE)


def test_the_others_serve(fleet: Fleet) -> None:
    for name in ("good", "mla", "gemma"):
        answer = complete(fleet, name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_requests_are_told_the_reason(fleet: Fleet) -> None:
    shapes, words = complete(fleet, "shapes"), complete(fleet, "words")
    assert (shapes.status_code, words.status_code) == (503, 503)
    reason = shapes.json()["error"]["message"]
    # The last line of what vLLM says, and not of what it was doing.
    assert "engine shapes/" in reason
    assert "cannot start: " in reason
    assert "AssertionError" in reason or "size" in reason or "shape" in reason
    assert "words cannot be served: " in words.json()["error"]["message"]


def test_health_names_what_is_degraded(fleet: Fleet) -> None:
    answer = fleet.get("/health")
    assert answer.status_code == 200
    health = answer.json()
    assert health["status"] == "degraded"
    words = {name: model["status"] for name, model in health["models"].items()}
    assert words == {"good": "up", "mla": "up", "gemma": "up", "shapes": "degraded", "words": "degraded"}
    assert all(health["models"][name]["reason"] for name in ("shapes", "words"))


@pytest.mark.thorough
def test_where_memory_decides_they_only_sleep(tmp_path: Path) -> None:
    path = declared_in(tmp_path, memory={"min_residence": "100ms"})
    with running(path, start=preloaded.start) as fleet:
        for _ in range(2):
            assert complete(fleet, "good").status_code == 200
            shapes = complete(fleet, "shapes")
            assert shapes.status_code == 503
            assert "cannot start: " in shapes.json()["error"]["message"]
            assert complete(fleet, "words").status_code == 503
        assert complete(fleet, "mla").status_code == 200
