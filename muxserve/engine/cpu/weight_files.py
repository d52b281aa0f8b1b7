"""Safetensors files that give back what has been read of them.

vLLM maps a checkpoint's file and copies one tensor after the other out of it. The pages that were read stay mapped
until the whole file has been read, so that a model's weights count twice while it is loaded. Here the file is mapped
anew after every `WINDOW_BYTES`: what was mapped before goes with the last tensor of it that somebody has.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import vllm.model_executor.model_loader.weight_utils as weight_utils
from safetensors import safe_open

WINDOW_BYTES = 32 << 20


class WindowedFile:
    """What `safetensors.safe_open` answers, for who reads a file's tensors once."""

    def __init__(self, filename: str, framework: str) -> None:
        self._opened = (filename, framework)
        self._stack = ExitStack()
        self._read = 0

    def __enter__(self) -> WindowedFile:
        self._file: Any = self._stack.enter_context(safe_open(*self._opened))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._file.keys())

    def metadata(self) -> dict[str, str] | None:
        """The file's own words about itself."""
        found: dict[str, str] | None = self._file.metadata()
        return found

    def get_tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name."""
        if self._read >= WINDOW_BYTES:
            self._stack.close()
            self._file, self._read = self._stack.enter_context(safe_open(*self._opened)), 0
        tensor: torch.Tensor = self._file.get_tensor(name)
        self._read += tensor.nbytes
        return tensor


def register() -> None:
    """Have vLLM's loaders read checkpoints so."""
    weight_utils.safe_open = WindowedFile
