"""The bound on how far FlashAttention may split a context."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from muxserve.engine.cuda.splits import MAX_PARTIAL_BYTES, Splits

# Llama-3 8B on an H200: 32 query heads, 8 KV heads of 128.
LLAMA = Splits(group=4, kv_heads=8, head_dim=128, multiprocessors=132)


def partial_bytes(splits: Splits, parts: int, tokens: int) -> int:
    return 4 * parts * tokens * splits.kv_heads * splits.group * (splits.head_dim + 1)


def test_one_long_context_is_cut_until_the_gpu_is_full() -> None:
    assert LLAMA.choose(tokens=1, max_query_len=1, max_seq_len=8192) == 17  # 8 rows on 132 multiprocessors
    assert LLAMA.choose(tokens=1, max_query_len=1, max_seq_len=1024) == 8  # no more parts than tiles
    assert LLAMA.choose(tokens=1, max_query_len=1, max_seq_len=512) == 1


def test_a_prefill_that_fills_the_gpu_is_not_cut() -> None:
    assert LLAMA.choose(tokens=2048, max_query_len=2048, max_seq_len=8192) == 1


@pytest.mark.parametrize("tokens", [1, 64, 256, 2048, 8192])
def test_partial_results_stay_within_their_memory(tokens: int) -> None:
    for query in (1, 32, tokens):
        parts = LLAMA.choose(tokens, query, 32768)
        assert 1 <= parts <= 32
        assert parts == 1 or partial_bytes(LLAMA, parts, tokens) <= MAX_PARTIAL_BYTES
    fixed = LLAMA.fixed(tokens, 32)
    assert fixed == 1 or partial_bytes(LLAMA, fixed, tokens) <= MAX_PARTIAL_BYTES


def test_a_graph_s_bound_follows_from_its_size() -> None:
    assert LLAMA.fixed(8, 32) == 32
    assert LLAMA.fixed(8, 4) == 4
