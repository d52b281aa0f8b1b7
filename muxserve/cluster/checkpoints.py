"""Where a model's checkpoint is: a local directory, or the hub's cache, filled on demand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from muxserve.config import Model
from muxserve.costs.architecture import ModelArchitecture, UnsupportedModelError, read_architecture


class CheckpointError(Exception):
    """The checkpoint cannot be had or read; the message says why."""


class Hub(Protocol):
    """What we need of a model hub."""

    def config(self, repo: str, revision: str | None) -> Path:
        """A local config.json of the repository."""

    def snapshot(self, repo: str, revision: str | None) -> Path:
        """A local directory with the whole checkpoint."""


class HuggingFaceHub:
    """The Hugging Face hub, through its own library and cache."""

    def config(self, repo: str, revision: str | None) -> Path:
        """See `Hub.config`."""
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(repo, "config.json", revision=revision))
        except Exception as error:
            raise CheckpointError(_hub_error(repo, error)) from None

    def snapshot(self, repo: str, revision: str | None) -> Path:
        """See `Hub.snapshot`."""
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(repo, revision=revision, ignore_patterns=["*.pth", "original/*", "*.gguf"]))
        except Exception as error:
            raise CheckpointError(_hub_error(repo, error)) from None


def architecture_of(model: Model, hub: Hub) -> ModelArchitecture:
    """The architecture of a model, from its config.json.

    Raises:
        CheckpointError: there is no readable config.json, or the model cannot be served; with the reason.
    """
    file = Path(model.path) / "config.json" if model.path else hub.config(model.hub or "", model.revision)
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    overrides = model.engine_args.get("hf_overrides")
    try:
        return read_architecture({**config, **overrides} if isinstance(overrides, dict) else config)
    except UnsupportedModelError as error:
        raise CheckpointError(f"cannot be served: {error}") from None


_HUB_ERRORS = {
    "GatedRepoError": "access to it must be asked for on its page, and HF_TOKEN must be set",
    "RepositoryNotFoundError": "there is no such repository, or it is private and HF_TOKEN is not set",
    "RevisionNotFoundError": "it has no such revision",
    "EntryNotFoundError": "it has no config.json",
    "RemoteEntryNotFoundError": "it has no config.json",
    "LocalEntryNotFoundError": "it is not in the local cache, and the hub cannot be reached",
}


def _hub_error(repo: str, error: Exception) -> str:
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"cannot get {repo} from the hub: {_HUB_ERRORS.get(type(error).__name__, words)}"
