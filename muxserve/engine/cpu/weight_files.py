"""Files of weights are read ahead, and safetensors files give back what has been read of them.

vLLM maps a checkpoint's file and copies one tensor after the other out of it. The pages that were read stay mapped
until the whole file has been read, so that a model's weights count twice while it is loaded. Here the file is mapped
anew after every `WINDOW_BYTES`: what was mapped before goes with the last tensor of it that somebody has.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import vllm.model_executor.model_loader.weight_utils as weight_utils
from safetensors import safe_open

from muxserve.spec.unit import WEIGHT_FILES

WINDOW_BYTES = 32 << 20
# Kernels read no more for one call than they would read ahead by themselves: by default 128 KiB, often some MiB.
_STEP_BYTES = 128 << 10


def read_ahead(directory: str | Path) -> None:
    """Have the kernel begin to read the weights of the checkpoint there; what is in memory costs next to nothing.
    Returns before they are read. A file that cannot be opened is left out: who loads it says so."""
    found: list[Path] = next((files for each in WEIGHT_FILES if (files := sorted(Path(directory).glob(each)))), [])
    for file in found:
        # What is not read ahead is read later all the same.
        with suppress(OSError), file.open("rb") as opened:
            for offset in range(0, os.fstat(opened.fileno()).st_size, _STEP_BYTES):
                os.posix_fadvise(opened.fileno(), offset, _STEP_BYTES, os.POSIX_FADV_WILLNEED)


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
