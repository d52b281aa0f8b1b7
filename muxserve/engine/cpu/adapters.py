"""LoRA on vLLM's CPU operations, for steps in which some sequences have an adapter and others have none; and adapters
that are loaded from the files that their requests mean.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.platforms.cpu import CpuPlatform

from muxserve.vllm.file_identity import adapter_number


class MaskedPunica(PunicaWrapperCPU):
    """vLLM marks tokens without an adapter with -1, which its PyTorch operations take for the last slot: such a
    sequence got the adapter that lies there. Here what goes into an adapter is zero for those tokens, so that nothing
    comes out of it."""

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_linear(y, _masked(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_embedding(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_embedding(y, _masked(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return super().add_lora_logits(y, _masked(x, self.sampler_indices), *args, **kwargs)


def _masked(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, width] with zeros in the rows whose index [tokens] is negative."""
    rows = x.view(-1, x.shape[-1])
    return torch.where((indices[: len(rows)] < 0)[:, None], 0.0, rows).view_as(x)


def register() -> None:
    """Have vLLM's CPU platform use it."""
    name = f"{__name__}.{MaskedPunica.__name__}"
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: name)


class OtherAdapterError(RuntimeError):
    """The files of an adapter are not those that a request was meant for."""


def check_files(manager: WorkerLoRAManager, copied: bool) -> None:
    """Have `manager` load an adapter only from the files that it is known by.

    An adapter that was evicted is loaded again when the next request brings it. Had its files been overwritten, that
    request would be computed with new weights on the KV of the earlier ones.

    Args:
        copied: engines of other machines have files of their own, of which gateways know nothing; they are to be the
            same for as long as this engine knows the adapter.
    """
    load = manager._load_adapter
    seen: dict[int, int] = {}

    def load_checked(lora_request: LoRARequest) -> LoRAModel:
        name = lora_request.lora_name.rpartition("#")[0]
        before = adapter_number(name, lora_request.lora_path)
        expected = seen.setdefault(lora_request.lora_int_id, before) if copied else lora_request.lora_int_id
        adapter = load(lora_request) if before == expected else None
        if adapter is None or adapter_number(name, lora_request.lora_path) != expected:
            raise OtherAdapterError(f"the files of the adapter {name!r} in {lora_request.lora_path} were overwritten")
        return adapter

    manager._load_adapter = load_checked
