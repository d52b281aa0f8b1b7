"""A hub that cannot be reached is asked once, and then only its cache."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from muxserve.planning.demand import hub_reach
from muxserve.planning.demand.checkpoints import CheckpointError, HuggingFaceHub
from muxserve.planning.demand.hub_reach import HubReach


def test_what_was_found_holds_for_a_while() -> None:
    asked: list[float] = []
    clock = [0.0]

    def asks() -> bool:
        asked.append(clock[0])
        return clock[0] > 0

    reaches = HubReach(asks, lambda: clock[0])
    assert [reaches(), reaches()] == [False, False]
    clock[0] = hub_reach.KEPT_SECONDS + 1
    assert [reaches(), reaches()] == [True, True]
    assert asked == [0.0, clock[0]]


def test_one_that_takes_connections_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(hub_reach, "SILENT_SECONDS", 0.01)
        with caplog.at_level(logging.WARNING):
            assert not hub_reach.ask(0.1)
    assert caplog.messages == [
        f"waiting for 127.0.0.1:{port}, up to 0.1 s",
        f"127.0.0.1:{port} does not answer; checkpoints are taken from the local cache",
    ]


def test_nobody_is_asked_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert not hub_reach.ask()


@pytest.mark.parametrize("reaches", [True, False])
def test_what_cannot_be_reached_is_looked_for_in_the_cache(
    reaches: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cached: list[bool] = []

    def download(*arguments: str, local_files_only: bool = False, dry_run: bool = False, **more: Any) -> object:
        if dry_run:
            return []
        cached.append(local_files_only)
        return str(tmp_path)

    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, download)
    hub = HuggingFaceHub(reaches=lambda: reaches)
    assert hub.config("org/a", None) == hub.snapshot("org/a", None) == tmp_path
    assert cached == [not reaches] * 3


def test_what_is_not_in_the_cache_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub = HuggingFaceHub(reaches=lambda: False)
    for ask in (hub.config, hub.snapshot):
        with pytest.raises(CheckpointError, match="it is not in the local cache, and the hub cannot be reached"):
            ask("org/a", None)
