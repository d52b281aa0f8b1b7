"""What Python imports first in an environment of stand-ins (`stand_ins.py` copies it there).

vLLM tries the kernels of gated delta nets when it measures memory, on numbers that it computes on the GPU and reads
back. Here nothing is computed, and as many chunks as such a number says would not fit into any memory.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"


class Finder(MetaPathFinder):
    """Finds that module where others do, and leaves its trial out."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            found.loader = WithoutTrial(found.loader)
        return found


class WithoutTrial(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.QwenGatedDeltaNetAttention._warmup_prefill_kernels = lambda *_: None


sys.meta_path.insert(0, Finder())
