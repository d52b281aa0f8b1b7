"""Steps of a small model that come out the same again and again: whether they do beside other processes, too.

On an H200 (driver 580.159.04) whole engines under percentages of MPS answered wrongly beside each other, while every
part of them was right alone. So what engines do is done here side by side, on one shared pool, and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from muxserve.probes.attention import DEVICE, AttentionBatch, FoldedAttention, PoolPages

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 8, 4, 64, 16, 2
_WIDE = 4
# bfloat16 has a step of 2^-8 at 1; a sum of some hundred products comes to a few of them.
TOLERANCE = 3e-2

BATCHES = {
    "prefill": AttentionBatch(contexts=(0,) * 8, new=(111, 46, 84, 19, 98, 67, 120, 75)),
    "decode": AttentionBatch(contexts=tuple(range(20, 180, 10)), new=(1,) * 16),
}
"""What the two kinds of engine compute in a step."""


@dataclass
class SameSteps:
    """Attention over pages of the shared pool, and matrix products as wide as a layer's, of one phase."""

    attend: Callable[[], torch.Tensor]
    multiply: Callable[[], torch.Tensor]
    error: float
    """Largest error of the first step against plain attention and float32, as a part of the largest value."""

    def __post_init__(self) -> None:
        self._expected = self._step()

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attend().clone(), self.multiply().clone()

    def difference(self) -> float:
        """Compute a step once more; its largest difference from the first, as a part of the largest value."""
        pairs = zip(self._step(), self._expected, strict=True)
        return max(_difference(found, expected) for found, expected in pairs)


def same_steps(
    phase: str,
    pool: torch.Tensor | None = None,
    first_page: int = 0,
    device: str = DEVICE,
    dtype: torch.dtype = torch.bfloat16,
) -> SameSteps:
    """Steps of a phase of `BATCHES` on up to 2,000 pages of `pool` [pages, 1, BLOCK, 2*DIM] from `first_page` on."""
    batch = BATCHES[phase]
    folded = FoldedAttention(
        HEADS, KV_HEADS, DIM, block=BLOCK, layers=LAYERS, dtype=dtype, device=device, pages=PoolPages(pool, first_page)
    )
    attend, expected = folded.repeated(batch)
    multiply, product = _products(sum(batch.new), device, dtype)
    error = max(_difference(attend(), expected), _difference(multiply(), product))
    return SameSteps(attend, multiply, error)


def _products(tokens: int, device: str, dtype: torch.dtype) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """A layer's products for so many tokens, and what they come to in float32."""
    generator = torch.Generator().manual_seed(2)
    hidden = HEADS * DIM
    up, down = (
        torch.randn(shape, generator=generator) for shape in ((_WIDE * hidden, hidden), (hidden, _WIDE * hidden))
    )
    x = torch.randn((tokens, hidden), generator=generator)
    x, up, down = (each.to(dtype).to(device) for each in (x, up * hidden**-0.5, down * (_WIDE * hidden) ** -0.5))

    def multiply() -> torch.Tensor:
        linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
        return linear(silu(linear(x, up)), down)

    inner = torch.nn.functional.silu((x.float() @ up.float().T).to(dtype).float()).to(dtype).float()
    return multiply, inner @ down.float().T


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the largest value; not a number where there is one in either."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max())
