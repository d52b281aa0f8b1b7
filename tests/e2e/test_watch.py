"""`deploy --watch` follows a fleet file as Kubernetes mounts it from a ConfigMap, under 32 streams: nothing is lost,
nobody hears that there is no such model, and a broken file changes nothing."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import Fleet, running
from tests.e2e.load import stream_chat, until
from tests.e2e.several import command
from tests.e2e.test_versions import CHECKPOINTS, LONG, Streams, declared
from tests.support import preloaded

CHAT, OTHER = declared(*CHECKPOINTS)["models"]


class Mount:
    """A directory as the kubelet mounts a ConfigMap: each file is a link into `..data`, a link to the version that
    holds, which is replaced by renaming another one over it."""

    def __init__(self, directory: Path, **files: str) -> None:
        self.directory = directory
        self._numbers = itertools.count(1)
        directory.mkdir()
        self.put(**files)
        for name in files:
            (directory / f"{name}.yaml").symlink_to(f"..data/{name}.yaml")

    def put(self, **files: str) -> None:
        data, new = self.directory / "..data", self.directory / "..data_tmp"
        before = data.resolve() if data.exists() else None
        version = self.directory / f"..version_{next(self._numbers)}"
        version.mkdir()
        for name, text in files.items():
            (version / f"{name}.yaml").write_text(text)
        new.symlink_to(version.name)
        os.rename(new, data)
        if before is not None:
            shutil.rmtree(before)


def files(*models: dict[str, Any], **changes: Any) -> dict[str, str]:
    """The fleet file, and the file with the other models that it includes."""
    fleet = {**declared(*CHECKPOINTS), "include": "more.yaml", "models": [CHAT], **changes}
    return {"fleet": yaml.safe_dump(fleet), "more": yaml.safe_dump({"models": list(models)})}


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Mount:
    return Mount(tmp_path_factory.mktemp("watch") / "mount", **files())


@pytest.fixture(scope="module")
def fleet(mount: Mount) -> Iterator[Fleet]:
    with running(mount.directory / "fleet.yaml", start=preloaded.start, options=["--watch"]) as deployed:
        yield deployed


def unfollowed(fleet: Fleet) -> str:
    return str(fleet.get("/fleet").json()["unfollowed"] or "")


def served(fleet: Fleet) -> set[str]:
    """The models, and the versions of those that were replaced."""
    return set(fleet.get("/health").json()["models"])


def applied(mount: Mount) -> int:
    """How often the file was followed with some change, to its end."""
    return (mount.directory / "deploy.log").read_text().count(" made\n")


async def test_a_swapped_config_map_is_applied_under_load(fleet: Fleet, mount: Mount) -> None:
    async with fleet.async_client() as client, Streams.open(fleet) as streams:
        old = (await stream_chat(client, "chat", LONG))["text"]
        await until(lambda: streams.asked(0), "an answer of each stream")
        # A model more, in the included file.
        mount.put(**files(OTHER))
        await until(lambda: applied(mount) == 1, "another model served by every gateway")
        new = (await stream_chat(client, "other", LONG))["text"]
        assert new != old
        # The checkpoint of the model that is asked for.
        mount.put(**files(OTHER, models=[{**CHAT, "path": OTHER["path"]}]))
        await until(lambda: applied(mount) == 2, "the new checkpoint served by every gateway")
        streams.generation = 1
        await until(lambda: streams.asked(1), "an answer of each stream after the change")
        assert {text for answers in streams.answers for asked, text in answers if asked == 1} == {new}
        # The model less that was added.
        mount.put(**files(models=[{**CHAT, "path": OTHER["path"]}]))
        await until(lambda: applied(mount) == 3, "one model less")
        assert "other" not in served(fleet)
    assert {text for answers in streams.answers for _, text in answers} <= {old, new}
    await until(lambda: unfollowed(fleet) == "", "the file followed")


async def test_a_broken_file_changes_nothing_and_is_said(fleet: Fleet, mount: Mount) -> None:
    present = {**CHAT, "path": OTHER["path"]}
    before = served(fleet)
    async with Streams.open(fleet) as streams:
        mount.put(**(files(OTHER) | {"more": "models:\n  - name: other\n    pat: x\n"}))
        mistake = f"{mount.directory}/more.yaml:3: models[0].pat: unknown key"
        await until(lambda: mistake in unfollowed(fleet), "the mistake in the status")
        await until(lambda: streams.asked(0), "an answer of each stream")
        shown = command(fleet, "status", "--url", fleet.url)
        assert mistake in shown.stdout
        await until(lambda: "muxserve_file_unfollowed 1.0" in fleet.get("/metrics").text, "the mistake in the metrics")
        assert mistake in (mount.directory / "deploy.log").read_text()
        assert served(fleet) == before
        # What needs a start is not made, and said as well.
        mount.put(**files(models=[present], kv_pool={"size": "96MiB"}))
        await until(lambda: "! kv_pool.size: 64 MiB -> 96 MiB" in unfollowed(fleet), "what needs a start")
        mount.put(**files(models=[present]))
        await until(lambda: unfollowed(fleet) == "", "the file followed again")
    await until(lambda: "muxserve_file_unfollowed 0.0" in fleet.get("/metrics").text, "no mistake in the metrics")


async def test_a_file_removed_and_put_back_is_no_change(fleet: Fleet, mount: Mount) -> None:
    link = mount.directory / "more.yaml"
    target, before = os.readlink(link), served(fleet)
    link.unlink()
    await until(lambda: "more.yaml: there is no such file" in unfollowed(fleet), "a missing file in the status")
    link.symlink_to(target)
    await until(lambda: unfollowed(fleet) == "", "the file followed again")
    assert served(fleet) == before


async def test_a_checkpoint_that_comes_later_is_served_without_a_change_of_the_file(fleet: Fleet, mount: Mount) -> None:
    present, late = {**CHAT, "path": OTHER["path"]}, mount.directory.parent / "late"
    mount.put(**files({**OTHER, "path": str(late)}, models=[present]))
    await until(lambda: f"{late} does not exist" in unfollowed(fleet), "the missing checkpoint in the status")
    await until(lambda: "fleet.yaml is tried again at " in unfollowed(fleet), "the next try in the status")
    assert "muxserve_file_unfollowed 1.0" in fleet.get("/metrics").text
    assert "other" not in served(fleet)
    late.symlink_to(OTHER["path"])
    await until(lambda: "other" in served(fleet), "the model served")
    await until(lambda: unfollowed(fleet) == "", "the file followed")
    async with fleet.async_client() as client:
        assert (await stream_chat(client, "other", LONG))["text"]
    mount.put(**files(models=[present]))
    await until(lambda: "other" not in served(fleet), "one model less")
