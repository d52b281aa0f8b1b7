"""A logits processor for tests: it fails at the token that a request names, in the way that it names.

A request asks for it with `vllm_xargs: {"poison": "raise", "poison_at": 5}`; ways are `raise`, `abort` (SIGABRT) and
`kill` (SIGKILL).
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.support.poison import WORDS


class Poison(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        asked = params.extra_args or {}
        if "poison" not in asked:
            return None
        way, at = str(asked["poison"]), int(asked.get("poison_at", 0))

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) >= at:
                if way == "raise":
                    raise ValueError(WORDS)
                os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGABRT)
            return logits

        return process
