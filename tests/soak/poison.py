"""A logits processor that obeys whoever asks it to break the step: `vllm_xargs: {"poison": HOW, "poison_at": N}`."""

from __future__ import annotations

import os
import signal
import time

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class Poison(AdapterLogitsProcessor):
    """In the step that samples output token N (0) it raises, kills the engine's process, or hangs.

    Requests that do not ask for it are left alone.
    """

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        extra = params.extra_args or {}
        how, at = extra.get("poison"), int(extra.get("poison_at", 0))
        if how is None:
            return None

        def poison(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) < at:
                return logits
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                time.sleep(3600)
            raise RuntimeError(f"poisoned at output token {at}")

        return poison
