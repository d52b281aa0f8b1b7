"""Models' own shapes with the SMs that their engines would have: attention and matrix products against plain ones.

Kernels are chosen by heads, sizes, and the number of SMs that a process sees. So one can be wrong for one model with
70 % of the SMs and right for all others, and for that one with all of them.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import torch

from muxserve.probes.attention import DEVICE, AttentionBatch, FoldedAttention
from muxserve.probes.shape import AttentionShape

BLOCK = 16
# Rows of a product: a decode step, small ones, a prompt, a prefill step.
_ROWS = (1, 24, 111, 512)
# Rows of attention in a prefill step: more tiles than any GPU has SMs, so that some of them belong to a second wave.
_ROWS_OF_PREFILL = 160
_DECODE = AttentionBatch(contexts=(130, 1, 64, 300), new=(1, 1, 1, 1))


class ShapeError(msgspec.Struct, frozen=True):
    """Largest errors of a shape, each as a part of the largest value."""

    attention: float
    products: float


def errors_of(shape: AttentionShape, device: str = DEVICE, dtype: torch.dtype = torch.bfloat16) -> ShapeError:
    """How far attention and products of a shape are from those in float32 on the host's numbers."""
    attention = 0.0
    for batch in (_prefill(shape.kv_heads), _DECODE):
        folded = FoldedAttention(shape.heads, shape.kv_heads, shape.dim, BLOCK, 2, dtype, device)
        attention = _larger(attention, _error(*folded.run(batch)))
    sides = {
        (shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.dim),
        (shape.heads * shape.dim, shape.hidden),
        (shape.hidden, 2 * shape.wide),
        (shape.wide, shape.hidden),
        (shape.hidden, shape.vocabulary),
    }
    return ShapeError(attention, _products(sides, device, dtype))


def _prefill(kv_heads: int) -> AttentionBatch:
    """Prompts of some lengths, every fourth one behind cached tokens."""
    requests = max(4, -(-_ROWS_OF_PREFILL // kv_heads))
    return AttentionBatch(
        contexts=tuple((0, 0, 32, 0)[number % 4] for number in range(requests)),
        new=tuple((46, 111, 19, 84)[number % 4] for number in range(requests)),
    )


def _products(sides: Collection[tuple[int, int]], device: str, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for columns, out in sorted(sides):
        weight = (torch.randn((out, columns), generator=generator) * columns**-0.5).to(dtype)
        on_device = weight.to(device)
        # Some outputs tell as much of a tile as all of them do, and the host computes them in time.
        kept = torch.randperm(out, generator=generator)[:1024]
        for rows in _ROWS:
            x = torch.randn((rows, columns), generator=generator).to(dtype)
            found = torch.nn.functional.linear(x.to(device), on_device).cpu()[:, kept]
            worst = _larger(worst, _error(found, x.float() @ weight[kept].float().T))
    return worst


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return float((found.float() - expected).abs().max() / expected.abs().max())


def _larger(one: float, other: float) -> float:
    """The larger one; not a number where one of them is none."""
    return other if not other <= one else one
