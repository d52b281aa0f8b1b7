"""The step of folded attention that GPU tests run, tried on a CPU with FlashAttention in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends.mla import triton_mla

from muxserve.probes.attention import AttentionBatch, FoldedAttention
from tests.engine_cuda import paged_reference
from tests.engine_cuda.latent_step import decoded_from_latents


@pytest.mark.usefixtures("reference_flash")
@pytest.mark.parametrize(
    "batch",
    [
        AttentionBatch(contexts=(20, 1, 32), new=(1, 1, 1)),
        AttentionBatch(contexts=(0, 0), new=(5, 40)),
        AttentionBatch(contexts=(30, 0, 7), new=(1, 20, 9)),
    ],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_folded_attention_is_attention(batch: AttentionBatch, sinks: bool) -> None:
    folded = FoldedAttention(6, 2, 16, block=16, layers=2, dtype=torch.float32, device="cpu", sinks=sinks)
    output, expected = folded.run(batch)
    torch.testing.assert_close(output, expected, rtol=2e-4, atol=2e-5)


def test_attention_of_latents_reads_the_pages_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mla, "decode_attention_fwd", paged_reference.decode_attention_fwd)
    monkeypatch.setattr(triton_mla, "_compute_num_kv_splits", lambda *_: 1)
    output, expected = decoded_from_latents((40, 1, 16), heads=3, layers=2, block=16, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(output, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("reference_flash")
def test_a_graph_replayed_with_another_batch_computes_that_one() -> None:
    folded = FoldedAttention(6, 2, 16, block=16, layers=2, dtype=torch.float32, device="cpu")
    output, expected = folded.run(AttentionBatch(contexts=(20, 3, 33), new=(1, 1, 1)), replayed=True)
    torch.testing.assert_close(output, expected, rtol=2e-4, atol=2e-5)
