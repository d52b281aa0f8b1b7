"""Models by the names that people know, for plans without a checkpoint: ours, those whose config.json comes with the
kernel tables (`muxserve[plan]`), and the hub's."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from muxserve.config.checkpoint_files import CheckpointError
from muxserve.config.problems import closest
from muxserve.costs.architecture import ModelArchitecture, UnsupportedModelError, read_architecture
from muxserve.costs.kernels import PACKAGE, package_version
from muxserve.costs.language_models import language_model
from muxserve.planning.demand.checkpoints import Hub, read_config

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# Parts of names that say what a model was trained for, and not what it is made of.
_TRAINED_FOR = re.compile(r"-(instruct|it|chat|hf|base|thinking)(?=-|$)")


def _dense(
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    intermediate: int,
    vocab: int,
    max_len: int,
    dtype: str = "bfloat16",
    head_dim: int = 128,
) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "dtype": dtype,
        "head_dim": head_dim,
    }


# As in the config.json of each model's public checkpoint.
BUILT_IN: dict[str, dict[str, object]] = {
    "llama-7b": _dense(32, 32, 32, 4096, 11008, 32000, 2048, "float16"),
    "llama-13b": _dense(40, 40, 40, 5120, 13824, 32000, 2048, "float16"),
    "llama-30b": _dense(60, 52, 52, 6656, 17920, 32000, 2048, "float16"),
    "llama-65b": _dense(80, 64, 64, 8192, 22016, 32000, 2048, "float16"),
    "llama-2-7b": _dense(32, 32, 32, 4096, 11008, 32000, 4096, "float16"),
    "llama-2-13b": _dense(40, 40, 40, 5120, 13824, 32000, 4096, "float16"),
    "llama-2-70b": _dense(80, 64, 8, 8192, 28672, 32000, 4096, "float16"),
    "llama-3.1-8b": _dense(32, 32, 8, 4096, 14336, 128256, 131072),
    "llama-3.1-70b": _dense(80, 64, 8, 8192, 28672, 128256, 131072),
    "qwen2.5-7b": _dense(28, 28, 4, 3584, 18944, 152064, 32768),
    "qwen2.5-14b": _dense(48, 40, 8, 5120, 13824, 152064, 32768),
    "qwen2.5-32b": _dense(64, 40, 8, 5120, 27648, 152064, 32768),
    "qwen2.5-72b": _dense(80, 64, 8, 8192, 29568, 152064, 32768),
}


def planned_architecture(value: str, base: Path, hubs: Sequence[Hub] = ()) -> ModelArchitecture:
    """The architecture that a fleet file's `architecture` names: a config.json (or the directory that holds one)
    relative to `base`; a name that is known here, whoever published it and whatever it was trained for; or a repository
    of the first of `hubs` that has it.

    Raises:
        ValueError: none of these; the message says what is known.
    """
    file = base / Path(value).expanduser()
    if file.is_dir():
        file = file / "config.json"
    try:
        config = read_config(file) if file.is_file() else known_config(value) or _of_hubs(value, hubs)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    try:
        return replace(read_architecture(language_model(config) or config), config=json.dumps(config))
    except UnsupportedModelError as error:
        raise ValueError(f"cannot be served: {error}") from None


def known_config(name: str) -> dict[str, object] | None:
    """The config.json of the model of that name, of those that are known without asking a hub; None if it is not."""
    plain = _plain(name)
    if plain in BUILT_IN:
        return {"architectures": [plain], **BUILT_IN[plain]}
    files = _published()
    file = files.get(name.strip().lower()) or next((f for each, f in files.items() if _plain(each) == plain), None)
    return None if file is None else read_config(file)


def known_names() -> Iterator[tuple[str, str]]:
    """The names of all models that are known without asking a hub, and where each is from."""
    for name in BUILT_IN:
        yield name, "muxserve"
    for file in _published().values():
        yield _name_of(file), f"{PACKAGE} {package_version()}"


def _plain(name: str) -> str:
    """A model's name in lower case, without who published it and what it was trained for."""
    return _TRAINED_FOR.sub("", name.strip().lower().replace("_", "-").rpartition("/")[2].removeprefix("meta-"))


def _name_of(file: Path) -> str:
    return file.name.removesuffix("_config.json").replace("--", "/", 1)


def _published() -> dict[str, Path]:
    """The config.json files that come with the kernel tables, by the lower-case name of each repository."""
    return _files(package_version())


@cache
def _files(version: str) -> dict[str, Path]:
    found = importlib.util.find_spec("aiconfigurator_core") if version else None
    folders = [Path(each) for each in found.submodule_search_locations or ()] if found is not None else []
    files = [file for folder in folders for file in sorted(folder.glob("model_configs/*_config.json"))]
    return {_name_of(file).lower(): file for file in files if not file.name.endswith("_hf_quant_config.json")}


def _of_hubs(name: str, hubs: Sequence[Hub]) -> dict[str, object]:
    error = ""
    if _REPOSITORY.fullmatch(name):
        for hub in hubs:
            try:
                return read_config(hub.config(name, None))
            except CheckpointError as why:
                error = f"; {why}"
    near = closest(_plain(name), BUILT_IN)
    hint = f'; did you mean "{near}"?' if near is not None else "; `muxserve plan --list models` has the known names"
    raise ValueError(f"{name!r} is neither a config.json nor a known model{error}{'' if error else hint}")
