"""Where a model's architecture comes from: a local checkpoint, the hub's cache (filled on demand), a config.json, or a
name that is built in, for plans without a checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from muxserve.config import Fleet, FleetError, Model
from muxserve.config.checkpoint_files import (
    CheckpointError,
    check_directory,
    read_json,
    read_json_list,
    safetensors_files,
    tensors_of,
)
from muxserve.config.checks import KV_CACHE_TYPES, lacks_weights
from muxserve.config.problems import closest, shown
from muxserve.costs.architecture import (
    ENCODER_NOTE,
    ModelArchitecture,
    StoredWeights,
    UnsupportedModelError,
    read_architecture,
)
from muxserve.costs.language_models import is_of_language_model, language_model
from muxserve.planning.demand.downloads import OnBytes, check_room, following, missing_bytes
from muxserve.planning.demand.hub_reach import reachable
from muxserve.planning.demand.images import may_be_whole, served_here
from muxserve.vllm.known import unknown
from muxserve.vllm.multi_modal import ServedWhole
from muxserve.vllm.pin import VLLM_VERSION

# What is read of a checkpoint for engines that only pretend.
_NO_WEIGHTS = {"load_format": "dummy"}


class Hub(Protocol):
    """What we need of a model hub."""

    def config(self, repo: str, revision: str | None) -> Path:
        """A local config.json of the repository."""

    def snapshot(self, repo: str, revision: str | None) -> Path:
        """A local directory with the whole checkpoint."""


class HuggingFaceHub:
    """The Hugging Face hub, through its own library and cache; without `weights`, all else of checkpoints.

    Where it cannot be reached, as `reaches` says, only the cache is looked at. `on_bytes` is called during downloads.
    """

    def __init__(
        self, weights: bool = True, reaches: Callable[[], bool] = reachable, on_bytes: OnBytes | None = None
    ) -> None:
        self.weights = weights
        self._reaches = reaches
        self._on_bytes = on_bytes

    def config(self, repo: str, revision: str | None) -> Path:
        """See `Hub.config`."""
        from huggingface_hub import hf_hub_download

        cached = not self._reaches()
        with _said_by_us():
            try:
                config = Path(hf_hub_download(repo, "config.json", revision=revision, local_files_only=cached))
            except Exception as error:
                raise CheckpointError(_hub_error(repo, error)) from None
            with contextlib.suppress(Exception):  # beside it, where there is one: see `_pools`
                hf_hub_download(repo, "modules.json", revision=revision, local_files_only=cached)
        return config

    def snapshot(self, repo: str, revision: str | None) -> Path:
        """See `Hub.snapshot`."""
        from huggingface_hub import snapshot_download

        left_out = ["*.pth", "original/*", "*.gguf", *([] if self.weights else ["*.safetensors", "*.bin", "*.pt"])]
        cached = not self._reaches()
        try:
            with _said_by_us():
                size = 0 if cached else missing_bytes(repo, revision, left_out)
                check_room(repo, size)
                with following(repo, size, self._on_bytes):
                    found = snapshot_download(
                        repo, revision=revision, ignore_patterns=left_out, local_files_only=cached
                    )
                return Path(found)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(_hub_error(repo, error)) from None


@contextlib.contextmanager
def _said_by_us() -> Iterator[None]:
    """The error says once what goes wrong at the hub; its library does not at each try. Its bars are ours, too."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    library = logging.getLogger("huggingface_hub")
    level, had_bars = library.level, not are_progress_bars_disabled()
    library.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        library.setLevel(level)
        if had_bars:
            enable_progress_bars()


def architecture_of(model: Model, hub: Hub, on_gpus: bool = False) -> ModelArchitecture:
    """The architecture of a model, from its config.json; with what its weights take, where their files are at hand.

    A multi-modal one with a cache of its own is served with images: on a CPU where vLLM can import what it needs for
    that, which is part of vLLM's installations for GPUs.

    Raises:
        CheckpointError: there is no readable config.json, or the model cannot be served; with the reason.
    """
    file = Path(model.path) / "config.json" if model.path else hub.config(model.hub or "", model.revision)
    config = checkpoint = read_config(file)
    whole, text = config, language_model(config)
    config = config if text is None else text
    overrides = model.engine_args.get("hf_overrides")
    if isinstance(overrides, dict) and overrides:
        config |= overrides
        whole = config
    if (unknown := _unknown(model, config)) is not None:
        raise CheckpointError(f"cannot be served: {unknown}")
    try:
        architecture = read_architecture(config, _pools(model, file))
    except UnsupportedModelError as error:
        raise CheckpointError(f"cannot be served: {error}") from None
    if architecture.encoder_decoder:
        why = "an encoder-decoder answers images or sound, and no route of the gateway brings it any"
        raise CheckpointError(f"cannot be served: {architecture.name}: {why}")
    text_only = text is not None
    if may_be_whole(model, architecture, checkpoint):
        found = ServedWhole(images=True) if on_gpus else served_here(model, file.parent)
        if not found.text and not text_only:
            raise CheckpointError(f"cannot be served: {architecture.name} is multi-modal, and {found.why}")
        if found.images:
            estimated = architecture.estimated or ENCODER_NOTE
            architecture = replace(architecture, multi_modal=True, sees_images=True, estimated=estimated)
            text_only = False
    stored = stored_weights(file.parent, text_only)
    kv_cache = kv_cache_of(model) or architecture.kv_cache
    known_by = json.dumps(whole)
    return replace(architecture, stored=stored, kv_cache=kv_cache, text_only=text_only, config=known_by)


