"""A logits processor that throws: `vllm_xargs: {"poison_at": N}` makes the step fail that samples output token N."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class Poison(AdapterLogitsProcessor):
    """Leaves alone whoever does not ask for it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        at = (params.extra_args or {}).get("poison_at")
        if at is None:
            return None

        def throw(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) >= int(at):
                raise RuntimeError(f"poisoned at output token {at}")
            return logits

        return throw
