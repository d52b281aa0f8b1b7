"""The folding loops against numpy's fancy indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.memory import fold_decode, fold_prefill, fold_slots

sizes = st.integers(1, 6)


def random_table(rng: np.random.Generator, blocks: int, layers: int, heads: int) -> np.ndarray:
    return rng.integers(0, 1 << 31, (blocks, layers, heads), dtype=np.int32)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(1, 30), sizes, st.integers(1, 9), st.integers(0, 6), st.integers(0, 9), st.integers(0, 3))
def test_blocks(blocks: int, layers: int, heads: int, requests: int, columns: int, spare: int) -> None:
    rng = np.random.default_rng(0)
    table = random_table(rng, blocks, layers, heads)
    block_table = rng.integers(0, blocks, (requests + spare, columns + spare), dtype=np.int32)
    picked = table[block_table[:requests, :columns]]  # [R, nb, L, H]
    out = np.empty((layers, requests * heads, columns), dtype=np.int32)
    fold_decode(table, block_table, requests, columns, out)
    np.testing.assert_array_equal(out, picked.transpose(2, 0, 3, 1).reshape(out.shape))
    fold_prefill(table, block_table, requests, columns, out)
    np.testing.assert_array_equal(out, picked.transpose(2, 3, 0, 1).reshape(out.shape))


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(1, 30), sizes, st.integers(1, 9), st.integers(0, 40), st.sampled_from([1, 16, 32, 48]))
def test_slots(blocks: int, layers: int, heads: int, tokens: int, block_tokens: int) -> None:
    rng = np.random.default_rng(0)
    table = random_table(rng, blocks, layers, heads)
    slots = rng.integers(-1, blocks * block_tokens, tokens, dtype=np.int64)
    out = np.empty((layers, tokens * heads), dtype=np.int64)
    fold_slots(table, slots, block_tokens, out)
    pages = table[slots // block_tokens].astype(np.int64)  # [T, L, H]; nonsense where padded
    expected = np.where(slots[:, None, None] < 0, -1, pages * block_tokens + (slots % block_tokens)[:, None, None])
    np.testing.assert_array_equal(out, expected.transpose(1, 0, 2).reshape(out.shape))


def test_torch_tensors_and_slices_of_larger_buffers() -> None:
    rng = np.random.default_rng(1)
    table = random_table(rng, 20, 3, 2)
    table.flags.writeable = False  # as the page table in shared memory is
    block_table = torch.from_numpy(rng.integers(0, 20, (8, 16), dtype=np.int32))
    buffer = torch.full((3, 16, 16), -7, dtype=torch.int32)
    fold_decode(table, block_table, 4, 5, buffer[:, :8, :5])
    picked = table[block_table[:4, :5].numpy()].transpose(2, 0, 3, 1).reshape(3, 8, 5)
    np.testing.assert_array_equal(buffer[:, :8, :5].numpy(), picked)
    assert (buffer[:, 8:] == -7).all()
    assert (buffer[:, :, 5:] == -7).all()
    slots = torch.tensor([5, 40, -1])
    out = torch.zeros((3, 10), dtype=torch.int64)
    fold_slots(table, slots, 16, out[:, :6])
    assert out[1, 2] == int(table[2, 1, 0]) * 16 + 8
    assert (out[:, 6:] == 0).all()


def test_blocks_beyond_the_table_are_refused() -> None:
    table = np.zeros((3, 1, 1), dtype=np.int32)
    out = np.full((1, 1, 1), 9, dtype=np.int32)
    for wrong in (3, -1, 1 << 30):
        with pytest.raises(IndexError, match=f"block {wrong} is not in the page table of 3 blocks"):
            fold_decode(table, np.array([[wrong]], dtype=np.int32), 1, 1, out)
    with pytest.raises(IndexError, match="block 3"):
        fold_slots(table, np.array([48]), 16, np.zeros((1, 1), dtype=np.int64))
    assert out[0, 0, 0] == 9


def test_shapes_and_types_are_checked() -> None:
    table = np.zeros((3, 2, 2), dtype=np.int32)
    blocks = np.zeros((4, 4), dtype=np.int32)
    good = np.zeros((2, 8, 4), dtype=np.int32)
    with pytest.raises(ValueError, match="fewer than num_reqs rows"):
        fold_decode(table, blocks, 5, 4, good)
    with pytest.raises(ValueError, match=r"\[layers, num_reqs \* kv_heads, nb\]"):
        fold_decode(table, blocks, 4, 3, good)
    with pytest.raises(ValueError, match="contiguous"):
        fold_decode(table, blocks, 4, 4, np.zeros((2, 4, 8), dtype=np.int32).transpose(0, 2, 1))
    with pytest.raises(TypeError):
        fold_decode(table, blocks.astype(np.int64), 4, 4, good)
    with pytest.raises(TypeError):
        fold_decode(table.astype(np.int64), blocks, 4, 4, good)
    with pytest.raises(ValueError, match=r"\[layers, tokens \* kv_heads\]"):
        fold_slots(table, np.zeros(3, dtype=np.int64), 16, np.zeros((2, 5), dtype=np.int64))
    with pytest.raises(ValueError, match="at least 1"):
        fold_slots(table, np.zeros(3, dtype=np.int64), 0, np.zeros((2, 6), dtype=np.int64))
