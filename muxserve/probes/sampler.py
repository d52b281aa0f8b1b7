"""A sampler of tokens beside plain torch: on the same logits both must choose among the same tokens, equally often.

Samplers draw at random, so that their tokens differ. What is compared is which tokens they leave, and how often each
comes. The logits are made such that rounding moves no token across a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Logits [rows, vocabulary], top-k and top-p of each row or None; the answer is a token for each row.
Sampler = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]

# Tokens of a row that are likely, each half as much as the one before; all others together have 1e-4 or so.
_LIKELY = 8
_UNLIKELY = 22.0
# None of these limits lies nearer than 1 % to where a token more or less would be left.
_LIMITS: Sequence[tuple[int | None, float | None]] = ((3, None), (None, 0.9), (5, 0.8))


@dataclass(frozen=True)
class SamplerBatch:
    """Each of `calls` calls samples `rows` rows."""

    rows: int
    calls: int


# One row of a large vocabulary is shared by many SMs, which wait for each other. Decodes have large batches.
BATCHES = (SamplerBatch(1, 100), SamplerBatch(64, 100), SamplerBatch(256, 20))
VOCABULARY = 151_936


@dataclass(frozen=True)
class SamplerComparison:
    """`outside` of `draws` tokens are none that torch leaves; `difference` is the largest one between the share that a
    token had in the draws of a case and its probability."""

    outside: int
    difference: float
    draws: int


def compare(
    sample: Sampler, batches: Sequence[SamplerBatch] = BATCHES, vocabulary: int = VOCABULARY, device: str = "cuda"
) -> SamplerComparison:
    """Sample under top-k, top-p and both, and see what comes.

    Args:
        sample: draws with torch's default generator, if it draws.
    """
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    outside, difference, draws = 0, 0.0, 0
    for k, p in _LIMITS:
        count = torch.zeros(_LIKELY)
        for batch in batches:
            places = torch.stack([torch.randperm(vocabulary, generator=generator)[:_LIKELY] for _ in range(batch.rows)])
            logits = _logits(places, vocabulary, generator).to(device)
            limits = _limits(k, p, batch.rows, device)
            for _ in range(batch.calls):
                # A sampler may write into the logits.
                tokens = sample(logits.clone(), *limits).cpu().view(-1, 1)
                count += (tokens == places).sum(0)
            draws += batch.rows * batch.calls
        expected = _expected(k, p)
        drawn = sum(batch.rows * batch.calls for batch in batches)
        outside += drawn - int(count[expected > 0].sum())
        difference = max(difference, float((count / drawn - expected).abs().max()))
    return SamplerComparison(outside, difference, draws)


def _logits(places: torch.Tensor, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Likely tokens at `places`, in order."""
    logits = torch.randn((len(places), vocabulary), generator=generator) * 0.5 - _UNLIKELY
    return logits.scatter_(1, places, _likely().expand(len(places), -1))


def _likely() -> torch.Tensor:
    return torch.arange(_LIKELY) * -torch.tensor(2.0).log()


def _limits(k: int | None, p: float | None, rows: int, device: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (
        None if k is None else torch.full((rows,), k, dtype=torch.int32, device=device),
        None if p is None else torch.full((rows,), p, device=device),
    )


def _expected(k: int | None, p: float | None) -> torch.Tensor:
    """The probabilities of the likely tokens by vLLM's sampler of torch."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(_likely().view(1, -1), *_limits(k, p, 1, "cpu")).softmax(-1)[0]
