"""What Python imports first in an environment of stand-ins (`stand_ins.py` copies it there). It changes vLLM's modules
that go by numbers which are computed on the GPU and read back: here nothing is computed. Probes get more time.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def without_trial(module: Any) -> None:
    """vLLM tries the kernels of gated delta nets when it measures memory. As many chunks as a number says that was
    never computed would not fit into any memory."""
    module.QwenGatedDeltaNetAttention._warmup_prefill_kernels = lambda *_: None


def with_tokens(module: Any) -> None:
    """vLLM's second runner counts on the GPU whether a request has a token in this step: when its prompt is through."""
    import torch

    stock = module.Sampler.__call__

    def sample(self: Any, logits: Any, batch: Any) -> Any:
        output = stock(self, logits, batch)
        through = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        output.num_sampled = torch.from_numpy(through.astype("int32")).to(output.num_sampled.device)
        # Filled by a copy: `zero_` would launch a kernel.
        output.sampled_token_ids = torch.zeros_like(output.sampled_token_ids, device="cpu").to(logits.device)
        return output

    module.Sampler.__call__ = sample


def with_time(module: Any) -> None:
    """Kernels of probes are compiled on cores that other tests use."""
    module.LIMIT *= 10


CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": without_trial,
    "vllm.v1.worker.gpu.sample.sampler": with_tokens,
    "muxserve.probes.lab": with_time,
}


class Finder(MetaPathFinder):
    """Finds those modules where others do, and changes them when they are there."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            found.loader = Changed(found.loader, change)
        return found


class Changed(Loader):
    def __init__(self, loader: Loader, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


sys.meta_path.insert(0, Finder())
