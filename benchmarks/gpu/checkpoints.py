"""Checkpoints without weights for benchmarks: a shape from configs/gpu and a tokenizer; vLLM makes the weights up."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "configs/gpu"
_TOKENIZER = ROOT / "configs/models/atlas"

# What one H200 carries: one large model, two middle ones, four small ones, most popular first.
FLEET = {
    "small-1": "llama-1b",
    "large": "llama-8b",
    "small-2": "llama-1b",
    "middle-1": "llama-3b",
    "small-3": "llama-1b",
    "middle-2": "llama-3b",
    "small-4": "llama-1b",
}


def make(folder: Path, name: str, shape: str) -> Path:
    """A directory that `load_format: dummy` can load."""
    path = folder / name
    path.mkdir(parents=True)
    shutil.copy(SHAPES / f"{shape}.json", path / "config.json")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(_TOKENIZER / file, path / file)
    return path
