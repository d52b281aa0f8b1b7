"""Seeded generators of requests on CPU: as they are after so many tokens, and after chunks of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from muxserve.engine.runner import ResumingRunner


class ResumingOnHost(ResumingRunner):
    """Mixed in before vLLM's runner for CPU."""

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any):
        # A prompt chunk before the last samples a token that is thrown away. vLLM then winds the request's generator
        # back by its CUDA offset, which a CPU generator does not have (stock vLLM on CPU fails there).
        batch = self.input_batch
        discarded = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]
        rewound = [index for index in discarded.tolist() if batch.generators.pop(index, None) is not None]
        result = super()._bookkeeping_sync(*args, **kwargs)
        for index in rewound:
            state = self.requests[batch.req_ids[index]]
            state.generator = self._generator_after(state.sampling_params, len(state.output_token_ids))
            batch.generators[index] = state.generator
        return result

    def _generator_after(self, params: SamplingParams, tokens: int) -> torch.Generator:
        generator = torch.Generator(device=self.device)
        generator.manual_seed(params.seed)
        # vLLM's CPU sampler draws one integer per sampled token.
        for _ in range(tokens):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return generator
