"""Directories that look like checkpoints: whole as far as files can be looked at, with nothing in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_safetensors(file: Path, tensors: Mapping[str, tuple[str, list[int], int]] | None = None) -> None:
    """A file of zeros: tensors by name with type, shape and bytes."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape, size) in (tensors or {}).items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_checkpoint(directory: Path, config: Mapping[str, object] | None = None) -> Path:
    """A checkpoint with that config.json; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {}))
    write_files(directory)
    return directory


def write_files(directory: Path) -> None:
    """What a checkpoint has beside its config.json."""
    (directory / "tokenizer.json").write_text("{}")
    write_safetensors(directory / "model.safetensors")
