"""vLLM's n-gram speculation in engines that are forked from a process with the model loaded.

The engine looks in a request's own tokens for the last few of them, and proposes what followed there; the next step
computes the proposals, and keeps those that the model would have sampled.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import vllm.v1.sample.rejection_sampler as rejection_sampler
import vllm.v1.worker.gpu_model_runner as gpu_model_runner
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import LogitsProcessors


def prepare() -> None:
    """To be called before a model runner with speculation is made; what is compiled then serves all forked engines.

    vLLM searches with a pool of threads, which would not live on in a forked process, although it gives it one thread.
    """
    # Not above: vLLM looks through the modules that are there when it registers its kernels, and fails over numba's.
    import numba
    import vllm.v1.spec_decode.ngram_proposer as proposer

    if proposer.get_num_threads is _one:
        return
    proposer.batch_propose_numba = numba.njit(cache=True)(proposer.batch_propose_numba.py_func)
    proposer.get_num_threads, proposer.set_num_threads = _one, _nothing
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    build = gpu_model_runner.build_logitsprocs

    def build_all(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> LogitsProcessors:
        # With speculation vLLM makes none for min_p and logit_bias. Here requests with these get no proposals.
        plain = copy.copy(vllm_config)
        plain.speculative_config = None
        return build(plain, *args, **kwargs)

    gpu_model_runner.build_logitsprocs = build_all


def compile_search(drafter: Any) -> None:
    """Search once, so that no engine's first step waits for the compiler. vLLM's own try searches nothing."""
    tokens = np.zeros((1, drafter.max_model_len), dtype=np.int32)
    drafter.propose(drafter.k, [[0]], np.array([4], dtype=np.int32), tokens)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """vLLM's function of that name, whose kernel for CPUs leaves what it returns as it was, unless that has 64-bit
    integers.

    Args:
        x: [requests].
        cu_num_tokens: [requests], the tokens of each request and all before it.

    Returns:
        [num_tokens], the value of each token's request; `replace_to` for `replace_from`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return expanded.masked_fill_(expanded == replace_from, replace_to)


def _one() -> int:
    return 1


def _nothing(threads: int) -> None:
    pass