def read_config(file: Path) -> dict[str, object]:
    """A config.json, with how ModelOpt quantised the weights, which it said elsewhere before there was a place for it.

    Raises:
        CheckpointError: it cannot be read.
    """
    config = read_json(file)
    separate = file.with_name(file.name.removesuffix("config.json") + "hf_quant_config.json")
    if "quantization_config" not in config and separate.is_file():
        with contextlib.suppress(CheckpointError):
            config["quantization_config"] = {"quant_method": "modelopt", **read_json(separate)}
    return config


def _unknown(model: Model, config: Mapping[str, object]) -> str | None:
    """What the model's config.json names that this vLLM does not know. Code of the checkpoint's own may know it."""
    own_code = model.engine_args.get("trust_remote_code") and "auto_map" in config
    if own_code or model.engine_args.get("config_format", "hf") not in ("hf", "auto"):
        return None
    found = unknown(config)
    if found is None:
        return None
    key, name, known = found
    near = closest(name, known)
    hint = f'; did you mean "{near}"?' if near else ""
    return f"config.json has {key}: {shown(name)}, which this vLLM ({VLLM_VERSION}) does not know{hint}"


def kv_cache_of(model: Model) -> str:
    """The type of the model's KV cache where `engine_args` ask for one, as `ModelArchitecture.kv_cache`."""
    return KV_CACHE_TYPES[str(model.engine_args.get("kv_cache_dtype", "auto"))]


# Types of tensors in safetensors files that vLLM loads in the type that the model is served in.
_CONVERTED = {"F64", "F32", "F16", "BF16"}


def stored_weights(directory: Path, text_only: bool = False) -> StoredWeights | None:
    """What the safetensors files of a checkpoint hold, from their headers; None if some are missing or unreadable. If
    `text_only`, of a multi-modal one the language model."""
    elements = packed = 0
    try:
        for file in safetensors_files(directory):
            for called, tensor in tensors_of(file).items():
                if text_only and not is_of_language_model(called):
                    continue
                begin, end = tensor["data_offsets"]
                if tensor["dtype"] in _CONVERTED:
                    elements += math.prod(tensor["shape"])
                else:
                    packed += end - begin
    except CheckpointError:
        return None
    return StoredWeights(elements, packed) if elements or packed else None


def _pools(model: Model, file: Path) -> bool:
    """Whether the model with that config.json is to be asked for vectors although it may generate text, by the rules of
    vLLM: an option says so, or it was made with Sentence Transformers."""
    runner, convert = (model.engine_args.get(key, "auto") for key in ("runner", "convert"))
    if runner != "auto":
        return runner == "pooling"
    if convert != "auto" and convert != "none":
        return True
    with contextlib.suppress(CheckpointError):
        parts = read_json_list(file.with_name("modules.json"))
        return any("sentence_transformers.models.Pooling" in str(part.get("type")) for part in parts)
    return False


def without_chat_template(model: Model) -> str:
    """A note for the user if a local checkpoint has no chat template, and the fleet file gives none; else empty."""
    directory = Path(model.path or "")
    if model.path is None or not directory.is_dir() or "chat_template" in model.engine_args:
        return ""
    if any(
        (directory / name).exists()
        for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    ):
        return ""
    with contextlib.suppress(CheckpointError):
        if "chat_template" in read_json(directory / "tokenizer_config.json"):
            return ""
    return (
        f"{model.name} has no chat template: completions work, chat is refused; "
        "`engine_args: {chat_template: FILE}` gives it one"
    )


_INSTEAD = "look at the network (HTTPS_PROXY names a proxy), or give a directory with the checkpoint"
_HUB_ERRORS = {
    "GatedRepoError": "access to it must be asked for on its page, and HF_TOKEN must be set",
    "RepositoryNotFoundError": "there is no such repository, or it is private and HF_TOKEN is not set",
    "RevisionNotFoundError": "it has no such revision",
    "EntryNotFoundError": "it has no config.json",
    "RemoteEntryNotFoundError": "it has no config.json",
    "LocalEntryNotFoundError": f"it is not in the local cache, and the hub cannot be reached; {_INSTEAD}",
    "IncompleteSnapshotError": f"a part of it is in the local cache, and the hub cannot be reached; {_INSTEAD}",
}


def _hub_error(repo: str, error: Exception) -> str:
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"cannot get {repo} from the hub: {_HUB_ERRORS.get(type(error).__name__, words)}"


def fetch(fleet: Fleet, progress: Callable[[str], None], hub: Hub | None = None, weights: bool = True) -> Fleet:
    """`fleet` with a local directory for every model; what is on the hub is downloaded into its cache, if wanted
    without `weights`.

    Raises:
        FleetError: a download failed.
    """
    hub = hub or HuggingFaceHub(weights)
    models, problems = [], []
    for model in fleet.models:
        if model.hub is not None:
            progress(f"fetching {model.hub}")
            try:
                directory = hub.snapshot(model.hub, model.revision)
                loads = weights and model.engine_args.get("load_format") is None
                if loads and (lacking := lacks_weights(directory)):
                    raise CheckpointError(f"{model.hub} {lacking}")
                check_directory(directory, model.engine_args if weights else {**model.engine_args, **_NO_WEIGHTS})
                model = model.model_copy(update={"path": str(directory)})
            except CheckpointError as error:
                problems.append(fleet.model_problem(model.name, "hub", str(error)))
        models.append(model)
    if problems:
        raise FleetError(problems)
    return fleet.model_copy(update={"models": models})
