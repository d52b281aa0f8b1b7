"""Head-folded attention on the GPU against plain attention: kernels, metadata and FlashAttention together."""

from __future__ import annotations

import pytest
import torch

from muxserve.probes.attention import AttentionBatch, FoldedAttention
from tests.engine_cuda.latent_step import decoded_from_latents

# Heads, KV heads and head size of the quickstart's models.
QUICKSTART = [(4, 4, 64), (6, 2, 64), (4, 2, 128)]
SHAPES = [*QUICKSTART, (32, 8, 128), (32, 8, 64), (16, 16, 64), (8, 1, 128), (4, 4, 96)]
BATCHES = {
    "decode": AttentionBatch(contexts=(130, 1, 64, 700), new=(1, 1, 1, 1)),
    "prefill": AttentionBatch(contexts=(0, 0, 0), new=(5, 300, 64)),
    "chunks": AttentionBatch(contexts=(256, 64), new=(128, 100)),
    # More rows than SMs: a second wave of tiles, on a part of the SMs as well as on all.
    "many prompts": AttentionBatch(contexts=(0,) * 48, new=tuple(19 + 13 * number % 93 for number in range(48))),
    "mixed": AttentionBatch(contexts=(300, 0, 33, 128), new=(1, 200, 1, 60)),
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{'quickstart-' * (s in QUICKSTART)}{s[0]}-{s[1]}-{s[2]}")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_folded_attention_is_attention(shape: tuple[int, int, int], batch: str, block: int, sinks: bool) -> None:
    heads, kv_heads, dim = shape
    folded = FoldedAttention(heads, kv_heads, dim, block, layers=2, dtype=torch.bfloat16, sinks=sinks)
    output, expected = folded.run(BATCHES[batch])
    # bfloat16 has a step of 2^-8 at 1; FlashAttention accumulates in float32 and rounds once.
    torch.testing.assert_close(output.float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert (output.float() - expected.float()).abs().mean() < 2e-3


@pytest.mark.parametrize("block", [32, 64])
def test_attention_of_latents_is_attention(block: int) -> None:
    output, expected = decoded_from_latents((130, 1, 64, 700), heads=16, layers=2, block=block, dtype=torch.bfloat16)
    torch.testing.assert_close(output.float(), expected.float(), rtol=2e-2, atol=2e-2)
