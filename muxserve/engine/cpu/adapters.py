"""LoRA on vLLM's CPU operations, for steps in which some sequences have an adapter and others have none."""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform


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
