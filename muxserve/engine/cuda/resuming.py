"""Seeded generators of requests on GPUs: as they are after so many tokens, and after chunks of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from muxserve.engine.runner import ResumingRunner

# vLLM winds a generator back by this when it throws a sampled token away.
_STOCK_REWIND = 4


class ResumingOnDevice(ResumingRunner):
    """Mixed in before vLLM's runner for GPUs."""

    _offset_per_token: int | None = None

    def _generator_after(self, params: SamplingParams, tokens: int) -> torch.Generator:
        assert params.seed is not None
        generator = torch.Generator(device=self.device)
        generator.manual_seed(params.seed)
        generator.set_offset(tokens * self.offset_per_token())
        return generator

    def offset_per_token(self) -> int:
        """How far one sampled token moves a request's generator.

        vLLM draws one exponential variate for each entry of the vocabulary. Philox counts what a thread draws, and how
        many variates a thread draws follows from the number of threads, so from the multiprocessors that this process
        sees: 4 in most cases, more for a large vocabulary on a small share of SMs. Hence it is tried out.
        """
        if self._offset_per_token is None:
            generator = torch.Generator(device=self.device)
            generator.manual_seed(0)
            noise = torch.empty(self.model_config.get_vocab_size(), dtype=torch.float32, device=self.device)
            noise.exponential_(generator=generator)
            self._offset_per_token = int(generator.get_offset())
        return self._offset_per_token

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # A prompt chunk before the last samples a token that is thrown away; vLLM winds the generator back by a fixed
        # count, which is not always what was drawn.
        generators = self.input_batch.generators
        if generators and self.offset_per_token() != _STOCK_REWIND:
            discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
            for index in discarded.tolist():
                generator = generators.get(index)
                if generator is not None:
                    generator.set_offset(generator.get_offset() - self.offset_per_token() + _STOCK_REWIND)
        return super()._bookkeeping_sync(*args, **kwargs)
