"""The comparison of samplers, over samplers of plain torch that do as they should, or not."""

from __future__ import annotations

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from muxserve.probes.sampler import Sampler, SamplerBatch, SamplerComparison, compare

BATCHES = (SamplerBatch(1, 50), SamplerBatch(64, 30))


def draw(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    left = apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
    return torch.multinomial(left.softmax(-1), 1).view(-1)


def compared(sample: Sampler) -> SamplerComparison:
    return compare(sample, BATCHES, 2000, "cpu")


def test_a_sampler_that_does_the_same() -> None:
    found = compared(draw)
    assert (found.outside, found.draws) == (0, 3 * (50 + 64 * 30))
    assert found.difference < 0.03


def test_one_that_leaves_other_tokens_is_seen() -> None:
    assert compared(lambda logits, k, p: draw(logits, None, p)).outside > 100
    assert compared(lambda logits, k, p: draw(logits, k, None)).outside > 100


def test_one_that_has_other_probabilities_is_seen() -> None:
    found = compared(lambda logits, k, p: draw(logits, k, p if k is None else None if p is None else p + 0.15))
    assert found.outside > 100
    greedy = compared(lambda logits, k, p: logits.argmax(-1))
    assert (greedy.outside, greedy.difference > 0.3) == (0, True)
    flat = compared(lambda logits, k, p: draw(apply_top_k_top_p_pytorch(logits, k, p, True) * 0.7, None, None))
    assert (flat.outside, flat.difference > 0.03) == (0, True)


def test_one_that_answers_for_another_row_is_seen() -> None:
    assert compared(lambda logits, k, p: draw(logits, k, p).roll(1)).outside > 1000
