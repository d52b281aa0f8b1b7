"""Which multi-modal models are served with images, and why the others are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from muxserve.config import Model
from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.language_models import has_encoder
from muxserve.planning.demand.private import private_because
from muxserve.vllm.multi_modal import ServedWhole, served_whole


def may_be_whole(model: Model, architecture: ModelArchitecture, config: Mapping[str, object]) -> bool:
    """Whether vLLM itself is to say if the model takes images: it has a cache of its own, and generates text."""
    if architecture.pooling or architecture.sees_images or model.engine_args.get("language_model_only"):
        return False
    return has_encoder(config) and bool(private_because(model, architecture))


def served_here(model: Model, directory: Path) -> ServedWhole:
    """How the vLLM that is installed here serves the checkpoint in `directory`."""
    return served_whole(directory, json.dumps(model.engine_args))


def about_images(model: Model, architecture: ModelArchitecture, on_gpus: bool) -> str:
    """A note for the user of a model that is served without its images; empty for all others."""
    config = json.loads(architecture.config or "{}")
    if architecture.sees_images or architecture.pooling or not has_encoder(config):
        return ""
    if model.engine_args.get("language_model_only"):
        return ""
    if not private_because(model, architecture):
        where = "" if on_gpus else ", where vLLM can import what that needs"
        return f"{model.name} is served as text, from the pool; with `kv: private` it takes images, too{where}"
    why = "vLLM cannot import here what they need"
    if model.path is not None:
        why = served_here(model, Path(model.path)).why
    return f"{model.name} is served as text, without images: {why}"
