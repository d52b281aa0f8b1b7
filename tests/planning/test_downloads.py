"""Checkpoints that the hub's own library downloads, from a hub on loopback."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from muxserve.config.checkpoint_files import CheckpointError
from muxserve.planning.demand import downloads
from muxserve.planning.demand.checkpoints import HuggingFaceHub
from muxserve.planning.demand.downloads import LINE_SECONDS, in_lines
from tests.support.hub import Hub, hub_of

ATLAS = Path(__file__).resolve().parents[2] / "configs/models/atlas"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub_of({"tiny/atlas": ATLAS}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield hub


def test_a_checkpoint_comes_and_stays(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "LOOK_SECONDS", 0.001)
    told: list[tuple[str, int, int]] = []
    hub = HuggingFaceHub(reaches=lambda: True, on_bytes=lambda *each: told.append(each))
    directory = hub.snapshot("tiny/atlas", None)
    files = {path.name: path.read_bytes() for path in ATLAS.iterdir()}
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
    size = sum(map(len, files.values()))
    assert told[-1] == ("tiny/atlas", size, size)
    assert all(0 <= done <= size for _, done, _ in told)
    # What is there is not downloaded again, and found without the hub.
    served.paths.clear()
    told.clear()
    assert hub.snapshot("tiny/atlas", None) == directory
    assert not [path for path in served.paths if "/resolve/" in path]
    assert told == []
    assert HuggingFaceHub(reaches=lambda: False).snapshot("tiny/atlas", None) == directory


def test_without_weights(served: Hub) -> None:
    directory = HuggingFaceHub(weights=False, reaches=lambda: True).snapshot("tiny/atlas", None)
    assert (directory / "config.json").is_file()
    assert not (directory / "model.safetensors").exists()


def test_a_name_that_the_hub_does_not_know(served: Hub) -> None:
    for ask in (HuggingFaceHub(reaches=lambda: True).config, HuggingFaceHub(reaches=lambda: True).snapshot):
        with pytest.raises(CheckpointError, match="cannot get tiny/other from the hub: there is no such repository"):
            ask("tiny/other", None)


def test_a_full_disk_is_found_before(served: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, downloads.SPARE_BYTES + (1 << 20)))
    with pytest.raises(CheckpointError, match=r"tiny/atlas takes 3\.\d+ MiB, and .* has room for 1 MiB; .*HF_HOME"):
        HuggingFaceHub(reaches=lambda: True).snapshot("tiny/atlas", None)
    assert not [path for path in served.paths if "/resolve/" in path]


def test_lines_are_few() -> None:
    clock, lines = [0.0], []
    on_bytes = in_lines(lines.append, lambda: clock[0])
    for second in range(25):
        clock[0] = float(second)
        on_bytes("org/a", second << 20, 25 << 20)
    on_bytes("org/a", 25 << 20, 25 << 20)
    assert len(lines) == 24 // LINE_SECONDS + 1
    assert lines[0] == "org/a: 10 MiB of 25 MiB"
    assert lines[-1] == "org/a: 25 MiB of 25 MiB"
