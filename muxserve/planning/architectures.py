"""Architectures that can be planned without a checkpoint: built-in names, and config.json files."""

from __future__ import annotations

import json
from pathlib import Path

from muxserve.config.problems import did_you_mean
from muxserve.costs.architecture import ModelArchitecture, UnsupportedModelError, read_architecture


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


def planned_architecture(value: str, base: Path) -> ModelArchitecture:
    """The architecture that a fleet file's `architecture` names: built in, or a config.json (or the directory that
    holds one) relative to `base`.

    Raises:
        ValueError: neither; the message says what is known.
    """
    name = value.strip().lower().replace("_", "-")
    if name in BUILT_IN:
        return read_architecture({"architectures": [name], **BUILT_IN[name]})
    file = base / Path(value).expanduser()
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{value!r} is neither a config.json nor a built-in architecture{did_you_mean(name, BUILT_IN)}"
        )
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a readable config.json: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object")
    try:
        return read_architecture(config)
    except UnsupportedModelError as error:
        raise ValueError(f"cannot be served: {error}") from None
